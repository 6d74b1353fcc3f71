"""Replicas whose machine does not see the trainer's folder: versions come through a store."""

import asyncio

import pytest

from rlmix.pools.spec import StagingSpec
from rlmix.pools.staging import StagedVersions
from rlmix.weights.remote import RemoteStore
from rlmix.weights.shipping import ship_version
from rlmix.weights.store import list_versions, version_dir
from tests.unit.pools.conftest import make_replica_spec, make_version


def publish(stage, version):
    """A version in the trainer's folder, and in the remote store."""
    if version:
        make_version(stage.store, version)
    remote = RemoteStore(str(stage.folder / "remote"))
    ship_version(stage.store, "bf16", version, remote=remote, full_every=10, keep=10)


def staging(stage):
    url = str(stage.folder / "remote")
    return StagingSpec(url=url, folder=stage.folder / "machine", limit_s=20.0)


def spec_of(stage, name):
    return make_replica_spec(name, stage.folder, staging=staging(stage))


def test_a_fleet_fetches_a_version_once_a_machine_and_tells_bytes_seconds_and_pause(stage):
    publish(stage, 0)

    async def scenario():
        names = ("h100-0", "h100-1")
        fleet = stage.make_fleet(*[spec_of(stage, name) for name in names], max_parallel_pulls=1)
        await fleet.start(0)
        assert fleet.drain_updates() == []
        publish(stage, 1)
        await fleet.roll_out(1)
        await fleet.wait_for_version(1, timeout_s=60)
        return fleet.drain_updates()

    async def staged():
        async with stage:
            return await scenario()

    reports = asyncio.run(staged())
    assert [report.version for report in reports] == [1, 1]
    # One of them read it, the other found it there.
    assert sorted(report.pull_bytes > 0 for report in reports) == [False, True]
    assert all(report.pause_s > 0 for report in reports)
    assert list_versions(stage.folder / "machine", "bf16") == [0, 1]
    told = [facts for kind, facts in stage.events if kind == "replica_updated"]
    assert sum(facts["pull_bytes"] for facts in told) == sum(r.pull_bytes for r in reports)


def test_a_version_that_arrives_damaged_is_refused_and_the_replica_serves_on(stage):
    publish(stage, 0)

    async def scenario():
        fleet = stage.make_fleet(spec_of(stage, "h100-0"))
        await fleet.start(0)
        publish(stage, 1)
        for path in (stage.folder / "remote" / "bf16" / "v000001").rglob("config.json"):
            path.write_text("{}")
        await fleet.roll_out(1)
        while not any(kind == "update_refused" for kind, _ in stage.events):
            await asyncio.sleep(0.05)
        assert stage.status("h100-0").version == 0
        publish(stage, 2)
        await fleet.roll_out(2)
        await fleet.wait_for_version(2, timeout_s=60)

    async def staged():
        async with stage:
            async with asyncio.timeout(120):
                await scenario()

    asyncio.run(staged())
    reasons = [facts["reason"] for kind, facts in stage.events if kind == "update_refused"]
    assert "has no whole way to version 1 of view bf16" in reasons[0]


def test_without_a_store_the_trainers_folder_is_the_copy(tmp_path):
    versions = StagedVersions(None)
    folder = tmp_path / "bf16" / "v000003"
    assert asyncio.run(versions.bring(folder)) == folder
    assert versions.take(3) == (0, 0.0)


def test_bytes_and_seconds_of_a_version_are_told_once(stage):
    publish(stage, 0)
    versions = StagedVersions(staging(stage))
    folder = version_dir(stage.store, "bf16", 0)
    copy = asyncio.run(versions.bring(folder))
    assert copy == version_dir(stage.folder / "machine", "bf16", 0)
    assert asyncio.run(versions.bring(folder)) == copy
    pulled, seconds = versions.take(0)
    assert pulled == (folder / "config.json").stat().st_size
    assert seconds == pytest.approx(0, abs=30)
    assert versions.take(0) == (0, 0.0)
