#!/bin/bash
# What the public verifier would do with this folder; rlmix runs the script and the parser itself.
set -e
cd /app
git apply /tests/test_patch.patch
bash /tests/run_script.sh "$1" >/tmp/stdout.log 2>/tmp/stderr.log || true
python3 /tests/parser.py /tmp/stdout.log /tmp/stderr.log /tmp/output.json
