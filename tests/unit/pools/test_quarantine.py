"""A pool taken out of routing and let in again: real engines, real router."""

import asyncio
import os

import numpy as np
import pytest
import torch

from rlmix.algos.metrics import TokenFacts, step_metrics
from rlmix.config.compose import load_config
from rlmix.engine.scripted import HashPolicy
from rlmix.loop.alarms import AlarmWatch
from rlmix.pools.spec import SlotState

POLICY = HashPolicy(vocab_size=256, seed=0)
"""What the scripted engines sample from, so it can stand for the trainer."""

TOKENS = 12


def run(stage, scenario):
    async def whole():
        async with stage:
            return await scenario()

    return asyncio.run(whole())


def two_pools(stage, **changes):
    return stage.make_fleet(
        *[stage.spec(f"{pool}-{i}", pool=pool) for pool in ("b200", "a100") for i in range(2)],
        **changes,
    )


def states(fleet, pool):
    return {status.state for status in fleet.status() if status.pool == pool}


async def served_by(stage, session_id):
    status, headers = await stage.generate(session_id)
    assert status == 200
    return headers["X-Rlmix-Replica"].rpartition("-")[0]


def test_a_quarantined_pool_loses_its_sessions_and_engines_and_comes_back_when_released(stage):
    async def scenario():
        fleet = two_pools(stage, canary_prompts=((1, 2, 3),))
        await fleet.start(0)
        homes = {f"s{i}": await served_by(stage, f"s{i}") for i in range(8)}
        assert set(homes.values()) == {"b200", "a100"}
        pids = [status.pid for status in fleet.status() if status.pool == "b200"]
        assert fleet.serving_pools() == {"b200", "a100"}

        assert await fleet.quarantine("b200", "it drifts") == ["b200-0", "b200-1"]
        # At once, before any engine has ended: nothing may be sampled there any more.
        assert fleet.serving_pools() == {"a100"}
        assert {await served_by(stage, session) for session in homes} == {"a100"}
        await stage.until(lambda: states(fleet, "b200") == {SlotState.QUARANTINED})
        assert stage.status("b200-0").reason == "it drifts"
        assert all(status.is_held for status in fleet.status() if status.pool == "b200")
        await stage.until(lambda: not any(is_running(pid) for pid in pids))
        assert await fleet.quarantine("b200", "again") == []

        # It misses a version, and nothing waits for it.
        stage.publish(1)
        await fleet.roll_out(1)
        await fleet.wait_for_version(1, timeout_s=10)
        assert stage.status("b200-0").incarnation == 1

        assert fleet.release("b200") == ["b200-0", "b200-1"]
        await stage.until(lambda: states(fleet, "b200") == {SlotState.READY}, timeout_s=20)
        assert stage.status("b200-0").version == 1
        assert "b200" in {await served_by(stage, f"t{i}") for i in range(8)}

    run(stage, scenario)
    assert stage.kinds("b200-0").count("replica_ready") == 2
    assert "replica_restarting" not in stage.kinds("b200-0")


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_released_replica_that_fails_its_canaries_does_not_serve(stage):
    is_wrong = False

    async def references(version, outputs):
        return [[value - 0.3 * is_wrong for value in output.sampler_logprobs] for output in outputs]

    async def scenario():
        nonlocal is_wrong
        specs = [stage.spec("b200-0", pool="b200"), stage.spec("a100-0", pool="a100")]
        fleet = stage.make_fleet(
            *specs, references=references, canary_prompts=((1, 2, 3),), max_restarts=0
        )
        await fleet.start(0)
        await fleet.quarantine("b200", "it drifts")
        await stage.until(lambda: states(fleet, "b200") == {SlotState.QUARANTINED})
        is_wrong = True
        fleet.release("b200")
        # Held again, by the gate this time; a later release would start it once more.
        await stage.until(
            lambda: stage.status("b200-0").is_held and stage.status("b200-0").incarnation == 2,
            timeout_s=20,
        )
        assert "0.3" in stage.status("b200-0").reason
        assert await served_by(stage, "s0") == "a100"

    run(stage, scenario)


