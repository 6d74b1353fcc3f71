"""Files that every sandbox of a backend shares, read-only: the first process, `submit`, accounts.

Invariant: they hold no fact about any task.
"""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from rlmix.sandbox.layers import EMPTY_FILE, EMPTY_FOLDER
from rlmix.sandbox.protocol import SandboxLimits

SUBMIT = '#!/bin/sh\n: >"$RLMIX_SUBMIT"\n'
"""Leaves a mark that the first process looks for, which a command cannot do by printing."""
STDIO = 'exec 3<&0 4>&1 1>&2 0</dev/null\nmkdir -p "$scratch"\n'
"""Moves what a container engine's client passes on to where the loop has it."""
PASSWD = "agent:x:1000:1000:agent:/tmp:/bin/bash\nnobody:x:65534:65534:nobody:/:/bin/false\n"
GROUP = "agent:x:1000:\nnogroup:x:65534:\n"
CPU_PER_WALL = 2
"""CPU seconds a process may use per second of the command's limit; the machine limit beside the
wall-clock one, for what survives in the background."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticOptions:
    """How one backend's first process differs from another's."""

    interpreter: str | None = None
    """Path inside that `python` runs; None leaves `python` to the image."""
    path: str = "/usr/local/bin:/usr/bin:/bin"
    """PATH of commands, after our own programs."""
    is_stdio: bool = False
    """Requests come on 0, answers go to 1 and output to 2, instead of a socket on 3."""


def write_static(
    folder: Path,
    *,
    inside: str,
    options: StaticOptions,
    limits: SandboxLimits,
    stop: str,
    has_pids_limit: bool,
    has_memory_group: bool,
) -> None:
    """Write the shared files to `folder`, which the sandbox sees as `inside`.

    Args:
        stop: how the first process ends the others; see loop.sh.
        has_memory_group: memory is counted elsewhere, so address space is not bounded.
    """
    (folder / "bin").mkdir(parents=True)
    folder.chmod(0o755)
    _write_etc(folder / "etc")
    (folder / "bin/submit").write_text(SUBMIT)
    (folder / EMPTY_FILE).touch()
    (folder / EMPTY_FOLDER).mkdir()
    for name in ("python", "python3") if options.interpreter else ():
        assert options.interpreter is not None
        (folder / "bin" / name).symlink_to(options.interpreter)
    settings = {
        "static": inside,
        "stop_by": stop,
        "path": options.path,
        "answers": "4" if options.is_stdio else "3",
        "memory_kib": "" if has_memory_group else str(limits.memory_mib * 1024),
        "file_kib": str(limits.disk_mib * 1024),
        "pids": str(limits.pids) if has_pids_limit else "",
        "cpu_s": str(max(1, round(limits.command_timeout_s * CPU_PER_WALL))),
    }
    head = "".join(f"{name}={shlex.quote(value)}\n" for name, value in settings.items())
    # Paths differ between sandboxes only without isolation, so they are arguments.
    head += 'repo=$1 base=$2 scratch=$3 home=$4\nshift 4\nextra_env=("$@")\n'
    if options.is_stdio:
        head += STDIO
    body = Path(__file__).with_name("loop.sh").read_text()
    (folder / "loop.sh").write_text(head + body)
    for name in (".", "bin", "bin/submit", EMPTY_FOLDER):
        (folder / name).chmod(0o755)
    for name in ("loop.sh", EMPTY_FILE):
        (folder / name).chmod(0o644)


def _write_etc(folder: Path) -> None:
    """The few parts of /etc that programs need: accounts, the linker's cache, alternatives."""
    folder.mkdir()
    folder.chmod(0o755)
    (folder / "passwd").write_text(PASSWD)
    (folder / "group").write_text(GROUP)
    cache, alternatives = Path("/etc/ld.so.cache"), Path("/etc/alternatives")
    if cache.exists():
        (folder / cache.name).write_bytes(cache.read_bytes())
    for path in folder.iterdir():
        path.chmod(0o644)
    if alternatives.is_dir():
        (folder / alternatives.name).mkdir()
        (folder / alternatives.name).chmod(0o755)
        for link in filter(Path.is_symlink, alternatives.iterdir()):
            (folder / alternatives.name / link.name).symlink_to(link.readlink())


def ends_with_submit(command: str) -> bool:
    """True when the last word that a shell would run is `submit` (a cheap, strict reading)."""
    text = command.rstrip().rstrip(";)} \t\n")
    if not text.endswith("submit"):
        return False
    before = text[: -len("submit")]
    return before == "" or before[-1] in " \t\n;&|({"


def as_request(verb: str, text: bytes) -> bytes:
    return os.fsencode(verb) + b"\0" + text + b"\0"
