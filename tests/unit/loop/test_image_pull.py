"""Images of tasks are pulled before a run; the engine is a script that writes down its words."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlmix.loop.image_pull import PullAsk, pull_here
from rlmix.tasks.prepare.set import prepare_set
from tests.unit.tasks.test_gates import make_set

# `broken*` is refused, `there*` is there already, everything else takes a moment.
ENGINE = """#!/bin/sh
echo "begin $*" >> "$(dirname "$0")/words"
case "$*" in
  "image inspect there"*) exit 0 ;;
  "image inspect "*) exit 1 ;;
  "pull --quiet broken"*) echo "a line" >&2; echo "denied: no such image" >&2; exit 1 ;;
  "pull --quiet slow"*) sleep 30 ;;
  "pull "*) sleep 0.3 ;;
esac
echo "end $*" >> "$(dirname "$0")/words"
"""


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "docker").write_text(ENGINE)
    (folder / "docker").chmod(0o755)
    return folder


def words(engine: Path, which: str = "") -> list[str]:
    lines = (engine / "words").read_text().splitlines()
    return [line for line in lines if line.startswith(which)]


def ask(*images: str, jobs: int = 2, limit_s: float = 20.0) -> PullAsk:
    return PullAsk(engine="docker", images=images, jobs=jobs, limit_s=limit_s)


def pull(*arguments: str, path: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", "from rlmix.cli import main; main()", "tasks", "pull", *arguments],
        cwd=cwd, env={**os.environ, "PATH": path, "COLUMNS": "100"},
        capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


def test_only_what_is_missing_is_pulled_and_never_more_at_a_time_than_asked(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{engine}:/usr/bin:/bin")
    told: list[str] = []
    found = pull_here(ask("a:1", "b:1", "c:1", "d:1", "there:1"), on_done=told.append)
    assert (found.pulled, found.there) == (("a:1", "b:1", "c:1", "d:1"), ("there:1",))
    assert found.is_good
    assert sorted(told) == ["a:1", "b:1", "c:1", "d:1", "there:1"]
    assert "begin pull --quiet a:1" in words(engine)
    assert "begin pull --quiet there:1" not in words(engine)
    running, most = 0, 0
    for line in words(engine):
        if " pull " in line:
            running += 1 if line.startswith("begin") else -1
            most = max(most, running)
    assert most == 2


def test_one_that_fails_or_takes_too_long_is_one_line_and_stops_no_other(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{engine}:/usr/bin:/bin")
    found = pull_here(ask("a:1", "broken:1", "slow:1", limit_s=1.0))
    assert found.pulled == ("a:1",)
    assert found.failed == (
        ("broken:1", "denied: no such image"),
        ("slow:1", "not done after 1 s; raise --timeout"),
    )
    assert not found.is_good


def test_the_command_takes_the_keys_of_a_run_and_says_what_failed_where(
    engine: Path, tmp_path: Path
) -> None:
    data, images, out = make_set(tmp_path / "set")
    prepare_set("swe_rebench", data, images, out, revision="r", limit=None)
    run = ("experiment=tiny", "sandbox.backend=docker")
    tasks = ("tasks.source=swe_rebench", f"tasks.path={out}")
    path = f"{engine}:/usr/bin:/bin"
    good = pull("--json", *run, *tasks, path=path, cwd=tmp_path)
    assert good.returncode == 0, good.stderr
    document = json.loads(good.stdout)
    assert document["images"] == ["hub/pack:1"]
    assert document["machines"][0]["pulled"] == ["hub/pack:1"]
    assert words(engine, "begin pull") == ["begin pull --quiet hub/pack:1"]
    bad = pull(*run, *tasks, "sandbox.image=broken:1", path=path, cwd=tmp_path)
    assert bad.returncode == 1
    assert "1 of 2 images" in bad.stdout
    assert "broken:1: denied: no such image" in bad.stdout


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["sandbox.backend=podman", "sandbox.image=x:1"], "no `podman` on PATH of this machine"),
        (["sandbox.backend=namespaces"], "allowed: docker, podman, apptainer"),
        (["sandbox.backend=docker"], "name one that has bash, git"),
    ],
)
def test_without_an_engine_or_an_image_there_is_nothing_to_do(
    keys: list[str], said: str, engine: Path, tmp_path: Path
) -> None:
    done = pull("experiment=tiny", *keys, path=f"{engine}:/usr/bin:/bin", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr.replace("\n", " ")
    assert not (engine / "words").exists()
