"""Runs a command whose output the tested code can neither read nor change afterwards.

Output goes through pipes to this process, which the tested code can neither trace nor read: it is
not dumpable, and its report descriptor is not inherited. Everything the command left running is
ended before a machine-readable report is opened.
"""

import base64
import contextlib
import ctypes
import os
import selectors
import signal
import stat
import subprocess
import time
import zlib

PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
HEAD_BYTES, TAIL_BYTES = 256 << 10, 3 << 20
"""Of the output: a summary stands at the end."""
MAX_REPORT_FILE_BYTES = 8 << 20
MAX_PACKED_BYTES = 1 << 20
"""Of each packed attachment; the report as a whole is bounded too."""


def guard_this_process():
    """Nobody of the same user may trace or read it, and orphans become its children."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def speaker(report_fd, nonce):
    """Build the function that writes one report line, led by the nonce."""

    def say(kind, text=""):
        line = f"{nonce} {kind} {text}".replace("\n", "?") + "\n"
        view = memoryview(line.encode("utf-8", "replace"))
        while view:
            view = view[os.write(report_fd, view) :]

    return say


class Output:
    """The head and the tail of a stream."""

    def __init__(self):
        self.head, self.tail, self.dropped = bytearray(), bytearray(), 0

    def write(self, data):
        room = HEAD_BYTES - len(self.head)
        self.head += data[:room]
        self.tail += data[max(0, room) :]
        extra = len(self.tail) - TAIL_BYTES
        if extra > 0:
            del self.tail[:extra]
            self.dropped += extra

    def content(self):
        middle = b"\n[%d bytes left out]\n" % self.dropped if self.dropped else b""
        return bytes(self.head) + middle + bytes(self.tail)


def run_command(argv, repo, env, timeout_s, has_two_streams=False):
    """(exit status or None when it ran out of time, stdout, stderr); one stream unless told."""
    child = subprocess.Popen(
        argv,
        cwd=repo,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if has_two_streams else subprocess.STDOUT,
        start_new_session=True,
    )
    pipes = [pipe for pipe in (child.stdout, child.stderr) if pipe is not None]
    outputs = {pipe.fileno(): Output() for pipe in pipes}
    deadline_s = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for fd in outputs:
            os.set_blocking(fd, False)
            selector.register(fd, selectors.EVENT_READ)
        while child.poll() is None:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                break
            # Who stays behind may keep a pipe open, so its end is not what is waited for.
            if not selector.get_map():
                time.sleep(min(0.02, left_s))
            for key, _ in selector.select(min(0.1, left_s)) if selector.get_map() else ():
                if not drain(key.fd, outputs[key.fd]):
                    selector.unregister(key.fd)
    status = child.poll()
    end_descendants(deadline_s + 5.0)
    for fd, output in outputs.items():
        drain(fd, output, most=64)
    texts = [output.content() for output in outputs.values()]
    return status, texts[0], texts[1] if has_two_streams else b""


def drain(fd, output, most=1):
    """Read what is there; False at the end of the stream."""
    for _ in range(most):
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return True
        if not data:
            return False
        output.write(data)
    return True


def end_descendants(until_s):
    """Kill every process below this one, whatever session it moved to. As their reaper, this
    process becomes the parent of those whose parent died."""
    while time.monotonic() < until_s:
        below = descendants()
        if not below:
            return
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        time.sleep(0.005)


def descendants():
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if fields[0] != b"Z":
                parents[int(name)] = int(fields[1])
    below, grew = {os.getpid()}, True
    while grew:
        found = {pid for pid, parent in parents.items() if parent in below} - below
        below |= found
        grew = bool(found)
    return below - {os.getpid()}


def read_report(path):
    """A regular file of bounded size; anything else is no report."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as file:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > MAX_REPORT_FILE_BYTES:
            return None
        return file.read(MAX_REPORT_FILE_BYTES + 1)


def packed(content):
    """zlib and base64; the tail alone when the whole does not fit."""
    while True:
        data = zlib.compress(content, 1)
        if len(data) <= MAX_PACKED_BYTES:
            return base64.b64encode(data).decode()
        content = content[len(content) // 2 :]
