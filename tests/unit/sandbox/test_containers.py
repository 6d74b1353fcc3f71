"""Command lines for container engines. The transport is held by test_protocol (`stdio`); no engine
runs here, so what Docker, Podman and Apptainer make of these lines was not tried."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from rlmix.core.errors import ConfigError, SandboxError
from rlmix.sandbox.backend import open_backend
from rlmix.sandbox.containers import ContainerSpec, apptainer_command, docker_command
from rlmix.sandbox.reap import remove_containers

from .conftest import LIMITS

SPEC = ContainerSpec(
    program="/usr/bin/docker",
    image="python:3.11",
    name="rlmix_1",
    run_id="r1",
    static="/scratch/static",
    template="/scratch/abc",
    limits=replace(LIMITS, cpus=1.5),
)


def option(line: list[str], name: str) -> list[str]:
    return [line[at + 1] for at, word in enumerate(line) if word == name]


def test_docker_gives_a_container_nothing_but_what_is_named() -> None:
    line = docker_command(SPEC, ["/bin/bash", "--norc", "loop.sh"])
    assert line[:2] == ["/usr/bin/docker", "run"]
    assert {"--rm", "--interactive", "--read-only"} <= set(line)
    assert option(line, "--network") == ["none"]
    assert option(line, "--cap-drop") == ["ALL"]
    assert option(line, "--security-opt") == ["no-new-privileges"]
    assert option(line, "--user") == ["1000:1000"]
    assert option(line, "--pull") == ["never"]
    assert option(line, "--label") == ["rlmix.run=r1"]
    assert option(line, "--volume") == [
        "/scratch/static:/run/rlmix/static:ro",
        "/scratch/abc:/run/rlmix/base:ro",
    ]
    assert "--privileged" not in line
    assert line[-4:] == ["/bin/bash", "python:3.11", "--norc", "loop.sh"]


def test_docker_is_told_every_limit() -> None:
    line = docker_command(SPEC, ["/bin/bash"])
    # 256 MiB, twice 8 MiB of files, 16 MiB of /dev/shm; no swap beside it.
    assert option(line, "--memory") == option(line, "--memory-swap") == ["288m"]
    assert option(line, "--pids-limit") == ["33"]
    assert option(line, "--cpus") == ["1.5"]
    assert [value.partition(":")[0] for value in option(line, "--tmpfs")] == ["/repo", "/tmp"]
    assert all("size=8m" in value for value in option(line, "--tmpfs"))
    assert "--cpus" not in docker_command(replace(SPEC, limits=LIMITS), ["/bin/bash"])


def test_apptainer_contains_everything_and_has_no_network() -> None:
    line = apptainer_command(replace(SPEC, program="apptainer", image="a.sif"), ["/bin/bash", "x"])
    assert {"--containall", "--cleanenv", "--no-privs", "--net"} <= set(line)
    assert option(line, "--network") == ["none"]
    assert option(line, "--memory") == ["256M"]
    assert option(line, "--scratch") == ["/repo", "/tmp"]
    assert line[-3:] == ["a.sif", "/bin/bash", "x"]


def test_an_engine_without_an_image_or_not_installed_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sandbox\.image is not set; name an image that has"):
        asyncio.run(open_backend("podman", LIMITS, tmp_path, "r"))
    if shutil.which("apptainer") is None:
        opening = open_backend("apptainer", LIMITS, tmp_path, "r", image="a.sif")
        with pytest.raises(SandboxError, match="no `apptainer` on PATH; install Apptainer"):
            asyncio.run(opening)


def test_an_engine_that_does_not_run_is_a_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    if shutil.which("docker") is None:
        pytest.skip("no docker client here")
    opening = open_backend("docker", LIMITS, tmp_path, "r", image="rlmix/no-such-image")
    with pytest.raises(SandboxError, match=r"cannot start image rlmix/no-such-image: .* pull "):
        asyncio.run(opening)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_containers_of_a_run_are_removed_by_their_label(tmp_path: Path) -> None:
    """An engine's client that writes down what it was asked, and knows two containers."""
    client = tmp_path / "client"
    client.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\n[ "$1" = ps ] && echo c1 c2\n')
    client.chmod(0o755)
    assert remove_containers(str(client), "r1") == 2
    assert (tmp_path / "asked").read_text().splitlines() == [
        "ps --all --quiet --filter label=rlmix.run=r1",
        "rm --force c1 c2",
    ]
    assert remove_containers(str(tmp_path / "missing"), "r1") == 0
