"""What SGLang's own parser says to the arguments of a plan, before any server is started.

The parser is asked in SGLang's environment, by one process for all pools, and what it said is kept:
asking costs seconds of imports, since its settings import torch. Invariant: no verdict is no
refusal. Where it cannot be asked, the server itself will say at its start what it does not like.
"""

import hashlib
import json
import logging
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlmix.engine.sglang.environment import library_path
from rlmix.engine.sglang.launch import MODULE

log = logging.getLogger(__name__)

ASK_LIMIT_S = 120.0

_ANSWER = "rlmix-answer:"

# Reads {name: [word, ...]} and answers {name: what is wrong with it, or ""}.
_PROGRAM = """
import argparse, json, sys

class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ValueError(message)

from sglang.srt.server_args import ServerArgs

parser = Parser(prog="sglang serve", add_help=False)
ServerArgs.add_cli_args(parser)
said = {}
for name, words in json.load(sys.stdin).items():
    try:
        parser.parse_args(words)
        said[name] = ""
    except Exception as error:
        said[name] = str(error)
print("rlmix-answer:" + json.dumps(said))
"""


def refused_arguments(
    argvs: Mapping[str, Sequence[str]], *, cache: Path, environ: Mapping[str, str]
) -> dict[str, str]:
    """Pool -> SGLang's own words against its arguments, for the pools that it refuses.

    Args:
        argvs: planned commands, with their interpreters.
        cache: folder where answers are kept, by interpreter and arguments.
    """
    said: dict[str, str] = {}
    unknown: dict[str, list[str]] = {}
    for name, argv in argvs.items():
        kept = cache / f"{_key(argv)}.json"
        try:
            said[name] = str(json.loads(kept.read_bytes())["refused"])
        except (OSError, ValueError, KeyError):
            unknown[name] = list(argv)
    for python in {argv[0] for argv in unknown.values()}:
        asked = {name: argv for name, argv in unknown.items() if argv[0] == python}
        answers = _ask(Path(python), asked, environ)
        for name, refused in answers.items():
            _keep(cache / f"{_key(asked[name])}.json", {"refused": refused})
        said |= answers
    return {name: refused for name, refused in said.items() if refused}


def _ask(
    python: Path, argvs: Mapping[str, Sequence[str]], environ: Mapping[str, str]
) -> dict[str, str]:
    """Empty when there is no answer."""
    words = {name: _words(argv) for name, argv in argvs.items()}
    try:
        done = subprocess.run(
            [str(python), "-c", _PROGRAM],
            input=json.dumps(words),
            capture_output=True,
            text=True,
            timeout=ASK_LIMIT_S,
            check=False,
            env={**environ, **library_path(python, environ), "OMP_NUM_THREADS": "1"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("SGLang's parser cannot be asked: %s", error)
        return {}
    for line in done.stdout.splitlines():
        if line.startswith(_ANSWER):
            return {str(k): str(v) for k, v in json.loads(line.removeprefix(_ANSWER)).items()}
    log.warning("SGLang's parser gave no answer: %s", done.stderr.strip()[-300:])
    return {}


def _words(argv: Sequence[str]) -> list[str]:
    """The arguments alone, with a number in place of the port."""
    return ["30000" if word == "{port}" else word for word in argv[1 + len(MODULE) :]]


def _key(argv: Sequence[str]) -> str:
    """Changes with the arguments, and when the interpreter's environment was made anew."""
    python = Path(argv[0])
    try:
        made = (python.parent.parent / "pyvenv.cfg").stat().st_mtime_ns
    except OSError:
        made = 0
    text = json.dumps([str(python), made, _words(argv)])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _keep(path: Path, document: Mapping[str, str]) -> None:
    """Losing it costs a question, so a folder that cannot be written to is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        unfinished.write_text(json.dumps(document))
        unfinished.replace(path)
    except OSError as error:
        log.info("not kept: %s", error)
