#!/bin/bash
tr -cs 'A-Za-z' '\n' < "$1" | sort | uniq -c | sort -rn |
  awk '{print $1, $2}'
