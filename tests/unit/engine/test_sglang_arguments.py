"""Asking SGLang's parser: an answer is kept, and no answer is no refusal."""

import json
import os
import sys
from pathlib import Path

from rlmix.engine.sglang.arguments import _key, refused_arguments

MODULE = ("-m", "sglang.launch_server")


def test_an_environment_without_sglang_refuses_nothing_and_nothing_is_kept(tmp_path: Path) -> None:
    argvs = {"h100": (sys.executable, *MODULE, "--nonsense", "1")}
    assert refused_arguments(argvs, cache=tmp_path, environ=os.environ) == {}
    assert list(tmp_path.iterdir()) == []


def test_a_kept_answer_is_given_without_asking(tmp_path: Path) -> None:
    argvs = {
        "good": ("/no/python", *MODULE, "--port", "{port}"),
        "bad": ("/no/python", *MODULE, "--nonsense", "1"),
    }
    for name, refused in (("good", ""), ("bad", "unrecognized arguments: --nonsense 1")):
        path = tmp_path / f"{_key(argvs[name])}.json"
        path.write_text(json.dumps({"refused": refused}))
    # The interpreter does not exist, so an answer can only be a kept one.
    assert refused_arguments(argvs, cache=tmp_path, environ={}) == {
        "bad": "unrecognized arguments: --nonsense 1"
    }


def test_the_answer_is_for_these_arguments_and_this_environment(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    argv = (str(python), *MODULE, "--tp-size", "1")
    before = _key(argv)
    assert before != _key((*argv[:-1], "2"))
    (tmp_path / "pyvenv.cfg").write_text("made")
    assert before != _key(argv)
