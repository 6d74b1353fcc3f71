"""The worker's end of the launcher: starts it, sends it requests, hears of ended children.

Invariant: every child that the launcher started is reported exactly once, with its exit status or
with None when the launcher itself ended; nobody waits for a child without that.
"""

import array
import asyncio
import contextlib
import marshal
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from rlmix.core.errors import SandboxError

RUN_MARK = "RLMIX_SANDBOX_RUN"
"""Environment variable by which `reap` finds processes of a run."""
MAX_PACKET_BYTES = 1 << 17
_STOP_S = 5.0


def interpreter() -> str:
    """The interpreter by its real path: a version manager's shim costs 75 ms at each start."""
    base = getattr(sys, "_base_executable", None) or sys.executable
    return os.path.realpath(base)


class LauncherLink:
    """Owns one launcher process."""

    def __init__(self) -> None:
        self._sock: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: dict[int, Callable[[int | None], None]] = {}
        self._staged: asyncio.Future[dict[str, object]] | None = None
        self._next_id = 0
        self._sending = asyncio.Lock()
        self.closed = asyncio.Event()

    @property
    def is_open(self) -> bool:
        return self._sock is not None and not self.closed.is_set()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, run_id: str, groups: list[str]) -> None:
        """Start it; `groups` are the control groups that it removes when this process dies."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(interpreter(), "-S", "-B", "-P", "-s"),
                    str(Path(__file__).with_name("launcher.py")),
                    str(theirs.fileno()),
                    *groups,
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                # The hash seed is fixed so that a verdict does not depend on it.
                env={"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", RUN_MARK: run_id},
            )
        self._sock = ours
        asyncio.get_running_loop().add_reader(ours.fileno(), self._on_packet)

    async def stage(
        self, sources: list[tuple[str, str]], covers: list[str], timeout_s: float
    ) -> str:
        """Ask a root launcher to cover folders and bind (folder, target) pairs for its children.

        Returns why it could not, or ''.
        """
        self._staged = asyncio.get_running_loop().create_future()
        await self._send({"op": "stage", "sources": sources, "covers": covers}, [])
        answer = await asyncio.wait_for(self._staged, timeout_s)
        return "" if answer["staged"] else str(answer["error"])

    async def spawn(
        self, request: dict[str, object], fds: list[int], on_end: Callable[[int | None], None]
    ) -> int:
        """Start a child; `on_end` hears its exit status (negative: signal), once."""
        self._next_id += 1
        number = self._next_id
        self._ended[number] = on_end
        try:
            await self._send({**request, "id": number}, fds)
        except BaseException:
            self._ended.pop(number, None)
            raise
        return number

    async def kill(self, number: int) -> None:
        """Kill a child by the number `spawn` gave, if it still lives."""
        if self.is_open and number in self._ended:
            await self._send({"op": "kill", "id": number}, [])

    async def _send(self, message: dict[str, object], fds: list[int]) -> None:
        packet = marshal.dumps(message)
        if len(packet) > MAX_PACKET_BYTES:
            raise SandboxError(f"sandbox: request of {len(packet)} bytes; at most 131072")
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        async with self._sending:  # One at a time waits for room in the socket.
            while True:
                if self._sock is None or self.closed.is_set():
                    raise SandboxError("sandbox: the launcher process ended; see the worker's log")
                try:
                    self._sock.sendmsg([packet], rights)
                    return
                except BlockingIOError:
                    await self._writable()
                except OSError as error:
                    self._hang_up()
                    raise SandboxError(f"sandbox: the launcher process ended: {error}") from None

    async def _writable(self) -> None:
        assert self._sock is not None
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        loop.add_writer(self._sock.fileno(), ready.set)
        try:
            await asyncio.wait_for(ready.wait(), _STOP_S)
        except TimeoutError:
            raise SandboxError("sandbox: the launcher took no request for 5 s") from None
        finally:
            loop.remove_writer(self._sock.fileno())

    def _on_packet(self) -> None:
        assert self._sock is not None
        while not self.closed.is_set():
            try:
                packet = self._sock.recv(MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._hang_up()
                return
            message = marshal.loads(packet)
            if "staged" in message:
                if self._staged is not None and not self._staged.done():
                    self._staged.set_result(message)
                continue
            on_end = self._ended.pop(message["id"], None)
            if on_end is not None:
                on_end(message["status"])

    def _hang_up(self) -> None:
        """The socket closed: the launcher's children die with it, and nobody will report them."""
        if self._sock is None or self.closed.is_set():
            return
        self.closed.set()
        asyncio.get_running_loop().remove_reader(self._sock.fileno())
        self._sock.close()
        waiting, self._ended = self._ended, {}
        for on_end in waiting.values():
            on_end(None)
        if self._staged is not None and not self._staged.done():
            self._staged.set_exception(SandboxError("sandbox: the launcher ended while starting"))

    async def close(self) -> None:
        """End the launcher and with it every sandbox."""
        if self.is_open:
            assert self._sock is not None
            with contextlib.suppress(OSError):
                self._sock.send(marshal.dumps({"op": "close"}))  # It need not clean up after us.
        self._hang_up()
        if self._process is None:
            return
        process = self._process
        for _ in range(int(_STOP_S / 0.01)):
            if process.poll() is not None:
                return
            await asyncio.sleep(0.01)
        process.kill()
        process.wait()
