"""CPU and wall time of sandboxes (create, command, diff, verdict), and the plain way beside.

The plain way is what a harness does without a launcher: one bubblewrap per command through
subprocess, and `python -m unittest` in one more bubblewrap as the verdict.

    python scripts/bench_sandbox.py [--backend namespaces|weak] [--quick] [--json]

Exit code 1 when a process, mount, control group or file is left at the end. CPU counts this
process, the launcher and every process of every sandbox, after they ended.
"""

import argparse
import asyncio
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rlmix.core.task import Commit, HiddenTask, PublicTask
from rlmix.core.trajectory import Outcome
from rlmix.sandbox import bubblewrap
from rlmix.sandbox.backend import make_folder, open_backend
from rlmix.sandbox.cgroups import group_name
from rlmix.sandbox.launched import LaunchedBackend
from rlmix.sandbox.link import RUN_MARK, interpreter
from rlmix.sandbox.protocol import SandboxLimits
from rlmix.sandbox.reap import marked_processes
from rlmix.sandbox.shell import StaticOptions, write_static
from rlmix.tasks.verdict import judge

LIMITS = SandboxLimits(
    memory_mib=512, pids=64, disk_mib=64, output_chars=2000, command_timeout_s=10.0, cpus=1.0
)
T = TypeVar("T")
LEFT = ("processes", "files", "mounts", "groups")
COMMAND = "grep -n total *.py"
EDIT = "sed -i 's/- b/+ b/' sums.py"
FIX = (
    "diff --git a/sums.py b/sums.py\n--- a/sums.py\n+++ b/sums.py\n@@ -1,2 +1,2 @@\n"
    " def total(a, b):\n-    return a - b\n+    return a + b\n"
)
TEST = (
    "import unittest\nfrom sums import total\n\n\nclass TestTotal(unittest.TestCase):\n"
    "    def test_adds(self):\n        self.assertEqual(total(2, 3), 5)\n"
)
PUBLIC = PublicTask(
    task_id="bench",
    split="train",
    issue="total subtracts",
    history=(
        Commit(message="start", files={"names.py": "A = 1\n", "sums.py": "def total(a, b):\n"}),
        Commit(message="add total", files={"sums.py": "def total(a, b):\n    return a - b\n"}),
    ),
)
HIDDEN = HiddenTask(
    task_id="bench",
    tests={"test_hidden.py": TEST},
    required_tests=("test_hidden.TestTotal.test_adds",),
    reference_diff=FIX,
)


