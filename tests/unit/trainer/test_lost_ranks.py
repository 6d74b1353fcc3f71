"""Ranks killed with SIGKILL at random moments: what the trainer knows afterwards is as if nothing
had happened. Real processes, real checkpoints; the loop's side of it is what is tested."""

import asyncio
import contextlib
import os
import random
import signal

import pytest
import torch

from rlmix.core.errors import DataError, LaunchError, TrainerError, TrainerLostError
from rlmix.loop.trainer_ranks import cause_of
from rlmix.loop.trainer_recovery import RecoveringTrainer
from tests.unit.trainer.processes import start_ranks

NUM_STEPS, SAVE_EVERY = 5, 2
LIMIT_S = 240.0


def test_a_process_that_is_gone_explains_all_other_failures():
    gone = LaunchError("launch: actor trainer-1 is gone")
    broken = RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
    own = DataError("trainer: sessions ['a'] hold tokens of version 2")
    found = cause_of("train_step", {"trainer-0": own, "trainer-1": gone}, late=["trainer-2"])
    assert isinstance(found, TrainerLostError)
    assert str(found) == (
        "trainer: trainer-1 died during train_step: launch: actor trainer-1 is gone"
    )
    assert cause_of("train_step", {"trainer-0": broken, "trainer-1": own}, late=[]) is own
    lost = cause_of("save", {"trainer-0": broken}, late=["trainer-1"])
    assert "trainer-0 lost another rank during save" in str(lost)
    silent = cause_of("publish", {}, late=["trainer-1", "trainer-2"])
    assert isinstance(silent, TrainerLostError)
    assert str(silent) == "trainer: trainer-1, trainer-2 did not answer to publish in time"
    fault = TrainerError("trainer: 3 steps in a row were not finite")
    assert cause_of("train_step", {"trainer-0": fault}, late=["trainer-1"]) is fault


@pytest.fixture
def start(make_rank, tmp_path):
    """Start a recovering trainer of two ranks in a folder of its own."""
    with contextlib.ExitStack() as ends:

        def build(name, *, max_restarts=100):
            folder = tmp_path / name
            spec = make_rank(
                micro_batch_tokens=128,
                checkpoints_dir=str(folder / "checkpoints"),
                weights_store=str(folder / "weights"),
            )._spec
            ranks, handles = start_ranks(spec, 2)
            events = []
            trainer = RecoveringTrainer(
                ranks,
                checkpoints=folder / "checkpoints",
                max_restarts=max_restarts,
                restart_window_s=3600.0,
                on_event=lambda kind, reason, **facts: events.append((kind, reason, facts)),
            )
            ends.callback(trainer.kill)
            return trainer, handles, events

        yield build


async def train(trainer, folder, samples):
    """Five steps, a checkpoint after every second; (metrics, state of the last step)."""
    await trainer.call("load", folder, timeout_s=LIMIT_S)
    rows = []
    for step in range(1, NUM_STEPS + 1):
        part = samples[step % 3 :: 2] + samples[:2]
        result = await trainer.call(
            "train_step", part, step=step, version=step + 1, timeout_s=LIMIT_S
        )
        rows.append({k: v for k, v in result.metrics.items() if not k.startswith("time/")})
        if step % SAVE_EVERY == 0:
            await trainer.call("save", step, {"step": step}, timeout_s=LIMIT_S)
    return rows, await trainer.call("state", timeout_s=LIMIT_S)


def test_ranks_killed_at_random_moments_change_no_bit(start, model_dir, samples):
    chance = random.Random(11)
    whole, _, quiet = start("whole")
    rows, (weights, state) = asyncio.run(train(whole, model_dir, samples))
    assert quiet == []
    whole.kill()
    trainer, handles, events = start("killed")

    async def run():
        training = asyncio.ensure_future(train(trainer, model_dir, samples))
        for _ in range(3):
            await asyncio.sleep(chance.uniform(0.1, 4.0))
            if not training.done():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(chance.choice(handles[-2:]).pid, signal.SIGKILL)
        return await training

    again, (killed_weights, killed_state) = asyncio.run(run())
    assert again == rows
    assert all(torch.equal(killed_weights[name], weights[name]) for name in weights)
    assert all(torch.equal(killed_state[name], state[name]) for name in state)
    lost = [reason for kind, reason, _ in events if kind == "trainer_lost"]
    assert all("trainer: trainer-" in reason for reason in lost)


def test_a_rank_that_dies_after_a_checkpoint_costs_the_steps_since(
    start,
    model_dir,
    samples,
):
    trainer, handles, events = start("after")

    async def run():
        await trainer.call("load", model_dir, timeout_s=LIMIT_S)
        for step in (1, 2, 3):
            await trainer.call("train_step", samples[:6], step=step, version=4, timeout_s=LIMIT_S)
            if step == 2:
                await trainer.call("save", 2, {}, timeout_s=LIMIT_S)
        os.kill(handles[1].pid, signal.SIGKILL)
        return await trainer.call("publish", 3, timeout_s=LIMIT_S)

    report = asyncio.run(run())
    assert report.version == 3
    (_, reason, _), (_, how, facts) = events
    assert reason.startswith("trainer: trainer-1 died during publish: ")
    assert how == "all ranks again, from step_000002"
    assert facts == {"step": 2, "steps_done_again": 1, "incarnation": 2}


def test_more_losses_than_allowed_end_the_run_with_the_reason(start, model_dir):
    trainer, handles, events = start("often", max_restarts=0)
    os.kill(handles[0].pid, signal.SIGKILL)
    with pytest.raises(TrainerLostError, match=r"trainer-0 died during .*\n.*launch.max_restarts"):
        asyncio.run(trainer.call("load", model_dir, timeout_s=LIMIT_S))
    assert [kind for kind, _, _ in events] == ["trainer_lost"]
