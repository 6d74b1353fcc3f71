"""Memory, disk, processor time and output: what one sandbox can take from the rest."""

import os
import time
from pathlib import Path

from .conftest import LIMITS, Lab

HOGS = """
import os, time
print("allocating", flush=True)
for _ in range(5):
    if os.fork() == 0:
        data = bytearray(60 << 20)
        for at in range(0, len(data), 4096):
            data[at] = 1
        time.sleep(3)
        os._exit(0)
alive = 0
for _ in range(5):
    alive += os.waitstatus_to_exitcode(os.wait()[1]) == 0
print("survivors", alive)
"""
MEMFD = """
import os
print("filling", flush=True)
fd = os.memfd_create("hog")
for _ in range(600):
    os.write(fd, b"x" * (1 << 20))
print("filled")
"""


def test_processes_together_stay_below_the_memory_limit(lab: Lab) -> None:
    """Five times 60 MiB, each below the limit of 128."""
    result, after = lab.run(f"python3 -c '{HOGS}'", "echo alive", timeout_s=60)
    assert result.output.startswith("allocating\n")
    if "memory" in lab.backend._groups.in_force:
        assert "survivors 5" not in result.output
    assert after.output == "alive\n"


def test_files_in_memory_count_as_memory(lab: Lab) -> None:
    result, after = lab.run(f"python3 -c '{MEMFD}'", "echo alive", timeout_s=60)
    assert result.output.startswith("filling\n")
    assert "filled" not in result.output
    assert after.output == "alive\n"


def test_the_disk_is_bounded_in_one_file_and_in_many(lab: Lab) -> None:
    before = _free_bytes(lab.folder)
    one, many, room = lab.run(
        "echo filling; head -c 300M /dev/zero > big; echo $?; rm -f big",
        "echo filling; for n in {1..200}; do head -c 1M /dev/zero > f$n || break; done; "
        "sleep 2; echo $n files",
        "rm -f f*; echo fits > small; cat small",
        timeout_s=60,
    )
    assert one.output.startswith("filling\n")
    assert "\n0\n" not in one.output
    assert many.output.startswith("filling\n")
    held = 2 * LIMITS.disk_mib
    if lab.name == "namespaces":
        assert int(many.output.split()[-2]) <= LIMITS.disk_mib
    else:
        # Watched twice a second: stopped, not refused.
        assert "stopped: more than 8 MiB of files" in many.output or "200 files" not in many.output
        held = 400
    assert room.output == "fits\n"
    assert before - _free_bytes(lab.folder) < held << 20


def _free_bytes(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def test_one_sandbox_takes_no_more_than_its_cores(lab: Lab) -> None:
    if "cpu" not in lab.backend._groups.in_force:
        return
    sandbox = lab.create()
    spin = "for n in 1 2 3; do (while :; do :; done) & done; sleep 2; times | tail -1; kill 0"
    started_s = time.monotonic()
    lab.do(sandbox.run(spin, 20))
    wall_s = time.monotonic() - started_s
    group = sandbox._place.group
    assert group is not None
    stat = (group.folders["cpu"] / "cpu.stat").read_text().split()
    found = dict(zip(stat[::2], map(int, stat[1::2]), strict=True))
    # Three spinning processes on one core's worth of time were held back in most periods, unless
    # this machine had less than a core for them anyway.
    assert found["nr_periods"] > 0
    assert found.get("nr_throttled", 0) > 0 or os.getloadavg()[0] > (os.cpu_count() or 1)
    assert wall_s < 20
    lab.do(sandbox.destroy())


def test_endless_output_costs_the_worker_no_memory(lab: Lab) -> None:
    before_kib = _resident_kib()
    (result,) = lab.run("yes $(head -c 1000 /dev/zero | tr '\\0' x)", timeout_s=60)
    assert "[stopped after 64 MiB of output]" in result.output
    assert len(result.output) < LIMITS.output_chars + 200
    assert _resident_kib() - before_kib < 20_000


def _resident_kib() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") >> 10


def test_a_command_that_closes_its_streams_still_ends(lab: Lab) -> None:
    closed, after = lab.run("exec 1>&- 2>&-; sleep 0.2; exit 9", "echo alive")
    assert (closed.exit_code, closed.output) == (9, "")
    assert after.output == "alive\n"