def cpu_s(launcher_pid: int | None) -> float:
    """CPU seconds of this process, its ended children, and the launcher with its ended ones."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    if launcher_pid is not None:
        fields = Path(f"/proc/{launcher_pid}/stat").read_text().rpartition(")")[2].split()
        total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return total


async def measure(
    action: Callable[[], Awaitable[None]], repeats: int, launcher_pid: int | None
) -> tuple[float, float]:
    """(CPU ms, wall ms) of one call."""
    await action()
    cpu, wall = cpu_s(launcher_pid), time.perf_counter()
    for _ in range(repeats):
        await action()
    return (
        (cpu_s(launcher_pid) - cpu) / repeats * 1e3,
        (time.perf_counter() - wall) / repeats * 1e3,
    )


async def ours(backend: LaunchedBackend, repeats: int) -> dict[str, tuple[float, float]]:
    template = await backend.prepare(PUBLIC.history)
    pid = backend._link.pid

    async def life(*commands: str, diff: bool = False) -> None:
        sandbox = await backend.create(template)
        for command in commands:
            await sandbox.run(command)
        if diff:
            await sandbox.capture_diff()
        await sandbox.destroy()

    async def verdict() -> None:
        result = await judge(PUBLIC, HIDDEN, FIX.encode(), backend)
        assert result.outcome is Outcome.PASS, result

    async def session() -> None:
        await life(COMMAND, COMMAND, f"{EDIT} && submit", diff=True)
        await verdict()

    empty = await measure(lambda: life(), repeats, pid)
    first = await measure(lambda: life(COMMAND), repeats, pid)
    eleven = await measure(lambda: life(*([COMMAND] * 11)), max(repeats // 4, 3), pid)
    edited = await measure(lambda: life(EDIT), repeats, pid)
    recorded = await measure(lambda: life(EDIT, diff=True), repeats, pid)
    return {
        "create_destroy": empty,
        "create_first_command_destroy": first,
        "next_command": tuple((b - a) / 10 for a, b in zip(first, eleven, strict=True)),
        "capture_diff": tuple(b - a for a, b in zip(edited, recorded, strict=True)),
        "verdict": await measure(verdict, repeats, pid),
        "session_3_commands_and_verdict": await measure(session, repeats, pid),
    }


async def latencies(backend: LaunchedBackend, repeats: int) -> dict[str, dict[str, float]]:
    """Wall milliseconds of one sandbox's steps, one sandbox at a time."""
    template = await backend.prepare(PUBLIC.history)
    times: dict[str, list[float]] = {}

    async def timed(what: str, call: Awaitable[T]) -> T:
        started = time.perf_counter()
        result = await call
        times.setdefault(what, []).append((time.perf_counter() - started) * 1e3)
        return result

    for _ in range(repeats):
        sandbox = await timed("create", backend.create(template))
        await timed("first_command", sandbox.run(COMMAND))
        await timed("next_command", sandbox.run(COMMAND))
        await timed("destroy", sandbox.destroy())
    both = zip(times["create"], times["first_command"], strict=True)
    times["create_and_first_command"] = [a + b for a, b in both]
    return {
        what: {
            "min_ms": round(min(values), 2),
            "median_ms": round(statistics.median(values), 2),
            "p95_ms": round(statistics.quantiles(values, n=20)[-1], 2),
        }
        for what, values in times.items()
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Traces:
    """What sandboxes leave on a machine when they leave something."""

    processes: int
    files: int
    mounts: int
    groups: int

    @classmethod
    def of(cls, run_id: str, folder: Path) -> "Traces":
        groups = Path("/sys/fs/cgroup").rglob(f"{group_name(run_id, '')}*")
        return cls(
            processes=len(marked_processes(RUN_MARK, run_id)),
            files=len(list(folder.rglob("*"))),
            mounts=len(Path("/proc/self/mountinfo").read_text().splitlines()),
            groups=len(list(groups)),
        )


async def plain(folder: Path, repeats: int) -> dict[str, tuple[float, float]]:
    """One bubblewrap per command over a folder; as the user this script runs as."""
    static = folder / "static"
    write_static(
        static,
        inside=bubblewrap.STATIC,
        options=StaticOptions(interpreter=interpreter()),
        limits=LIMITS,
        stop="all",
        has_pids_limit=False,
        has_memory_group=False,
    )
    fixed = bubblewrap.fixed_arguments(
        str(bubblewrap.find_bwrap()),
        static=str(static),
        prefix=bubblewrap.interpreter_prefix(),
        limits=LIMITS,
        is_root_outside=os.geteuid() == 0,
    )
    repo = folder / "repo"
    repo.mkdir()
    (repo / "sums.py").write_text(PUBLIC.base_files()["sums.py"].replace("- b", "+ b"))
    (repo / "test_hidden.py").write_text(TEST)
    head = [*fixed, "--bind", str(repo), "/repo", "--chdir", "/repo", "--"]

    async def run(*argv: str) -> None:
        process = await asyncio.create_subprocess_exec(
            *head, *argv, stdin=subprocess.DEVNULL, stdout=-1, stderr=subprocess.STDOUT
        )
        output, _ = await process.communicate()
        assert process.returncode == 0, output

    return {
        "next_command": await measure(lambda: run("/bin/bash", "-c", COMMAND), repeats, None),
        "verdict": await measure(
            lambda: run(interpreter(), "-m", "unittest", "test_hidden"), repeats, None
        ),
    }


async def crowd(backend: LaunchedBackend, count: int) -> dict[str, float]:
    template = await backend.prepare(PUBLIC.history)
    cpu, wall = cpu_s(backend._link.pid), time.perf_counter()
    sandboxes = await asyncio.gather(*(backend.create(template) for _ in range(count)))
    made_s = time.perf_counter() - wall
    await asyncio.gather(*(sandbox.run(COMMAND) for sandbox in sandboxes))
    await asyncio.gather(*(sandbox.destroy() for sandbox in sandboxes))
    return {
        "count": count,
        "all_ready_s": made_s,
        "all_s": time.perf_counter() - wall,
        "cpu_ms_each": (cpu_s(backend._link.pid) - cpu) / count * 1e3,
    }


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, under a minute")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--backend", choices=("namespaces", "weak"), default="namespaces")
    options = parser.parse_args()
    repeats, count = (20, 50) if options.quick else (100, 200)
    say = (lambda text: print(text, file=sys.stderr)) if options.json else print
    run_id = f"bench_{os.getpid()}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_folder(folder)
        before = Traces.of(run_id, folder)
        backend = await open_backend(options.backend, LIMITS, folder, run_id)
        assert isinstance(backend, LaunchedBackend)
        limits_by = backend._groups
        for warning in backend.warnings:
            say(f"warning: {warning}")
        steps = await latencies(backend, 2 * repeats)
        mine = await ours(backend, repeats)
        together = await crowd(backend, count)
        await backend.close()
        after = Traces.of(run_id, folder)
        others = await plain(folder, repeats)
    rows = []
    for what, (cpu, wall) in mine.items():
        row: dict[str, object] = {"what": what, "ours_cpu_ms": cpu, "ours_wall_ms": wall}
        if what in others:
            row |= {"plain_cpu_ms": others[what][0], "plain_wall_ms": others[what][1]}
            row["cpu_ratio"] = cpu / others[what][0]
        rows.append({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
    document = {
        "rows": rows,
        "at_once": {key: round(value, 3) for key, value in together.items()},
        "steps": steps,
        "left_over": {name: getattr(after, name) - getattr(before, name) for name in LEFT},
        "backend": options.backend,
        "control_groups": f"version {limits_by.version}" if limits_by.version else "none",
        "load_average": round(os.getloadavg()[0], 1),
        "user": "root" if os.geteuid() == 0 else "ordinary",
        "machine": f"{os.cpu_count()} cores, Linux {platform.release()}",
    }
    for row in rows:
        say("  ".join(f"{key}={value}" for key, value in row.items()))
    for what, values in steps.items():
        say(f"{what}: {values}")
    say(f"at once: {document['at_once']}; left over: {document['left_over']}")
    say(f"load average {document['load_average']}, control groups {document['control_groups']}")
    if options.json:
        print(json.dumps(document))
    return 0 if after == before else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
