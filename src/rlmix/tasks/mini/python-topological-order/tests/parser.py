"""Reads `python -m unittest -v`: stdout, stderr and result file are the arguments."""

import json
import re
import sys

LINE = re.compile(r"^(\w+) \(([\w.]+)\)(?: \.\.\. |.*\.\.\. )(ok|FAIL|ERROR|skipped.*)$")
WORDS = {"ok": "PASSED", "FAIL": "FAILED", "ERROR": "ERROR"}


def main(out, err, result):
    tests = []
    for line in open(out, errors="replace").read().split("\n") + open(
        err, errors="replace"
    ).read().split("\n"):
        match = LINE.match(line)
        if match:
            name, where, word = match.groups()
            full = where if where.endswith("." + name) else where + "." + name
            tests.append({"name": full, "status": WORDS.get(word, "SKIPPED")})
    with open(result, "w") as file:
        json.dump({"tests": tests}, file)


main(*sys.argv[1:4])
