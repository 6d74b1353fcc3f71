#!/bin/bash
# Runs the shell tests named in the first argument, separated by commas; each prints ok or not ok.
for file in ${1//,/ }; do
  bash "$file"
done
