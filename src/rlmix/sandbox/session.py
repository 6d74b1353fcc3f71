"""One running sandbox, seen from the worker: a control socket, an output pipe, a process.

Who fills the waits: the control socket (the first process answers), the launcher (a child ended)
and timers. Every wait here has a limit.

Invariant: whatever happens, `destroy` ends every process, and the descriptors are closed once.
"""

import asyncio
import contextlib
import marshal
import os
import signal
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

from rlmix.core.errors import SandboxError
from rlmix.sandbox.forked import run_forked
from rlmix.sandbox.link import LauncherLink
from rlmix.sandbox.output import OutputRing
from rlmix.sandbox.placement import Placement, machine_oom_kills
from rlmix.sandbox.protocol import (
    EXIT_KILLED,
    EXIT_NOT_RUN,
    EXIT_TIMED_OUT,
    CommandResult,
    PythonResult,
    SandboxLimits,
    WorkTreeError,
)
from rlmix.sandbox.shell import as_request, ends_with_submit

MAX_COMMAND_BYTES = 1 << 20
MAX_STREAM_BYTES = 64 << 20
"""A command that prints more is stopped; nobody reads it, and reading costs CPU."""
MAX_DIFF_BYTES = 16 << 20
KILL_GRACE_S = 2.0
"""From the polite stop (kill all but the first process) to killing the whole sandbox."""
CREATE_TIMEOUT_S = 30.0
CAPTURE_TIMEOUT_S = 60.0
DESTROY_TIMEOUT_S = 5.0
_READ_BYTES = 1 << 16
_LOST = "the command ended its sandbox, and the edits in it are gone"


@dataclass(kw_only=True, slots=True)
class _Call:
    """The request in flight."""

    answer: "asyncio.Future[tuple[int, bool] | None]"
    """(exit status, submitted), or None when the sandbox ended."""
    sink: Callable[[bytes], None]
    room_bytes: int
    timed_out: bool = False
    flooded: bool = False
    stop_note: str = ""
    """Why somebody else stopped the command."""


