"""Control groups: which are found, what is written, and that none is left."""

import os
import subprocess
from pathlib import Path

import pytest

from rlmix.sandbox.cgroups import (
    Group,
    Hierarchy,
    group_name,
    hierarchies,
    open_groups,
    remove_groups,
    set_limits,
)

from .conftest import LIMITS

V1_MOUNTS = """\
33 24 0:30 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
34 33 0:31 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
35 33 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
36 33 0:33 /docker/abc /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
37 33 0:34 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
V1_OWN = "9:cpu,cpuacct:/a\n8:pids:/docker/abc/x\n4:memory:/a/b\n0::/\n"


def test_each_controller_of_version_1_has_its_own_folder() -> None:
    trees = hierarchies(V1_MOUNTS, V1_OWN)
    assert [(tree.version, tree.controllers, tree.own) for tree in trees] == [
        (2, ("memory", "pids", "cpu"), "/sys/fs/cgroup/unified"),
        (1, ("cpu",), "/sys/fs/cgroup/cpu,cpuacct/a"),
        (1, ("memory",), "/sys/fs/cgroup/memory/a/b"),
        (1, ("pids",), "/sys/fs/cgroup/pids/x"),
    ]


def test_the_own_folder_of_version_2_is_below_its_mount() -> None:
    mounts = "30 23 0:26 / /sys/fs/my\\040groups rw - cgroup2 cgroup2 rw,nsdelegate\n"
    (tree,) = hierarchies(mounts, "0::/user.slice/user-1000.slice/session-2.scope\n")
    assert tree.own == "/sys/fs/my groups/user.slice/user-1000.slice/session-2.scope"
    assert tree.mount == "/sys/fs/my groups"


def group_of(folder: Path, version: int, names: tuple[str, ...]) -> Group:
    for name in names:
        (folder / name).touch()
    return Group(folders=dict.fromkeys(("memory", "pids", "cpu"), folder), version=version)


def test_limits_are_written_as_version_2_reads_them(tmp_path: Path) -> None:
    from dataclasses import replace

    names = ("memory.max", "memory.swap.max", "pids.max", "cpu.max")
    group = group_of(tmp_path, 2, names)
    set_limits(group, replace(LIMITS, cpus=1.5))
    # 256 MiB, twice 8 MiB of files, 16 MiB of /dev/shm; four processes are ours.
    assert [(tmp_path / name).read_text() for name in names] == [
        str(288 << 20),
        "0",
        "36",
        "150000 100000",
    ]


def test_limits_are_written_as_version_1_reads_them(tmp_path: Path) -> None:
    from dataclasses import replace

    names = ("memory.limit_in_bytes", "pids.max", "cpu.cfs_period_us", "cpu.cfs_quota_us")
    group = group_of(tmp_path, 1, names)
    set_limits(group, replace(LIMITS, cpus=0.25))
    assert [(tmp_path / name).read_text() for name in names] == [
        str(288 << 20),
        "36",
        "100000",
        "25000",
    ]


def test_a_controllers_missing_file_is_an_error_and_not_a_new_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        set_limits(group_of(tmp_path, 1, ()), LIMITS)
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_may_be_written_no_limit_is_claimed(tmp_path: Path) -> None:
    (tmp_path / "cgroup.subtree_control").write_text("")
    own = str(tmp_path)
    trees = [Hierarchy(version=2, controllers=("memory", "pids", "cpu"), mount=own, own=own)]
    pool = open_groups(LIMITS, "rlmix-none", trees)
    assert (pool.in_force, pool.take()) == ((), None)
    assert [path.name for path in tmp_path.iterdir()] == ["cgroup.subtree_control"]


def test_groups_of_this_machine_hold_processes_count_them_and_go() -> None:
    name = group_name(f"unit/../{os.getpid()}", "w")
    assert "/" not in name
    pool = open_groups(LIMITS, name)
    if "pids" not in pool.in_force:
        pytest.skip("this user may make no control group here")
    first = pool.take()
    assert first is not None
    second = pool.take()
    assert second is not None
    assert set(first.join_files).isdisjoint(second.join_files)
    joins = "".join(f"echo 0 >'{path}';" for path in first.join_files)
    sleeper = subprocess.Popen(["/bin/sh", "-c", f"{joins} echo in; exec sleep 60"], stdout=-1)
    assert sleeper.stdout is not None
    assert sleeper.stdout.readline() == b"in\n"
    assert first.processes() == {sleeper.pid}
    pool.give_back(first)
    assert sleeper.wait(10) == -9
    sleeper.stdout.close()
    assert pool.take() is first  # Handed on, not made again.
    parents = list(pool.parents.values())
    assert all(path.is_dir() for path in parents)
    pool.close()
    assert not any(path.exists() for path in parents)


def test_removing_groups_ends_who_is_in_them() -> None:
    pool = open_groups(LIMITS, group_name(f"unit{os.getpid()}", "left"))
    if "pids" not in pool.in_force:
        pytest.skip("this user may make no control group here")
    group = pool.take()
    assert group is not None
    joins = "".join(f"echo 0 >'{path}';" for path in group.join_files)
    sleeper = subprocess.Popen(["/bin/sh", "-c", f"{joins} echo in; exec sleep 60"], stdout=-1)
    assert sleeper.stdout is not None
    sleeper.stdout.readline()
    assert sum(remove_groups(path) for path in pool.parents.values()) >= 1
    assert sleeper.wait(10) == -9
    sleeper.stdout.close()
    assert not any(path.exists() for path in pool.parents.values())