def test_a_pool_held_before_the_start_is_not_booted_and_not_waited_for(stage):
    async def scenario():
        fleet = two_pools(stage)
        assert await fleet.quarantine("b200", "in quarantine since step 4")
        await fleet.start(0)
        assert states(fleet, "a100") == {SlotState.READY}
        assert [status.incarnation for status in fleet.status() if status.pool == "b200"] == [0, 0]
        await fleet.stop()
        assert states(fleet, "b200") == {SlotState.STOPPED}

    run(stage, scenario)


async def step_of(stage, step):
    """Sample a few sessions through the router and measure them as a trainer would."""
    d, pools = [], []
    for index in range(16):
        prompt = [step, index]
        body = {
            "rid": f"{step}-{index}", "input_ids": prompt, "return_logprob": True,
            "sampling_params": {"max_new_tokens": TOKENS, "temperature": 1.0, "top_p": 1.0,
                                "top_k": -1, "stop_token_ids": [], "sampling_seed": index},
        }  # fmt: skip
        async with stage.http.post(
            stage.router_url + "/generate", json=body, headers={"X-Session-Id": body["rid"]}
        ) as response:
            assert response.status == 200
            answer = await response.json()
            pools += [response.headers["X-Rlmix-Replica"].rpartition("-")[0]] * TOKENS
        for position, (logprob, token, *_) in enumerate(
            answer["meta_info"]["output_token_logprobs"]
        ):
            before = [*prompt, *answer["output_ids"][:position]]
            d.append(float(POLICY.logprobs(before, version=0)[token]) - logprob)
    names = sorted(set(pools))
    # Rounding of another kernel: what an honest pool differs by.
    d_T = torch.tensor(d) + 0.01 * torch.from_numpy(np.random.default_rng(step).normal(size=len(d)))
    ones_T = torch.ones(len(d))
    facts = TokenFacts(
        log_ratios_T=d_T,
        weights_T=ones_T,
        outside_T=ones_T == 0,
        entropy_T=ones_T,
        pools_T=torch.tensor([names.index(pool) for pool in pools]),
        lags_T=torch.zeros(len(d), dtype=torch.int64),
        positions_T=torch.zeros(len(d), dtype=torch.int64),
        sequences_T=torch.arange(len(d)),
        coeff_l1_T=None,
        tail_ratio_T=None,
    )
    return step_metrics(facts, pool_names=names)


@pytest.mark.parametrize("action", ["quarantine", "stop"])
def test_a_pool_that_reports_shifted_logprobs_is_found_and_acted_on(stage, action):
    config = load_config(
        "train",
        [f"alarms.pool_drift_action={action}", "alarms.min_tokens=48", "alarms.k3_limit=1"],
    ).config.alarms

    async def scenario():
        fleet = two_pools(stage)
        await fleet.start(0)
        watch = AlarmWatch(
            config,
            pools=fleet,
            on_event=lambda kind, reason, **facts: stage.events.append(
                (kind, {"reason": reason, **facts})
            ),
            tolerances_nats={},
        )
        rows, answers = [], []
        for step in range(1, 13):
            if step == 5:
                for name in ("b200-0", "b200-1"):
                    url = stage.status(name).url
                    fault = {"fault": "shifted_logprobs", "times": 10_000}
                    await stage.post(f"{url}/faults", **fault)
            rows.append(await step_of(stage, step))
            answers.append(await watch.after_step(step, rows[-1]))
            if answers[-1]:
                break
        return rows, answers, watch.records

    rows, answers, records = run(stage, scenario)
    assert [(r.name, r.pool, r.since_step, r.raised_step) for r in records] == [
        ("pool_drift", "b200", 5, 7)
    ]
    kinds = [kind for kind, _ in stage.events if kind.startswith(("alarm_", "pool_"))]
    if action == "quarantine":
        assert kinds == ["alarm_raised", "pool_quarantined"]
        assert set(answers) == {""}
        for row in rows[7:]:  # The steps after it have their sessions, all from the other pool.
            assert row["mismatch/tokens"] == 16 * TOKENS
            assert "mismatch/by_pool/b200/tokens" not in row
            assert row["mismatch/mean_abs"] < 0.02
    else:
        assert kinds == ["alarm_raised"]
        assert len(answers) == 7
        assert "the run diverged: pool b200" in answers[6]
        assert "since step 5" in answers[6]
