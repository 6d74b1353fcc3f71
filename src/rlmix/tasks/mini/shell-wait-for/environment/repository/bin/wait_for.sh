#!/bin/bash
limit=$1
shift
while ! $@; do
  sleep 1
done
echo after
