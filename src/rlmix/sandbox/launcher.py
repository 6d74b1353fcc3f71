"""The small process that makes sandboxes for one worker. Runs as a script, standard library only.

Why a process of its own: a task worker is large and has threads; forking it for every sandbox is
slow, and dropping the user id between fork and exec is unsafe there. This one is small, has one
thread, and has `unittest` loaded, so that a verdict starts from a fork instead of a 30 ms import.

Who feeds it: a sequenced-packet socket from the worker, one marshalled request per packet, open
files attached. What ends it: the other end closing, for whatever reason. Its children carry
`--die-with-parent`, so they end with it.

Invariant: it holds nothing secret (argument lists only), because verdicts are forks of it.
"""

import array
import fcntl
import gc
import importlib.util
import marshal
import os
import select
import signal
import socket
import sys
import time
import traceback
import types
import unittest  # noqa: F401  (warm for verdicts)

MAX_PACKET_BYTES = 1 << 17
NUM_RESERVED_FDS = 10
"""0-9 stay occupied, so that a received descriptor never sits where a child's must go."""
CONTROL_FD = 3
FILTER_FD = 4
"""Where bubblewrap is told to read the system call filter."""
SUPERVISOR = 0x7FFFFFF1
"""As in seccomp.py: stands in a filter for a supervisor whose number the worker cannot know."""
EXIT_CANNOT_START = 71
"""Exit status of a child that failed before it ran anything of the agent's."""

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
NS_GET_USERNS = 0xB701
NAMESPACES = ("mnt", "net", "ipc", "uts", "cgroup", "pid")


