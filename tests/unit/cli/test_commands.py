"""The commands as a user calls them: exit codes, one JSON document, honest sentences."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_help_names_every_command_and_loads_nothing_heavy(python: Run, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from rlmix.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as ending:\n"
        "    heavy = {'torch', 'ray', 'hydra', 'omegaconf', 'transformers', 'numpy', 'aiohttp'}\n"
        "    print('loaded:', sorted(heavy & set(sys.modules)), 'code:', ending.code)\n"
    )
    done = python(code, "--help")
    assert "loaded: [] code: 0" in done.stdout
    for command in ("train", "eval", "scale", "diff-logprobs", "runs", "doctor", "tasks"):
        assert f"\n  {command} " in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_documented_wrong_request_is_refused_within_three_seconds(
    rlmix: Run, tmp_path: Path
) -> None:
    started_s = time.monotonic()
    done = rlmix("train", "pools.h100.weights=fp9", "loop.stepz=3")
    own_cpu_s = time.monotonic() - started_s
    assert done.returncode == 2
    assert "did you mean loop.steps?" in done.stderr
    assert "use one of bf16, fp8, nvfp4; did you mean fp8?" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []
    # 0.8 s on an idle machine; the limit leaves room for a busy one.
    assert own_cpu_s < 10


def test_with_json_a_wrong_request_is_one_document(rlmix: Run) -> None:
    done = rlmix("train", "loop.steps=0", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout) == {
        "error": "loop.steps: got 0; use 1 or more",
        "exit_code": 2,
    }


def test_with_json_wrong_usage_is_one_document_too(rlmix: Run) -> None:
    done = rlmix("train", "--json", "--no-such-option")
    assert done.returncode == 2
    assert json.loads(done.stdout)["exit_code"] == 2
    assert "--no-such-option" in done.stderr


def test_the_plan_is_printed_and_nothing_is_started(rlmix: Run, tmp_path: Path) -> None:
    done = rlmix("train", "--cfg", "plan", "pools.h100.replicas=2")
    assert done.returncode == 0, done.stderr
    assert "24.62 USD per hour (modelled); nothing was started." in done.stdout
    assert "--accelerator rtx_pro_6000" in done.stdout
    assert "emulated on this machine's CPU" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_plan_as_json_is_exactly_one_document(rlmix: Run) -> None:
    done = rlmix("train", "pools=two", "--cfg", "plan", "--json")
    plan = json.loads(done.stdout)
    assert list(plan["pools"]) == ["b200", "a100"]
    assert plan["usd_per_hour"] == pytest.approx(6.71)
    assert plan["pools"]["b200"]["argv"][0] == sys.executable


def test_the_configuration_is_printed_as_yaml_and_as_json(rlmix: Run) -> None:
    import yaml

    text = rlmix("train", "--cfg", "config", "loop.steps=7").stdout
    document = rlmix("train", "--cfg", "config", "loop.steps=7", "--json").stdout
    assert yaml.safe_load(text) == json.loads(document)
    assert json.loads(document)["loop"]["steps"] == 7


def test_a_model_that_is_not_there_is_a_wrong_request(rlmix: Run) -> None:
    done = rlmix("train", "model.path=nowhere", "--cfg", "plan")
    assert done.returncode == 2
    assert "model.path='nowhere'" in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["scale", "pools", "h100=2"],
        ["runs", "attach", "x"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_what_needs_a_run_that_is_not_there_is_answered_with_one_sentence(
    rlmix: Run, command: list[str]
) -> None:
    done = rlmix(*command, "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["exit_code"]) == (2, 2)
    assert "rlmix train" in document["error"] or "no run 'x' in runs" in document["error"]
    assert "\n" not in document["error"]


def test_a_run_of_a_newer_format_is_said_to_be_one(rlmix: Run, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "x"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text('{"schema_version": "9.0", "run_id": "r"}')
    done = rlmix("runs", "attach", "x")
    assert done.returncode == 2
    assert "schema_version is 9.0" in done.stderr
    listed = json.loads(rlmix("runs", "list", "--json").stdout)
    assert listed["runs"] == []
    assert "schema_version is 9.0" in listed["unreadable"]["x"]


def test_resuming_what_is_not_there_is_a_wrong_request(rlmix: Run) -> None:
    done = rlmix("train", "--resume", "ghost")
    assert done.returncode == 2
    assert "ghost" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_resumed_run_keeps_its_name(rlmix: Run) -> None:
    done = rlmix("train", "--resume", "x", "run.name=y")
    assert done.returncode == 2
    assert "--resume continues the run under its own name" in done.stderr


def test_anything_a_library_prints_stays_out_of_the_document(python: Run) -> None:
    code = (
        "import os, sys, typer\n"
        "from rlmix.cli.answer import Answer, answered\n"
        "@answered\n"
        "def noisy(as_json: bool = True) -> Answer:\n"
        "    print('from python'); os.system('echo from a child')\n"
        "    return Answer(document={'a': 1}, view=lambda: 'for people', code=3)\n"
        "app = typer.Typer(); app.command()(noisy); app()\n"
    )
    done = python(code)
    assert json.loads(done.stdout) == {"a": 1}
    assert {"from python", "from a child", "for people"} <= set(done.stderr.splitlines())
    assert done.returncode == 3


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("ConfigError", 2),
        ("PlanError", 2),
        ("DataError", 2),
        ("EngineError", 1),
        ("TrainerError", 1),
    ],
)
def test_errors_have_their_exit_codes(python: Run, error: str, code: int) -> None:
    program = (
        "import typer\n"
        "from rlmix.cli.answer import Answer, answered\n"
        f"from rlmix.core.errors import {error}\n"
        "@answered\n"
        f"def fails(as_json: bool = False) -> Answer: raise {error}('what went wrong')\n"
        "app = typer.Typer(); app.command()(fails); app()\n"
    )
    done = python(program)
    assert done.returncode == code
    assert done.stderr == "error: what went wrong\n"


def test_an_interrupt_exits_with_130(python: Run) -> None:
    program = (
        "import typer\n"
        "from rlmix.cli.answer import Answer, answered\n"
        "@answered\n"
        "def waits(as_json: bool = False) -> Answer: raise KeyboardInterrupt\n"
        "app = typer.Typer(); app.command()(waits); app()\n"
    )
    done = python(program)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
