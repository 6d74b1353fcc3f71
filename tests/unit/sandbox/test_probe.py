import os
from pathlib import Path

import pytest

from rlmix.core.errors import SandboxError
from rlmix.sandbox.probe import check_isolation, explain, outside_faults

from .conftest import Lab


def test_a_process_of_the_host_shows_every_fault() -> None:
    faults = outside_faults(os.getpid(), drops_uid=True)
    assert [fault for fault in faults if fault.startswith("shares")] == [
        f"shares the {name} namespace" for name in ("user", "mnt", "pid", "net", "ipc", "uts")
    ]
    if os.geteuid() == 0:
        assert "runs as root outside" in faults
        assert any(fault.startswith("holds capabilities") for fault in faults)


def test_a_sandbox_shows_none(lab: Lab) -> None:
    sandbox = lab.create()
    assert outside_faults(sandbox.pid, drops_uid=os.geteuid() == 0) == []
    lab.do(sandbox.destroy())


def test_a_leak_found_from_inside_is_named(lab: Lab) -> None:
    sandbox = lab.create()
    # A file that a sandbox does see stands for a host file that it must not see.
    leak = check_isolation(sandbox, pid=sandbox.pid, drops_uid=False, host_file=Path("/repo/a.py"))
    with pytest.raises(SandboxError, match="isolation is not complete here: readable:host"):
        lab.do(leak)
    lab.do(sandbox.destroy())


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        (
            "kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
    ],
)
def test_the_sysctl_that_forbids_is_named_with_its_fix(
    tmp_path: Path, name: str, value: str, fix: str
) -> None:
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text(value + "\n")
    assert fix in explain("bwrap: setting up uid map: Permission denied", tmp_path)


def test_a_container_is_told_its_flags(tmp_path: Path) -> None:
    refused = "bwrap: No permissions to create new namespace"
    assert "--security-opt seccomp=unconfined" in explain(refused, tmp_path)
    masked = "bwrap: Can't mount proc on /newroot/proc: Operation not permitted"
    assert "systempaths=unconfined" in explain(masked, tmp_path)
