"""The weak backend as those get it who need it: ordinary users, roots without namespaces, kernels
whose Landlock keeps no signals in."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from rlmix.core.errors import SandboxError
from rlmix.sandbox import landlock
from rlmix.sandbox.reap import remove_tree
from rlmix.sandbox.uids import uid_range
from rlmix.sandbox.watch import disk_bytes
from rlmix.sandbox.weak import WeakBackend, closed_ancestor

from .conftest import LIMITS
from .test_backend import FORBID, GOOD, run_scenario

ORDINARY = "setpriv --reuid=65534 --regid=65534 --clear-groups"
needs_landlock = pytest.mark.skipif(
    landlock.abi() < landlock.MIN_ABI, reason="this kernel has no Landlock 3 or later"
)


@needs_landlock
def test_where_user_namespaces_are_forbidden_auto_takes_weak_when_allowed(tmp_path: Path) -> None:
    found = run_scenario(tmp_path, wrap=FORBID, backend="auto", allow="weak")
    assert {key: found[key] for key in GOOD} == GOOD
    assert found["name"] == "weak"
    why, *rest = found["warnings"]  # type: ignore[misc]
    assert why.startswith("weak stands in: sandbox.backend=namespaces does not work here: ")
    assert any(warning.startswith("weak isolation: ") for warning in rest)


def test_where_user_namespaces_are_forbidden_auto_says_what_may_be_allowed(tmp_path: Path) -> None:
    message = str(run_scenario(tmp_path, wrap=FORBID, backend="auto")["error"])
    assert "`sudo sysctl -w user.max_user_namespaces=15000`" in message
    assert "To run with weaker isolation (Landlock): sandbox.allow_weak=true" in message
    assert "To run without isolation: sandbox.allow_unisolated=true" in message


POD = (
    "setpriv --bounding-set=-sys_admin,-sys_ptrace --inh-caps=-all "
    f"/mnt/python/bin/python3.{sys.version_info[1]} -S -c 'import os, sys; "
    "from rlmix.sandbox import confine, seccomp; confine.no_new_rights(); "
    "confine.load_filter(seccomp.build_filter()); os.execv(sys.argv[1], sys.argv[1:])'"
)
"""Root of an unprivileged pod: a filter and no CAP_SYS_ADMIN, so no mounts and no namespaces."""


@needs_landlock
def test_root_of_an_unprivileged_pod_gets_weak_sandboxes_with_ids_of_their_own(
    tmp_path: Path,
) -> None:
    found = run_scenario(tmp_path, wrap=POD, backend="auto", allow="weak")
    assert {key: found[key] for key in GOOD} == GOOD
    assert (found["name"], found["euid"]) == ("weak", 0)
    assert int(str(found["output"])) >= 1 << 30
    refused = str(run_scenario(tmp_path, wrap=POD, backend="namespaces")["error"])
    assert "--security-opt seccomp=unconfined" in refused


@needs_landlock
def test_an_ordinary_user_gets_weak_sandboxes(tmp_path: Path) -> None:
    found = run_scenario(tmp_path, wrap=ORDINARY, backend="weak")
    assert {key: found[key] for key in GOOD} == GOOD
    assert (found["name"], found["euid"]) == ("weak", 65534)
    assert "modes and times of this user's files" in str(found["warnings"])


@needs_landlock
def test_before_landlock_keeps_signals_in_the_filter_protects_our_processes(tmp_path: Path) -> None:
    """As on stock Ubuntu 24.04 (Linux 6.8, Landlock 4): same user id, same process numbers."""
    found = run_scenario(tmp_path, wrap=ORDINARY, backend="weak", landlock_abi=4)
    assert {key: found[key] for key in GOOD} == GOOD
    assert "can signal other processes of this user, but not rlmix's own" in str(found["warnings"])
    # The launcher, the worker, the supervisor and everybody at once.
    assert found["signals"] == "refused refused refused refused"


@needs_landlock
def test_a_kernel_with_too_old_a_landlock_is_refused(tmp_path: Path) -> None:
    backend = WeakBackend(
        limits=LIMITS, folder=tmp_path, run_id="old", uids=uid_range(), landlock_abi=2
    )
    with pytest.raises(SandboxError, match=r"Landlock has version 2 here .* and 3 is needed"):
        asyncio.run(backend.open())


def test_rights_that_a_version_does_not_know_are_not_asked_for() -> None:
    assert landlock.file_rights(1) == (1 << 13) - 1
    assert landlock.file_rights(3) == (1 << 15) - 1
    assert landlock.file_rights(9) == (1 << 16) - 1
    old = landlock.rules(version=3, writable=["/w"], readable=[], prefix="/usr")
    assert (old["size"], old["handled"]) == (8, ((1 << 15) - 1, 0, 0))
    new = landlock.rules(version=6, writable=["/w"], readable=[], prefix="/usr")
    assert (new["size"], new["handled"]) == (24, ((1 << 16) - 1, 3, 3))


def test_the_interpreters_packages_are_listed_but_not_read(tmp_path: Path) -> None:
    for name in ("bin/python3", "lib/python3.11/os.py", "lib/python3.11/site-packages/x.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    rules = dict(landlock.interpreter_rules(tmp_path))
    assert rules[str(tmp_path)] == landlock.READ_DIR
    assert rules[str(tmp_path / "lib/python3.11/os.py")] == landlock.RUN
    assert not any("site-packages" in path for path in rules)


def test_a_folder_that_others_may_not_enter_is_named(tmp_path: Path) -> None:
    inner = tmp_path / "closed/open"
    inner.mkdir(parents=True)
    (tmp_path / "closed").chmod(0o700)
    inner.chmod(0o755)
    found = closed_ancestor(str(inner))
    assert found is not None
    assert str(inner).startswith(found)
    assert found != str(inner)
    assert closed_ancestor("/usr/bin") is None


def test_a_box_without_rights_to_its_folders_is_removed_and_nothing_beside_it(
    tmp_path: Path,
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    kept.chmod(0o500)
    box = tmp_path / "box"
    (box / "a/b").mkdir(parents=True)
    (box / "a/b/file").touch()
    (box / "link").symlink_to(kept)
    (box / "a/b").chmod(0)
    (box / "a").chmod(0)
    remove_tree(box)
    assert not box.exists()
    assert os.stat(kept).st_mode & 0o777 == 0o500


def test_disk_use_counts_blocks_and_not_holes(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"x" * (1 << 20))
    with open(tmp_path / "hole", "wb") as file:
        file.truncate(1 << 30)
    assert 1 << 20 <= disk_bytes(tmp_path) < 2 << 20
