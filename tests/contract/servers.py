"""The three engines as processes in a group of their own, ended by its id."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.contract.checkpoints import CONTEXT, VOCAB

MAX_RUNNING = 8
START_LIMIT_S = 400.0
"""The real server takes 35 to 60 s on a quiet machine."""
STOP_LIMIT_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One running server and what is known about it."""

    name: str
    kind: str
    """embedded, scripted or sglang."""
    url: str
    folders: Mapping[int, Path]
    """Two published versions of its model."""
    reference: Any
    """`.logprobs(version, ids, num_new=, temperature=)`."""
    mean_nats: float
    """How far sampler logprobs may be from the reference's on average: rounding to BF16."""
    max_nats: float
    long_tokens: int
    """A turn of so many takes seconds: long enough to do something in the middle of it."""


def sglang_python() -> Path | None:
    """The interpreter that has the real SGLang, where there is one."""
    folder = os.environ.get("RLMIX_SGLANG_ENV") or "~/.cache/rlmix/sglang-0.5.23"
    python = Path(folder).expanduser() / "bin" / "python"
    is_complete = (python.parent.parent / ".rlmix-sglang").is_file()
    return python if python.is_file() and is_complete else None


@contextmanager
def embedded(folder: Path, scratch: Path) -> Iterator[str]:
    argv = [
        sys.executable, "-m", "rlmix.engine.embedded", "--model-path", str(folder),
        "--accelerator", "cpu", "--weights", "bf16", "--activations", "bf16", "--kv", "bf16",
        "--attention", "torch_native", "--max-running-requests", str(MAX_RUNNING),
        "--log-level", "warning",
    ]  # fmt: skip
    with _ours(argv, scratch) as url:
        yield url


@contextmanager
def scripted(folder: Path, scratch: Path) -> Iterator[str]:
    argv = [
        sys.executable, "-m", "rlmix.engine.scripted", "--model-path", str(folder),
        "--accelerator", "cpu", "--weights", "bf16", "--kv", "bf16", "--attention", "none",
        "--max-running-requests", str(MAX_RUNNING), "--vocab-size", str(VOCAB),
        "--context-length", str(CONTEXT), "--token-s", "0.01",
    ]  # fmt: skip
    with _ours(argv, scratch) as url:
        yield url


@contextmanager
def _ours(argv: Sequence[str], scratch: Path) -> Iterator[str]:
    ready = scratch / "ready.json"
    argv = [*argv, "--ready-file", str(ready), "--parent-pid", str(os.getpid())]
    with _process(argv, {}, scratch / "server.log") as process:
        _wait(process, ready.exists, scratch / "server.log")
        yield json.loads(ready.read_text())["url"]


@contextmanager
def sglang(folder: Path, scratch: Path) -> Iterator[str]:
    """The real server on the CPU, as a plan for one would start it."""
    python = sglang_python()
    assert python is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    stand_in = python.parent.parent / "no-gpu-driver"
    env = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
    if stand_in.is_dir():
        env["LD_LIBRARY_PATH"] = str(stand_in)
    argv = [
        str(python), "-m", "sglang.launch_server", "--model-path", str(folder),
        "--host", "127.0.0.1", "--port", str(port), "--device", "cpu",
        "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
        "--disable-overlap-schedule", "--sleep-on-idle", "--enable-metrics",
        "--mem-fraction-static", "0.3", "--max-total-tokens", "8192",
        "--context-length", str(CONTEXT), "--max-running-requests", str(MAX_RUNNING),
        "--weight-version", "0", "--skip-server-warmup",
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with _process(argv, env, scratch / "server.log") as process:
        _wait(process, lambda: _answers(f"{url}/ready"), scratch / "server.log")
        yield url


@contextmanager
def _process(
    argv: Sequence[str], env: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        )
    try:
        yield process
    finally:
        # The group, because SGLang's scheduler and detokenizer are children of the server.
        for signum in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None or signum == signal.SIGKILL:
                try:
                    os.killpg(process.pid, signum)
                except ProcessLookupError:
                    break
                try:
                    process.wait(STOP_LIMIT_S)
                except subprocess.TimeoutExpired:
                    continue


def _wait(process: subprocess.Popen[bytes], is_ready: Any, log: Path) -> None:
    deadline_s = time.monotonic() + START_LIMIT_S
    while not is_ready():
        tail = log.read_text(errors="replace")[-2000:]
        assert process.poll() is None, f"the server ended before it was ready:\n{tail}"
        assert time.monotonic() < deadline_s, f"not ready after {START_LIMIT_S:g} s:\n{tail}"
        time.sleep(0.1)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False
