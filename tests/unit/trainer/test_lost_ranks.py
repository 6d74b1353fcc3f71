"""Ranks killed with SIGKILL at random moments: what the trainer knows afterwards is as if nothing
had happened. Real processes, real checkpoints; the loop's side of it is what is tested."""

import asyncio
import contextlib
import os
import random
from signal import SIGKILL, SIGSTOP

import pytest
import torch

from rlmix.core.errors import DataError, LaunchError, TrainerError, TrainerLostError
from rlmix.loop.trainer_ranks import cause_of
from rlmix.loop.trainer_recovery import RecoveringTrainer
from tests.unit.trainer.processes import start_ranks

SAVE_EVERY = 2
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


async def train(trainer, folder, samples, *, num_steps, before_call=lambda: None):
    """Steps with a checkpoint after every second; (metrics, weights and optimizer at the end)."""
    await trainer.call("load", folder, timeout_s=LIMIT_S)
    rows = []
    for step in range(1, num_steps + 1):
        part = samples[step % 3 :: 2] + samples[:2]
        before_call()
        result = await trainer.call(
            "train_step", part, step=step, version=step + 1, timeout_s=LIMIT_S
        )
        rows.append({k: v for k, v in result.metrics.items() if not k.startswith("time/")})
        if step % SAVE_EVERY == 0:
            before_call()
            await trainer.call("save", step, {"step": step}, timeout_s=LIMIT_S)
    return rows, await trainer.call("state", timeout_s=LIMIT_S)


@pytest.mark.parametrize("num_kills", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_ranks_killed_at_random_moments_change_no_bit(start, model_dir, samples, num_kills):
    chance = random.Random(num_kills)
    num_steps = num_kills + 1
    whole, _, quiet = start("whole")
    rows, (weights, state) = asyncio.run(train(whole, model_dir, samples, num_steps=num_steps))
    assert quiet == []
    whole.kill()
    trainer, handles, events = start("killed")
    killers = []

    async def kill_later():
        # A step takes some tenths of a second, a new start some seconds.
        await asyncio.sleep(chance.choice((0.05, 0.3, 1.0)) * chance.random())
        os.kill(chance.choice([handle for handle in handles[-2:] if handle.is_alive]).pid, SIGKILL)

    def before_call():
        if len(killers) < num_kills and chance.random() < 0.8:
            killers.append(asyncio.ensure_future(kill_later()))

    async def run():
        found = await train(
            trainer, model_dir, samples, num_steps=num_steps, before_call=before_call
        )
        await asyncio.gather(*killers)
        return found

    again, (killed_weights, killed_state) = asyncio.run(run())
    assert again == rows
    assert all(torch.equal(killed_weights[name], weights[name]) for name in weights)
    assert all(torch.equal(killed_state[name], state[name]) for name in state)
    assert len(killers) >= num_kills / 2
    lost = [reason for kind, reason, _ in events if kind == "trainer_lost"]
    assert lost
    assert all(reason.startswith("trainer: trainer-") for reason in lost)


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
        os.kill(handles[1].pid, SIGKILL)
        return await trainer.call("publish", 3, timeout_s=LIMIT_S)

    report = asyncio.run(run())
    assert report.version == 3
    (_, reason, _), (_, how, facts) = events
    assert reason.startswith("trainer: trainer-1 died during publish: ")
    assert how == "all ranks again, from step_000002"
    assert facts == {"step": 2, "steps_done_again": 1, "incarnation": 2}


def test_a_rank_that_is_silent_for_too_long_counts_as_lost(start, model_dir):
    trainer, handles, events = start("silent", max_restarts=0)
    os.kill(handles[1].pid, SIGSTOP)
    with pytest.raises(TrainerLostError, match=r"trainer-1.* did not answer to \w+ in time"):
        asyncio.run(trainer.call("load", model_dir, timeout_s=15.0))
    assert not any(handle.is_alive for handle in handles)
    assert len(events) == 1


def test_more_losses_than_allowed_end_the_run_with_the_reason(start, model_dir):
    trainer, handles, events = start("often", max_restarts=0)
    os.kill(handles[0].pid, SIGKILL)
    with pytest.raises(TrainerLostError, match=r"trainer-0 died during .*\n.*launch.max_restarts"):
        asyncio.run(trainer.call("load", model_dir, timeout_s=LIMIT_S))
    assert [kind for kind, _, _ in events] == ["trainer_lost"]
