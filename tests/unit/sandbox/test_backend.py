"""Opening a backend: by name, as root, as an ordinary user, and where it is forbidden."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import rlmix
from rlmix.core.errors import ConfigError
from rlmix.sandbox.backend import open_backend

from .conftest import LIMITS, Lab

SCENARIO = """
import asyncio, json, os, sys
from pathlib import Path
from rlmix.core.errors import SandboxError
from rlmix.core.task import Commit, HiddenTask, PublicTask
from rlmix.sandbox.backend import open_backend
from rlmix.sandbox.protocol import SandboxLimits
from rlmix.tasks.verdict import judge

LIMITS = SandboxLimits(
    memory_mib=256, pids=32, disk_mib=8, output_chars=2000, command_timeout_s=10.0
)
HISTORY = (Commit(message="m", files={"a.py": "def f():\\n    return 1\\n"}),)
TEST = (
    "import unittest\\nfrom a import f\\nclass T(unittest.TestCase):\\n"
    "    def test_f(self):\\n        self.assertEqual(f(), 2)\\n"
)

async def main(scratch, name, allow, landlock_abi):
    try:
        if landlock_abi:
            from rlmix.sandbox.weak import WeakBackend
            folder = Path(scratch, "w")
            folder.mkdir()
            backend = WeakBackend(
                limits=LIMITS, folder=folder, run_id="user", uids=None,
                landlock_abi=landlock_abi,
            )
            await backend.open()
        else:
            backend = await open_backend(
                name, LIMITS, Path(scratch), "user",
                allow_weak=allow == "weak", allow_unisolated=allow == "unisolated",
            )
    except SandboxError as error:
        return {"error": str(error)}
    template = await backend.prepare(HISTORY)
    sandbox = await backend.create(template)
    run = await sandbox.run("sed -i s/1/2/ a.py; id -u; echo x 2>/dev/null >/usr/x; submit")
    launcher = getattr(getattr(backend, "_link", None), "pid", 0)
    signals = await sandbox.run(
        f"for p in {launcher} {os.getpid()} $(grep PPid /proc/$PPID/status | cut -f2) -1; do "
        "kill -0 -- $p 2>/dev/null && echo sent || echo refused; done"
    ) if landlock_abi else None
    slow = await sandbox.run("setsid sleep 99 & sleep 99", timeout_s=0.3)
    diff = await sandbox.capture_diff()
    await sandbox.destroy()
    public = PublicTask(task_id="t", split="train", issue="", history=HISTORY)
    hidden = HiddenTask(
        task_id="t", tests={"test_h.py": TEST}, required_tests=("test_h.T.test_f",),
        reference_diff="",
    )
    good = await judge(public, hidden, diff, backend)
    bad = await judge(public, hidden, diff.replace(b"return 2", b"return 3"), backend)
    await backend.close()
    return {
        "euid": os.geteuid(), "name": backend.name, "warnings": backend.warnings,
        "output": run.output, "submitted": run.submitted, "timed_out": slow.timed_out,
        "good": good.outcome, "bad": bad.outcome, "left": os.listdir(scratch),
        "signals": " ".join(signals.output.split()) if signals else "",
    }

print(json.dumps(asyncio.run(main(*sys.argv[1:4], int(sys.argv[4])))))
"""


def run_scenario(
    tmp_path: Path,
    *,
    wrap: str,
    backend: str = "namespaces",
    allow: str = "nothing",
    landlock_abi: int = 0,
) -> dict[str, object]:
    """Run SCENARIO in a child, prepared by the shell text `wrap`, which ends in a command prefix.

    The child gets a private mount namespace in which interpreter and code are readable for any
    user, since the real ones may lie below a home folder that is not.
    """
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    if not all(map(shutil.which, ("unshare", "setpriv"))):
        pytest.skip("needs unshare and setpriv")
    script = tmp_path / "scenario.py"
    script.write_text(SCENARIO)
    prefix = os.path.realpath(sys.base_prefix)
    shell = f"""
