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
import ctypes
import fcntl
import gc
import marshal
import os
import resource
import select
import signal
import socket
import sys
import traceback
import types
import unittest  # noqa: F401  (warm for verdicts)

MAX_PACKET_BYTES = 1 << 17
NUM_RESERVED_FDS = 10
"""0-9 stay occupied, so that a received descriptor never sits where a child's must go."""
CONTROL_FD = 3
EXIT_CANNOT_START = 71
"""Exit status of a child that failed before it ran anything of the agent's."""

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
NS_GET_USERNS = 0xB701
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 38, 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
SYS_CAPSET = {"x86_64": 126, "aarch64": 91, "riscv64": 91}
NAMESPACES = ("mnt", "net", "ipc", "uts", "cgroup", "pid")
STAGE = "/tmp"
"""Where a root launcher gathers what sandboxes need, in a mount namespace of its own."""

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def stage(sources: list[tuple[str, str]]) -> None:
    """Bind each (source folder, name) to STAGE/name, visible to this process's children only.

    A sandbox runs as a user id that may not walk into /root or into the run's folder; root binds
    them where that id can walk.
    """
    check(libc.unshare(CLONE_NEWNS), "unshare(CLONE_NEWNS)")
    check(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "mount --make-rprivate /")
    folders = [(os.open(path, os.O_PATH | os.O_DIRECTORY), name) for path, name in sources]
    flags = MS_NOSUID | MS_NODEV
    check(libc.mount(b"tmpfs", STAGE.encode(), b"tmpfs", flags, b"mode=755,size=1m"), "mount tmpfs")
    for fd, name in folders:
        target = f"{STAGE}/{name}"
        os.makedirs(target, mode=0o755)
        source = f"/proc/self/fd/{fd}".encode()
        check(libc.mount(source, target.encode(), None, MS_BIND | MS_REC, None), f"bind {name}")
        os.close(fd)


def take_uid(uid: int | None) -> None:
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def reset_signals() -> None:
    """Back to defaults: Python ignores SIGPIPE and SIGXFSZ, and ignored signals survive exec."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def become_command(request: dict, fds: list[int]) -> None:
    """In a forked child: turn into request["argv"] with control socket and output pipe."""
    control, output = fds
    reset_signals()
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(control, CONTROL_FD)
    os.closerange(CONTROL_FD + 1, 1 << 16)
    take_uid(request["uid"])
    os.chdir(request["cwd"])
    os.execve(request["argv"][0], request["argv"], request["env"])


def enter_sandbox(pid: int, uid: int | None) -> None:
    """Join every namespace of process `pid` (a sandbox's first); the pid one on the next fork."""
    folder = f"/proc/{pid}/ns"
    inner_user = os.open(f"{folder}/user", os.O_RDONLY)
    others = [os.open(f"{folder}/{name}", os.O_RDONLY) for name in NAMESPACES]
    take_uid(uid)
    # bubblewrap makes a second user namespace to forbid further ones; mounts and network belong
    # to the first. Join outer, the rest, then inner.
    outer_user = fcntl.ioctl(others[0], NS_GET_USERNS)
    check(libc.setns(outer_user, CLONE_NEWUSER), "setns(outer user)")
    for fd, name in zip(others, NAMESPACES, strict=True):
        check(libc.setns(fd, 0), f"setns({name})")
    if not os.path.sameopenfile(outer_user, inner_user):
        check(libc.setns(inner_user, CLONE_NEWUSER), "setns(inner user)")


def drop_rights() -> None:
    """Give up every capability for good, as bubblewrap's own child does."""
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    check(libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "ambient capabilities")
    for number in range(64):
        if libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0) != 0:
            break
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    nothing = (ctypes.c_uint32 * 6)()
    number = SYS_CAPSET[os.uname().machine]
    check(libc.syscall(number, header, nothing), "capset")
    check(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "dumpable")


def set_limits(limits: dict[str, int]) -> None:
    for name, value in limits.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


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
    set_limits(request["limits"])
    if request["pid"] is not None:
        drop_rights()
    code, data = marshal.loads(payload)
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

    def serve(self) -> None:
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        poller = select.poll()
        poller.register(self.sock, select.POLLIN)
        poller.register(wake_read, select.POLLIN)
        while True:
            for fd, _ in poller.poll():
                if fd == wake_read:
                    os.read(wake_read, 4096)
                    self.reap()
                elif not self.receive():
                    return

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
                stage(request["sources"])
                self.send({"staged": True, "error": ""})
            except OSError as error:
                self.send({"staged": False, "error": str(error)})
            return
        if request["op"] == "kill":
            for pid, number in self.ids.items():
                if number == request["id"]:
                    os.kill(pid, signal.SIGKILL)
            return
        pid = os.fork()
        if pid == 0:
            if request["op"] == "python":
                os._exit(guarded(lambda: become_python(request, fds)))
            os.dup2(fds[1], 2)
            os._exit(guarded(lambda: become_command(request, fds)))
        self.ids[pid] = request["id"]

    def reap(self) -> None:
        while self.ids:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            number = self.ids.pop(pid, None)
            if number is not None:
                self.send({"id": number, "status": os.waitstatus_to_exitcode(status)})

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
    Launcher(sock).serve()


if __name__ == "__main__":
    main()
