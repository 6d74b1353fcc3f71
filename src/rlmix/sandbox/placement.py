"""How one sandbox is started, and how a program of ours is started beside it.

Invariant: both requests confine their process alike; what differs is only what it becomes.
"""

from dataclasses import dataclass, field
from pathlib import Path

from rlmix.sandbox.cgroups import Group
from rlmix.sandbox.protocol import SandboxLimits


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where and under what bounds one sandbox lives."""

    argv: list[str]
    env: dict[str, str]
    """Environment of the starting program; the sandbox sets its own."""
    cwd: str
    uid: int | None
    """User id outside; None keeps the worker's."""
    has_namespaces: bool
    """A second process joins the namespaces of the first one."""
    repo: str
    """The repository as seen inside."""
    base: str
    """The template as seen inside."""
    home: str
    base_commit: str
    group: Group | None = None
    """Limits of all its processes together; None where the machine gives none."""
    filter: bytes | None = None
    """System call filter; None: nothing is refused."""
    rules: dict[str, object] | None = None
    """Landlock's rules; with them a supervisor ends what is left, as there is no pid namespace."""
    is_contained: bool = False
    """"Kill everybody" inside reaches nobody outside; tried before it is relied on."""
    is_stdio: bool = False
    """Control on descriptors 0 and 1 and output on 2, for the client of a container engine."""
    container: str = ""
    """Its name at a container engine."""
    path: str = "/usr/local/bin:/usr/bin:/bin"
    """PATH of programs of ours that run beside it."""
    settle_s: float = 0.0
    """How much later than its exit status a command's last output may arrive."""
    limits: dict[str, int] = field(default_factory=dict)
    """Limits that the launcher sets, for processes that no loop sets them for."""

    @property
    def _bounds(self) -> dict[str, object]:
        return {
            "uid": self.uid,
            "groups": [] if self.group is None else self.group.join_files,
            "filter": self.filter,
            "rules": self.rules,
            "is_contained": self.is_contained,
        }

    def start_request(self, limits: SandboxLimits) -> dict[str, object]:
        return {
            **self._bounds,
            "op": "spawn",
            "argv": self.argv,
            "env": self.env,
            "cwd": self.cwd,
            "is_stdio": self.is_stdio,
            "limits": self.limits,
            "lease_s": limits.lease_s,
        }

    def python_request(
        self, limits: SandboxLimits, *, pid: int, timeout_s: float
    ) -> dict[str, object]:
        """A fork of the launcher in the sandbox whose first process is `pid`."""
        env = {
            "PATH": self.path,
            "HOME": self.home,
            "TMPDIR": self.home,
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        bounds = {
            **process_limits(limits, has_memory_group=self._counts("memory")),
            "RLIMIT_CPU": max(1, round(2 * timeout_s)),
            **self.limits,
        }
        if self.has_namespaces:
            bounds["RLIMIT_NPROC"] = limits.pids
        else:
            env |= self.env
        return {
            **self._bounds,
            "op": "python",
            "pid": pid if self.has_namespaces else None,
            "env": env,
            "cwd": self.repo,
            "limits": bounds,
            "lease_s": limits.lease_s,
            "places": {"repo": self.repo, "base": self.base, "home": self.home},
        }

    def _counts(self, controller: str) -> bool:
        return self.group is not None and controller in self.group.folders


def process_limits(limits: SandboxLimits, *, has_memory_group: bool) -> dict[str, int]:
    """Limits of each process. Address space is bounded only where nothing counts real memory:
    Go, Java, Node and sanitizers reserve far more than they use."""
    bounds = {
        "RLIMIT_FSIZE": limits.disk_mib << 20,
        "RLIMIT_CORE": 0,
        "RLIMIT_NOFILE": 512,
    }
    if not has_memory_group:
        bounds["RLIMIT_AS"] = limits.memory_mib << 20
    return bounds


def machine_oom_kills() -> int:
    """How often the kernel's out-of-memory killer has run since boot; 0 when not told."""
    try:
        text = Path("/proc/vmstat").read_bytes()
    except OSError:
        return 0
    at = text.find(b"oom_kill ")
    return int(text[at + 9 : text.index(b"\n", at)]) if at >= 0 else 0