set -e
mount --make-rprivate / 2>/dev/null || true
mount -t tmpfs -o mode=755 tmpfs /mnt
mkdir /mnt/python /mnt/src /mnt/site /mnt/scratch
mount --bind {prefix} /mnt/python
mount --bind {Path(rlmix.__file__).parents[1]} /mnt/src
mount --bind {sysconfig.get_path("purelib")} /mnt/site
cp {script} /mnt/scenario.py
chmod 777 /mnt/scratch
export PYTHONPATH=/mnt/src:/mnt/site PYTHONDONTWRITEBYTECODE=1
cd /mnt
{wrap} /mnt/python/bin/python{sys.version_info[0]}.{sys.version_info[1]} -S /mnt/scenario.py \
    /mnt/scratch {backend} {allow} {landlock_abi}
"""
    done = subprocess.run(
        ["unshare", "--mount", "/bin/sh", "-c", shell], capture_output=True, text=True, timeout=120
    )
    if done.returncode != 0 and "unshare" in done.stderr:
        pytest.skip(f"no mount namespace here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


GOOD = {"submitted": True, "timed_out": True, "good": "pass", "bad": "fail", "left": []}


def test_an_ordinary_user_gets_the_same_sandbox(tmp_path: Path) -> None:
    found = run_scenario(tmp_path, wrap="setpriv --reuid=65534 --regid=65534 --clear-groups")
    # Root's groups are not this user's to write; a delegated version 2 would be.
    assert all("no control group" in warning for warning in found.pop("warnings"))  # type: ignore[attr-defined]
    assert {key: found[key] for key in GOOD} == GOOD
    assert (found["euid"], found["name"], found["output"]) == (65534, "namespaces", "1000\n")


def test_root_without_other_ids_keeps_its_own_and_says_so(tmp_path: Path) -> None:
    found = run_scenario(tmp_path, wrap="unshare --user --map-root-user")
    assert {key: found[key] for key in GOOD} == GOOD
    assert found["euid"] == 0
    assert any("root's id outside" in warning for warning in found["warnings"])  # type: ignore[attr-defined]


FORBID = (
    "exec unshare --user --map-root-user /bin/sh -c "
    "'echo 0 > /proc/sys/user/max_user_namespaces; exec \"$@\"' sh"
)


def test_where_user_namespaces_are_forbidden_the_message_says_the_fix(tmp_path: Path) -> None:
    found = run_scenario(tmp_path, wrap=FORBID)
    message = str(found["error"])
    assert message.startswith("sandbox.backend=namespaces does not work here: ")
    assert "`sudo sysctl -w user.max_user_namespaces=15000`" in message
    assert "sandbox.allow_unisolated=true" in message


def test_where_user_namespaces_are_forbidden_no_isolation_can_be_allowed(tmp_path: Path) -> None:
    found = run_scenario(tmp_path, wrap=FORBID, allow="unisolated")
    assert {key: found[key] for key in GOOD} == GOOD
    assert found["name"] == "unisolated"
    assert "NOT isolated" in str(found["warnings"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root drops to another user id")
def test_roots_sandboxes_run_under_different_unprivileged_ids(lab: Lab) -> None:
    first, second = lab.create(), lab.create()
    ids = [os.stat(f"/proc/{sandbox.pid}").st_uid for sandbox in (first, second)]
    assert min(ids) >= 1 << 30
    assert ids[0] != ids[1]
    lab.do(first.destroy())
    lab.do(second.destroy())


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'chroot'; allowed: apptainer, docker, names"):
        asyncio.run(open_backend("chroot", LIMITS, tmp_path, "r"))


def test_no_isolation_must_be_allowed_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set sandbox\.allow_unisolated=true"):
        asyncio.run(open_backend("unisolated", LIMITS, tmp_path, "r"))
    assert list(tmp_path.iterdir()) == []
