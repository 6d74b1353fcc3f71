#!/bin/bash
# Runs the unittest files named in the first argument, separated by commas.
for file in ${1//,/ }; do
  module=${file%.py}
  python3 -m unittest -v "${module//\//.}"
done