class ShellSandbox:
    """A sandbox whose first process is `loop.sh`. Satisfies `protocol.Sandbox`."""

    def __init__(
        self,
        link: LauncherLink,
        placement: Placement,
        limits: SandboxLimits,
        *,
        on_end: Callable[[], None],
    ) -> None:
        self._link = link
        self._place = placement
        self._limits = limits
        self._on_end = on_end
        self._control: socket.socket | None = None
        self._output_fd = -1
        self._pidfd = -1
        self._lines = bytearray()
        self._call: _Call | None = None
        self._child = 0
        self._num_commands = 0
        self._killed_by_us = False
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int | None] = self._loop.create_future()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._oom_kills = self._count_oom_kills()
        self.pid = 0
        """First process, in the worker's own process numbering."""

    # --- start and end

    async def start(self) -> None:
        """Start the processes and wait until the repository is in place."""
        ours, theirs = socket.socketpair()
        # The kernel then attaches the sender's pid, translated to our pid namespace.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        ours.setblocking(False)
        self._control = ours
        self._output_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._output_fd, False)
        try:
            self._child = await self._link.spawn(
                self._place.start_request(self._limits), [theirs.fileno(), write_fd], self._on_exit
            )
        finally:
            theirs.close()
            os.close(write_fd)
        self._loop.add_reader(ours.fileno(), self._on_control)
        try:
            async with asyncio.timeout(CREATE_TIMEOUT_S):
                waits: list[asyncio.Future[Any]] = [self._ready, self._ended]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise SandboxError(
                f"sandbox: not ready after {CREATE_TIMEOUT_S:g} s: {self._printed()}"
            ) from None
        if not self._ready.done():
            status = self._ended.result()
            raise SandboxError(f"sandbox: did not start (status {status}): {self._printed()}")
        self._pidfd = os.pidfd_open(self.pid)

    def _printed(self) -> str:
        ring = OutputRing(2000)
        self._drain(ring.write)
        return ring.text()[0].strip() or "it printed nothing"

    def kill(self) -> None:
        """Kill every process now; does not wait."""
        self._killed_by_us = True
        self._signal(signal.SIGKILL)

    def stop(self, why: str) -> None:
        """End every process but the first one, and the command with the words `why`."""
        if self._call is not None:
            self._call.stop_note = why
        self._stop_politely()

    def _signal(self, number: int) -> None:
        if self._pidfd >= 0 and not self._ended.done():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    async def destroy(self) -> None:
        self.kill()
        try:
            if self._child and not self._ended.done():
                if self._pidfd < 0:
                    await self._link.kill(self._child)
                async with asyncio.timeout(DESTROY_TIMEOUT_S):
                    await asyncio.shield(self._ended)
        except TimeoutError:
            await self._link.kill(self._child)
        finally:
            self._release()

    def _release(self) -> None:
        if self._control is None:
            return
        self._loop.remove_reader(self._control.fileno())
        self._loop.remove_reader(self._output_fd)
        self._control.close()
        self._control = None
        os.close(self._output_fd)
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        self._on_end()

    def _on_exit(self, status: int | None) -> None:
        if not self._ended.done():
            self._ended.set_result(status)
        if self._call is not None and not self._call.answer.done():
            self._call.answer.set_result(None)

    # --- talking to the first process

    def _on_control(self) -> None:
        assert self._control is not None
        try:
            data, ancillary, _, _ = self._control.recvmsg(4096, socket.CMSG_SPACE(12))
        except BlockingIOError:
            return
        except ConnectionError:
            data, ancillary = b"", []
        if not data:
            self._loop.remove_reader(self._control.fileno())
            return
        if not self._ready.done():
            for level, kind, raw in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                    self.pid = struct.unpack("3i", raw)[0]
        self._lines += data
        while (end := self._lines.find(b"\n")) >= 0:
            line = bytes(self._lines[:end])
            del self._lines[: end + 1]
            self._on_line(line)
        del self._lines[:-64]

    def _on_line(self, line: bytes) -> None:
        if line == b"ready" and not self._ready.done():
            self._ready.set_result(None)
        elif self._call is not None and not self._call.answer.done():
            words = line.split()
            if len(words) == 2 and words[0].isdigit():
                self._call.answer.set_result((int(words[0]), words[1] == b"1"))

    def _on_output(self) -> None:
        call = self._call
        if call is None:
            return
        try:
            data = os.read(self._output_fd, _READ_BYTES)
        except BlockingIOError:
            return
        call.sink(data)
        call.room_bytes -= len(data)
        if not data or call.room_bytes < 0:
            self._loop.remove_reader(self._output_fd)
        if call.room_bytes < 0 and not call.flooded:
            call.flooded = True
            self._stop_politely()

    def _drain(self, sink: Callable[[bytes], None]) -> None:
        """Take what the pipe holds now; whoever still writes is not waited for."""
        for _ in range(16):
            try:
                data = os.read(self._output_fd, _READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                return
            sink(data)

    def _stop_politely(self) -> None:
        self._signal(signal.SIGUSR1)
        call = self._call

        def kill_if_still_waiting() -> None:
            if self._call is call and call is not None and not call.answer.done():
                self.kill()

        self._loop.call_later(KILL_GRACE_S, kill_if_still_waiting)

    def _time_out(self) -> None:
        if self._call is not None:
            self._call.timed_out = True
            self._stop_politely()

    async def _request(
        self,
        verb: str,
        text: bytes,
        *,
        timeout_s: float,
        sink: Callable[[bytes], None],
        room_bytes: int,
    ) -> tuple[_Call, tuple[int, bool] | None]:
        """Send one request and wait for its answer; None when the agent ended the sandbox."""
        assert self._call is None, "a sandbox runs one command at a time"
        if self._control is None or self._ended.done():
            self._check_infrastructure()
            call = _Call(answer=self._loop.create_future(), sink=sink, room_bytes=room_bytes)
            return call, None
        self._drain(lambda _: None)
        call = _Call(answer=self._loop.create_future(), sink=sink, room_bytes=room_bytes)
        self._call = call
        self._loop.add_reader(self._output_fd, self._on_output)
        timer = self._loop.call_later(timeout_s, self._time_out)
        try:
            await self._send(as_request(verb, text), call.answer)
            answer = await call.answer
        finally:
            timer.cancel()
            self._call = None
            if self._control is not None:
                self._loop.remove_reader(self._output_fd)
        if not call.flooded:
            if self._place.settle_s and answer is not None:
                await asyncio.sleep(self._place.settle_s)
            self._drain(sink)
        if answer is None:
            self._check_infrastructure()
        return call, answer

    async def _send(self, data: bytes, answer: "asyncio.Future[tuple[int, bool] | None]") -> None:
        assert self._control is not None
        try:
            sent = self._control.send(data)
        except BlockingIOError:
            sent = 0
        except ConnectionError:
            return  # It is gone; the launcher's report completes `answer`.
        if sent < len(data):
            rest = asyncio.ensure_future(self._loop.sock_sendall(self._control, data[sent:]))
            waits: list[asyncio.Future[Any]] = [rest, answer]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not rest.done():
                rest.cancel()
            await asyncio.gather(rest, return_exceptions=True)

    def _check_infrastructure(self) -> None:
        """Raise unless the agent may be the one who ended this sandbox."""
        status = self._ended.result() if self._ended.done() else 0
        if status is None:
            raise SandboxError("sandbox: its launcher process ended")
        if status < 0 and not self._killed_by_us:
            lease_s = self._limits.lease_s
            or_lease = "" if lease_s is None else f", or its lease of {lease_s:g} s ended"
            raise SandboxError(f"sandbox: killed from outside by signal {-status}{or_lease}")
        if self._num_commands == 0:
            raise SandboxError(f"sandbox: ended (status {status}) before it was used")

    # --- what callers use

    async def run(
        self, command: str, timeout_s: float | None = None, output_chars: int | None = None
    ) -> CommandResult:
        started_s = time.monotonic()
        text = _command_bytes(command)
        if isinstance(text, str):
            return CommandResult(exit_code=EXIT_NOT_RUN, output=text)
        limit_s = self._limits.command_timeout_s if timeout_s is None else timeout_s
        ring = OutputRing(self._limits.output_chars if output_chars is None else output_chars)
        self._num_commands += 1
        call, answer = await self._request(
            "run", text, timeout_s=limit_s, sink=ring.write, room_bytes=MAX_STREAM_BYTES
        )
        output, truncated = ring.text()
        status, signalled = answer or (EXIT_KILLED, False)
        if answer is None:
            output = _with_note(output, _LOST)
        elif call.timed_out:
            status = EXIT_TIMED_OUT
            output = _with_note(output, f"stopped after {limit_s:g} s; use & for long work")
        elif call.stop_note:
            output = _with_note(output, f"stopped: {call.stop_note}")
        elif call.flooded:
            output = _with_note(output, f"stopped after {MAX_STREAM_BYTES >> 20} MiB of output")
        oom = status == EXIT_KILLED and not call.flooded and self._ran_out_of_memory()
        if oom:
            note = f"killed: out of memory, the limit is {self._limits.memory_mib} MiB"
            output = _with_note(output, note)
        return CommandResult(
            exit_code=status,
            output=output,
            truncated=truncated or call.flooded,
            timed_out=call.timed_out,
            oom=oom,
            duration_s=time.monotonic() - started_s,
            submitted=signalled and status == 0 and ends_with_submit(command),
            sandbox_lost=answer is None,
        )

    async def capture_diff(self, max_bytes: int = MAX_DIFF_BYTES) -> bytes:
        # The second try takes back unreadable modes and clears a full scratch folder.
        for kind in ("plain", "repair"):
            chunks: list[bytes] = []
            call, answer = await self._request(
                "capture",
                f"{kind} {self._place.base_commit}".encode(),
                timeout_s=CAPTURE_TIMEOUT_S,
                sink=chunks.append,
                room_bytes=max_bytes,
            )
            if answer is None:
                raise WorkTreeError("diff: the agent ended its sandbox; nothing to record")
            if call.timed_out:
                raise WorkTreeError(f"diff: not recorded within {CAPTURE_TIMEOUT_S:g} s")
            if call.flooded:
                raise WorkTreeError(f"diff: larger than {max_bytes} bytes")
            if answer[0] == 0:
                return b"".join(chunks)
        ring = OutputRing(500)
        await self._request("errors", b"", timeout_s=5.0, sink=ring.write, room_bytes=1 << 16)
        raise WorkTreeError(f"diff: git cannot record the work tree: {ring.text()[0].strip()}")

    async def run_python(
        self, code: CodeType, data: dict[str, object], timeout_s: float
    ) -> PythonResult:
        return await self.run_payload(marshal.dumps((marshal.dumps(code), data)), timeout_s)

    async def run_payload(self, payload: bytes, timeout_s: float) -> PythonResult:
        """`run_python` for a program that is bytes already: marshalled (code, data)."""
        if self._ended.done():
            self._check_infrastructure()
        self._num_commands += 1
        return await run_forked(
            self._link,
            self._place.python_request(self._limits, pid=self.pid, timeout_s=timeout_s),
            payload=payload,
            timeout_s=timeout_s,
            output_chars=self._limits.output_chars,
            kill_sandbox=self.kill,
        )

    def _count_oom_kills(self) -> int:
        group = self._place.group
        return machine_oom_kills() if group is None else group.oom_kills()

    def _ran_out_of_memory(self) -> bool:
        """True when the kernel killed for memory since the last time this was asked."""
        before, self._oom_kills = self._oom_kills, self._count_oom_kills()
        return self._oom_kills > before


def _command_bytes(command: str) -> bytes | str:
    """The command as bytes, or why no shell can be given it."""
    if "\0" in command:
        return "[not run: the command holds a NUL character]"
    try:
        text = command.encode()
    except UnicodeEncodeError:
        return "[not run: the command holds half of a surrogate pair, which is no text]"
    if len(text) > MAX_COMMAND_BYTES:
        return f"[not run: the command has {len(text)} bytes; at most {MAX_COMMAND_BYTES}]"
    return text


def _with_note(output: str, note: str) -> str:
    gap = "" if output == "" or output.endswith("\n") else "\n"
    return f"{output}{gap}[{note}]\n"
