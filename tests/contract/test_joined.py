"""A replica joins a server that runs already: read back, updated, watched, and left as it was."""

from pathlib import Path

import pytest

from rlmix.core.errors import EngineError
from rlmix.pools.engine_admin import EngineAdmin
from rlmix.pools.replica import Replica
from rlmix.pools.spec import PlanMismatch, ReplicaSpec
from tests.contract.checkpoints import CONTEXT
from tests.contract.servers import MAX_RUNNING
from tests.contract.talking import client_of, prompt, run, turn_under_way


def joining(engine, tmp_path: Path, *flags: str) -> Replica:
    argv = (
        "python", "-m", "sglang.launch_server", "--device", "cpu", "--attention-backend",
        "torch_native", "--sampling-backend", "pytorch", "--context-length", str(CONTEXT),
        "--max-running-requests", str(MAX_RUNNING), *flags,
    )  # fmt: skip
    expected = {
        "accelerator": "cpu", "weights": "bf16", "view": "bf16", "activations": "bf16",
        "kv": "bf16", "attention": "torch_native", "linear_attention": "none", "state": "none",
        "moe": "auto", "tp": "1", "version": "0.5.23",
    }  # fmt: skip
    spec = ReplicaSpec(
        name="joined-0", pool="joined", view="bf16", engine="sglang_external", url=engine.url,
        argv=argv, log_path=tmp_path / "log", ready_path=tmp_path / "ready", expected=expected,
        speed=1.0, max_running=MAX_RUNNING, boot_timeout_s=60.0, update_timeout_s=60.0,
        canary_tolerance_nats=0.1,
    )  # fmt: skip
    return Replica(spec)


@pytest.fixture
def real(engine):
    if engine.kind != "sglang":
        pytest.skip("only a real server is joined by its address")
    return engine


def test_a_running_server_is_joined_updated_in_each_mode_and_left_running(real, tmp_path):
    async def scenario():
        replica = joining(real, tmp_path)
        info = await replica.boot(0, real.folders[0])
        assert (info.url, info.pid, info.version) == (real.url, 0, 0)
        assert info.numerics_key.endswith("/sglang-0.5.23/real")
        assert "accelerator=cpu" in info.unverified
        answers = {}
        for version, mode in ((1, "retract"), (0, "in_place"), (1, "abort")):
            report = await replica.activate(version, real.folders[version], mode)
            assert report.version == version
            (canary,) = await replica.canary([prompt(1)], 8)
            answers.setdefault(version, []).append(canary.sampler_logprobs)
        # The same version gives the same answer whichever way it came.
        assert answers[1][0] == pytest.approx(answers[1][1], abs=real.max_nats)
        assert answers[1][0] != pytest.approx(answers[0][0], abs=1e-6)
        await replica.stop()
        replica.kill()
        admin = EngineAdmin(real.url, name="joined-0", token=None)
        await admin.ping()
        assert await admin.weight_version() == "1"

    run(scenario())


def test_a_cache_that_stays_in_use_is_told_at_the_limit_and_flushed_once_it_is_free(real):
    async def scenario():
        admin = EngineAdmin(real.url, name="joined-0", token=None)
        async with client_of(real) as client, turn_under_way(real, client) as turn:
            # It keeps its KV over the pause, so the cache is not free.
            await admin.pause("in_place", timeout_s=20)
            await admin.update_from_disk(real.folders[1], version=1, timeout_s=60)
            assert await admin.weight_version() == "1"
            with pytest.raises(EngineError, match="POST /flush_cache with 400"):
                await admin.flush_cache(timeout_s=1)
            await admin.resume(timeout_s=20)
            await admin.flush_cache(timeout_s=120)
            # The turn went on with the new weights, and says so.
            assert [span.version for span in (await turn).version_spans] == [0, 1]

    run(scenario())


def test_a_server_that_is_not_as_planned_is_refused_with_both_values(real, tmp_path):
    async def scenario():
        replica = joining(real, tmp_path, "--page-size", "64")
        with pytest.raises(PlanMismatch, match="page-size is 1, the plan says '64'"):
            await replica.boot(0, real.folders[0])

    run(scenario())
