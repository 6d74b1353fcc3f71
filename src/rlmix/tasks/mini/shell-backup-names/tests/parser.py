"""Reads lines `ok NAME` and `not ok NAME`: stdout, stderr and result file are the arguments."""

import json
import sys


def main(out, err, result):
    tests = []
    for line in open(out, errors="replace"):
        line = line.strip()
        if line.startswith("not ok "):
            tests.append({"name": line[7:], "status": "FAILED"})
        elif line.startswith("ok "):
            tests.append({"name": line[3:], "status": "PASSED"})
    with open(result, "w") as file:
        json.dump({"tests": tests}, file)


main(*sys.argv[1:4])