def load_beside(name: str) -> types.ModuleType:
    """A module in this folder; the folder itself stays off `sys.path`, which verdicts inherit."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"rlmix_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


confine = load_beside("confine")
libc, check = confine.libc, confine.check


covered: dict[str, int] = {}
"""Folder that was covered -> descriptor of what lies below the cover."""


def uncovered(path: str) -> str:
    """A way to `path` that leads past the covers."""
    for folder, fd in covered.items():
        if path.startswith(f"{folder}/"):
            return f"/proc/self/fd/{fd}/{path[len(folder) + 1 :]}"
    return path


def stage(sources: list[tuple[str, str]], covers: list[str]) -> None:
    """Cover the folders `covers`, and bind each (folder, target) for this process's children only.

    A sandbox runs as a user id that may not walk into /root or into the run's folder; root binds
    them where that id can walk. Without covers it adds to what was staged before.
    """
    if covers:
        check(libc.unshare(CLONE_NEWNS), "unshare(CLONE_NEWNS)")
        check(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "mount --make-rprivate /")
    flags = os.O_PATH | os.O_DIRECTORY
    folders = [(os.open(uncovered(path), flags), target) for path, target in sources]
    for path in covers:
        covered[path] = os.open(path, flags)
        options, flags = b"mode=755,size=1m", MS_NOSUID | MS_NODEV
        check(libc.mount(b"tmpfs", path.encode(), b"tmpfs", flags, options), f"tmpfs on {path}")
    for fd, target in folders:
        os.makedirs(target, mode=0o755, exist_ok=True)
        source = f"/proc/self/fd/{fd}".encode()
        check(libc.mount(source, target.encode(), None, MS_BIND | MS_REC, None), f"bind {target}")
        os.close(fd)


def reset_signals() -> None:
    """Back to defaults: Python ignores SIGPIPE and SIGXFSZ, and ignored signals survive exec."""
    confine.die_with_parent()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def become_command(request: dict, fds: list[int]) -> None:
    """In a forked child: turn into request["argv"] with control socket and output pipe."""
    control, output = fds
    reset_signals()
    os.setsid()
    confine.join_groups(request["groups"])
    if request["is_stdio"]:
        # A container's client passes on these three and nothing else.
        os.dup2(control, 0)
        os.dup2(control, 1)
        os.dup2(output, 2)
    else:
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(control, CONTROL_FD)
    os.closerange(CONTROL_FD + 1, 1 << 16)
    if request["rules"] is not None:
        os._exit(supervised(lambda: become_confined(request)))
    if request["filter"] is not None:
        confine.filter_descriptor(request["filter"], FILTER_FD)
    confine.take_uid(request["uid"])
    os.chdir(request["cwd"])
    os.execve(request["argv"][0], request["argv"], request["env"])


def become_confined(request: dict) -> None:
    """In the child of a supervisor: give up what can be given up, then turn into the command."""
    give_up(request)
    os.chdir(request["cwd"])
    os.execve(request["argv"][0], request["argv"], request["env"])


def give_up(request: dict) -> None:
    """User id, limits, capabilities, files and system calls, in the order in which they allow
    each other."""
    supervisor = os.getppid()
    confine.become_subreaper()
    confine.bound_capabilities()
    confine.take_uid(request["uid"])
    confine.die_with_parent()
    confine.set_limits(request["limits"])
    confine.drop_rights()
    confine.restrict_files(request["rules"])
    if request["is_contained"]:
        confine.must_not_signal(supervisor)
    confine.load_filter(confine.name_process(request["filter"], SUPERVISOR, supervisor))


def supervised(action) -> int:
    """Fork; the child does `action`, this process stays behind to end whatever comes of it."""
    confine.become_subreaper()
    libc.prctl(confine.PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    child = os.fork()
    if child == 0:
        os._exit(guarded(action))
    os.closerange(CONTROL_FD, 1 << 16)
    return confine.supervise(child)


def enter_sandbox(pid: int, uid: int | None) -> None:
    """Join every namespace of process `pid` (a sandbox's first); the pid one on the next fork."""
    folder = f"/proc/{pid}/ns"
    inner_user = os.open(f"{folder}/user", os.O_RDONLY)
    others = [os.open(f"{folder}/{name}", os.O_RDONLY) for name in NAMESPACES]
    confine.take_uid(uid)
    # bubblewrap makes a second user namespace to forbid further ones; mounts and network belong
    # to the first. Join outer, the rest, then inner.
    outer_user = fcntl.ioctl(others[0], NS_GET_USERNS)
    check(libc.setns(outer_user, CLONE_NEWUSER), "setns(outer user)")
    for fd, name in zip(others, NAMESPACES, strict=True):
        check(libc.setns(fd, 0), f"setns({name})")
    if not os.path.sameopenfile(outer_user, inner_user):
        check(libc.setns(inner_user, CLONE_NEWUSER), "setns(inner user)")


def run_python(request: dict, source: int, report: int, output: int) -> int:
    """In a forked child, inside the sandbox: run trusted code on data, then the tests it loads."""
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    payload = os.pread(source, os.fstat(source).st_size, 0)
    # An unusual number, so that writing to every small descriptor does not reach the report.
    report = fcntl.fcntl(report, fcntl.F_DUPFD_CLOEXEC, 64 + int.from_bytes(os.urandom(2)) % 384)
    os.closerange(3, report)
    os.closerange(report + 1, 1 << 16)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    if request["rules"] is not None:
        give_up(request)
    else:
        confine.set_limits(request["limits"])
        if request["pid"] is not None:
            confine.drop_rights()
        if request["filter"] is not None:
            confine.load_filter(request["filter"])
    confine.hide_memory()
    code, data = marshal.loads(payload)
    data |= request["places"]
    del payload
    sys.modules["__main__"] = types.ModuleType("__main__")
    names = {"__name__": "rlmix_sandbox", "data": data, "report_fd": report}
    try:
        exec(marshal.loads(code), names)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def become_python(request: dict, fds: list[int]) -> int:
    """In a forked child: enter the sandbox, fork into its pid namespace, wait for that child."""
    reset_signals()
    source, report, output = fds
    for fd in covered.values():
        os.close(fd)
    confine.join_groups(request["groups"])
    if request["rules"] is not None:
        return supervised(lambda: run_python(request, source, report, output))
    if request["pid"] is None:
        return run_python(request, source, report, output)
    enter_sandbox(request["pid"], request["uid"])
    child = os.fork()
    if child == 0:
        os._exit(guarded(lambda: run_python(request, source, report, output)))
    for fd in fds:
        os.close(fd)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status if status >= 0 else 128 - status


def guarded(action) -> int:
    """Run a child's action; whatever it raises becomes text on its stderr and an exit status."""
    try:
        return action() or 0
    except BaseException as error:
        os.write(2, f"rlmix sandbox launcher: {error}\n".encode())
        return EXIT_CANNOT_START


class Launcher:
    """Serves requests until the worker's end of the socket closes."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.ids: dict[int, int] = {}
        self.leases: dict[int, float] = {}
        """Process id -> when it must be gone, on the monotonic clock."""
        self.supervisors: set[int] = set()
        self.expired: set[int] = set()
        self.is_dismissed = False

    def serve(self) -> None:
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # A run ignores the loss of its terminal; programs in sandboxes must not inherit that.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        poller = select.poll()
        poller.register(self.sock, select.POLLIN)
        poller.register(wake_read, select.POLLIN)
        while True:
            for fd, _ in poller.poll(self.end_leases()):
                if fd == wake_read:
                    os.read(wake_read, 4096)
                    self.reap()
                elif not self.receive():
                    return

    def end_leases(self) -> int | None:
        """Kill what outlived its lease; returns the milliseconds until the next one ends."""
        now_s = time.monotonic()
        for pid, until_s in list(self.leases.items()):
            if until_s <= now_s:
                del self.leases[pid]
                self.expired.add(pid)
                self.kill(pid)
        if not self.leases:
            return None
        return 1 + int(1000 * (min(self.leases.values()) - now_s))

    def end_all(self) -> None:
        """Kill every child and wait for each; a supervisor ends its own first."""
        for pid in list(self.ids):
            self.kill(pid)
        for pid in list(self.ids):
            os.waitpid(pid, 0)

    def kill(self, pid: int) -> None:
        # A supervisor has to end others first; it kills its child and exits.
        os.kill(pid, signal.SIGTERM if pid in self.supervisors else signal.SIGKILL)

    def receive(self) -> bool:
        try:
            packet, ancillary, _, _ = self.sock.recvmsg(
                MAX_PACKET_BYTES, socket.CMSG_SPACE(4 * 8), socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionError:
            return False
        if not packet:
            return False
        fds = array.array("i")
        for level, kind, raw in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(raw)
        self.answer(marshal.loads(packet), list(fds))
        for fd in fds:
            os.close(fd)
        return True

    def answer(self, request: dict, fds: list[int]) -> None:
        if request["op"] == "stage":
            try:
                stage(request["sources"], request["covers"])
                self.send({"staged": True, "error": ""})
            except OSError as error:
                self.send({"staged": False, "error": str(error)})
            return
        if request["op"] == "close":
            self.is_dismissed = True
            return
        if request["op"] == "kill":
            for pid, number in self.ids.items():
                if number == request["id"]:
                    self.kill(pid)
            return
        pid = os.fork()
        if pid == 0:
            if request["op"] == "python":
                os._exit(guarded(lambda: become_python(request, fds)))
            os.dup2(fds[1], 2)
            os._exit(guarded(lambda: become_command(request, fds)))
        self.ids[pid] = request["id"]
        if request["rules"] is not None:
            self.supervisors.add(pid)
        if request["lease_s"] is not None:
            self.leases[pid] = time.monotonic() + request["lease_s"]

    def reap(self) -> None:
        while self.ids:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            number = self.ids.pop(pid, None)
            self.leases.pop(pid, None)
            self.supervisors.discard(pid)
            code = os.waitstatus_to_exitcode(status)
            if pid in self.expired:
                # Whatever its supervisor made of it, the agent did not end this one.
                self.expired.discard(pid)
                code = -signal.SIGKILL
            if number is not None:
                self.send({"id": number, "status": code})

    def send(self, message: dict) -> None:
        try:
            self.sock.send(marshal.dumps(message))
        except ConnectionError:
            os._exit(0)


def main() -> None:
    sock = socket.socket(fileno=fcntl.fcntl(int(sys.argv[1]), fcntl.F_DUPFD_CLOEXEC, 32))
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(NUM_RESERVED_FDS):
        if number != 2 and number != null:
            os.dup2(null, number, inheritable=number < 3)
    gc.collect()
    gc.freeze()
    launcher = Launcher(sock)
    launcher.serve()
    if not launcher.is_dismissed:
        # The worker died and cannot remove its control groups.
        launcher.end_all()
        confine.remove_empty_groups(sys.argv[2:])


if __name__ == "__main__":
    main()
