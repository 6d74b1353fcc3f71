"""Every backend that this machine can run, opened the way its users open it.

`stdio` is the container backend with bubblewrap in the engine's place: the same three descriptors
and the same first process as with Docker, which needs a daemon.
"""

import asyncio
import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlmix.core.errors import SandboxError
from rlmix.sandbox import bubblewrap
from rlmix.sandbox.backend import make_folder, open_backend
from rlmix.sandbox.containers import ContainerBackend, ContainerSpec, Engine
from rlmix.sandbox.link import RUN_MARK
from rlmix.sandbox.protocol import SandboxBackend, SandboxLimits
from rlmix.sandbox.reap import marked_processes
from rlmix.sandbox.wire import TOKEN_VARIABLE

NAMES = ("namespaces", "weak", "remote", "stdio")


def bubblewrap_command(spec: ContainerSpec, inside: list[str]) -> list[str]:
    fixed = bubblewrap.fixed_arguments(
        spec.program,
        static=spec.static,
        prefix=bubblewrap.interpreter_prefix(),
        limits=spec.limits,
        is_root_outside=os.geteuid() == 0,
    )
    template = ["--ro-bind", spec.template, bubblewrap.BASE, "--remount-ro", "/"]
    return [*fixed, *template, "--chdir", "/", "--", *inside]


@contextlib.contextmanager
def running_server(folder: Path, *flags: str, token: str) -> Iterator[dict[str, Any]]:
    """`python -m rlmix.sandbox.server` until the block ends; what its ready file says."""
    ready = folder / "ready.json"
    process = subprocess.Popen(
        [sys.executable, "-m", "rlmix.sandbox.server", "--ready-file", str(ready), *flags],
        env={**os.environ, TOKEN_VARIABLE: token},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    deadline_s = time.monotonic() + 60
    while not ready.exists() and process.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.02)
    try:
        assert ready.exists(), process.stderr.read()
        yield json.loads(ready.read_text())
    finally:
        process.terminate()
        process.wait(30)
        process.stderr.close()
        ready.unlink(missing_ok=True)


@contextlib.contextmanager
def opened(
    name: str, runner: asyncio.Runner, scratch: Path, run_id: str, limits: SandboxLimits
) -> Iterator[SandboxBackend]:
    """An open backend called `name`; skips where the machine forbids it."""
    with contextlib.ExitStack() as stack:
        if name == "remote":
            token = secrets.token_hex(16)
            ready = stack.enter_context(
                running_server(scratch.parent, "--scratch", str(scratch / "server"), token=token)
            )
            os.environ[TOKEN_VARIABLE] = token
            stack.callback(os.environ.pop, TOKEN_VARIABLE)
            opening = open_backend("remote", limits, scratch, run_id, servers=(ready["url"],))
        elif name == "stdio":
            opening = _open_stdio(scratch, run_id, limits)
        else:
            opening = open_backend(name, limits, scratch, run_id)
        try:
            backend = runner.run(opening)
        except SandboxError as error:
            pytest.skip(f"this machine forbids {name}: {error}")
        try:
            yield backend
        finally:
            runner.run(backend.close())
    assert marked_processes(RUN_MARK, run_id) == []


async def _open_stdio(scratch: Path, run_id: str, limits: SandboxLimits) -> SandboxBackend:
    folder = scratch / "stdio"
    make_folder(folder)
    backend = ContainerBackend(
        name="stdio",
        engine=Engine(command=bubblewrap_command, has_exec=False, install=""),
        program=str(bubblewrap.find_bwrap()),
        image="none",
        limits=limits,
        folder=folder,
        run_id=run_id,
    )
    await backend.open()
    return backend
