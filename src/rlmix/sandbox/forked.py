"""Runs a Python program of ours inside a sandbox as a fork of the launcher's warm interpreter.

Why not `python file.py` inside: starting an interpreter and importing `unittest` costs 30 ms of
CPU, a fork that joins the sandbox's namespaces about 2.

Invariant: no descriptor outlives the call, and what the program started dies with its sandbox.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator

from rlmix.core.errors import SandboxError
from rlmix.sandbox.link import LauncherLink
from rlmix.sandbox.output import OutputRing
from rlmix.sandbox.protocol import EXIT_TIMED_OUT, PythonResult

MAX_REPORT_BYTES = 4 << 20
MAX_OUTPUT_BYTES = 64 << 20
"""Nobody reads what comes after; the writer then waits until its time is up."""
_AFTER_KILL_S = 5.0
_READ_BYTES = 1 << 16


async def run_forked(
    link: LauncherLink,
    request: dict[str, object],
    *,
    payload: bytes,
    timeout_s: float,
    output_chars: int,
    kill_sandbox: Callable[[], None],
) -> PythonResult:
    """Send `payload` to a fork of the launcher and collect its report and output.

    Raises:
        SandboxError: the launcher ended.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int | None] = loop.create_future()
    ring, report = OutputRing(output_chars), bytearray()
    timed_out, number = False, 0

    def on_end(status: int | None) -> None:
        if not ended.done():
            ended.set_result(status)

    with _pipe() as (report_fd, report_write), _pipe() as (output_fd, output_write):
        with _in_memory(payload) as source, _closing(report_write, output_write):
            number = await link.spawn(request, [source, report_write, output_write], on_end)
        readers = [
            _Reader(report_fd, report.extend, MAX_REPORT_BYTES),
            _Reader(output_fd, ring.write, MAX_OUTPUT_BYTES),
        ]
        try:
            done, _ = await asyncio.wait([ended], timeout=timeout_s)
            if not done:
                timed_out = True
                kill_sandbox()
                await link.kill(number)
                await asyncio.wait([ended], timeout=_AFTER_KILL_S)
        finally:
            if not ended.done():
                kill_sandbox()
            for reader in readers:
                reader.stop()
    status = ended.result() if ended.done() else None
    if status is None and not timed_out:
        raise SandboxError("sandbox: its launcher process ended")
    return PythonResult(
        report=bytes(report),
        output=ring.text()[0],
        exit_code=EXIT_TIMED_OUT if timed_out else status or 0,
        timed_out=timed_out,
    )


class _Reader:
    """Moves bytes from a pipe to a sink while the event loop runs, up to a limit."""

    def __init__(self, fd: int, sink: Callable[[bytes], object], room_bytes: int) -> None:
        self._fd, self._sink, self._room_bytes = fd, sink, room_bytes
        asyncio.get_running_loop().add_reader(fd, self._read)

    def _read(self) -> bool:
        """True when there may be more."""
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return False
        self._sink(data[: self._room_bytes])
        self._room_bytes -= len(data)
        if not data or self._room_bytes <= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            return False
        return True

    def stop(self) -> None:
        """Take what is in the pipe now, then look no more."""
        while self._room_bytes > 0 and self._read():
            pass
        asyncio.get_running_loop().remove_reader(self._fd)


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    """A pipe whose reading end does not block; the writing end is the caller's to close."""
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(read_fd, False)
    try:
        yield read_fd, write_fd
    finally:
        os.close(read_fd)


@contextlib.contextmanager
def _closing(*fds: int) -> Iterator[None]:
    try:
        yield
    finally:
        for fd in fds:
            os.close(fd)


@contextlib.contextmanager
def _in_memory(data: bytes) -> Iterator[int]:
    """A file of `data` without a name, so that nothing on disk ever holds it."""
    fd = os.memfd_create("task", os.MFD_CLOEXEC)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        yield fd
    finally:
        os.close(fd)
