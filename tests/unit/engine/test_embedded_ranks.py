"""A model served by several processes: the bits of one, and no process left behind."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor

from rlmix.core.errors import EngineError
from rlmix.engine.embedded.ranks import RankedModel, RankPlan, RowsOfStep
from rlmix.engine.embedded.shape import ModelShape
from rlmix.numerics.consistent.contract import CPU_TILING
from rlmix.numerics.consistent.model import ModelSpec, ModelTensors, tensors_of
from rlmix.numerics.consistent.serving import PromptChunk
from rlmix.numerics.consistent.shard import Layout
from tests.unit.numerics.consistent.shapes import EXPERTS, HIDDEN, VOCAB, new_spec, new_state

SLOTS, CONTEXT = 3, 60
IDS = np.random.default_rng(7).integers(0, VOCAB, CONTEXT)


def new_plan(
    layout: Layout, *, is_moe: bool, round_to: torch.dtype | None = torch.bfloat16
) -> tuple[RankPlan, ModelSpec]:
    spec = new_spec(is_moe=is_moe, round_to=round_to)
    shape = ModelShape(
        vocab_size=VOCAB,
        hidden=HIDDEN,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        num_experts=EXPERTS if is_moe else 0,
        top_k=spec.top_k,
        norm_topk_prob=True,
        moe_layers=frozenset(range(spec.num_layers)) if is_moe else frozenset(),
        rms_eps=spec.rms_eps,
        rope_theta=10000.0,
        tie_embeddings=False,
        context_length=CONTEXT,
        eos_ids=(),
    )
    plan = RankPlan(
        layout=layout,
        shape=shape,
        spec=spec,
        tiling=CPU_TILING,
        num_slots=SLOTS,
        context_length=CONTEXT,
        niceness=1,
    )
    return plan, spec


def new_tensors(spec: ModelSpec, *, seed: int) -> ModelTensors:
    return tensors_of(new_state(spec, seed=seed), spec)


@contextlib.contextmanager
def started(
    layout: Layout, *, is_moe: bool, round_to: torch.dtype | None = torch.bfloat16
) -> Iterator[RankedModel]:
    plan, spec = new_plan(layout, is_moe=is_moe, round_to=round_to)
    model = RankedModel.start(plan, new_tensors(spec, seed=0))
    try:
        yield model
    finally:
        model.close()


def rows_of(decoding: list[int], chunk: tuple[int, int, int] | None) -> RowsOfStep:
    """Decoding rows at these positions, then a chunk (slot, first, last)."""
    positions = list(decoding)
    slots = list(range(len(decoding)))
    chunks: tuple[PromptChunk, ...] = ()
    if chunk is not None:
        slot, first, last = chunk
        positions += range(first, last)
        slots += [slot] * (last - first)
        chunks = (PromptChunk(slot=slot, start=first, num_tokens=last - first),)
    return RowsOfStep(
        token_ids_T=IDS[positions],
        positions_T=np.array(positions, dtype=np.int64),
        slots_T=np.array(slots, dtype=np.int64),
        num_decoding=len(decoding),
        chunks=chunks,
    )


def session(model: RankedModel) -> list[Tensor]:
    """All that a scheduler does: prompts, decoding, a prefix kept and loaded, a slot moved and
    cleared, other weights."""
    cache = model.cache
    found = [model.hidden(rows_of([], (0, 0, 20))), model.hidden(rows_of([20], (1, 0, 9)))]
    dtype = model.plan.spec.round_to or torch.float32
    kept = cache.read(0, 0, 18, dtype=dtype)
    found.append(kept)
    cache.write(2, 0, kept[:, :, :, :17])
    found.append(model.hidden(rows_of([21, 9], (2, 17, 33))))
    cache.move(2, 0, num_tokens=33)
    cache.clear(2, num_tokens=33)
    found.append(model.hidden(rows_of([33, 10], None)))
    model.load(new_tensors(model.plan.spec, seed=1))
    found.append(model.hidden(rows_of([], (2, 0, 12))))
    found.append(cache.read(2, 0, 12, dtype=torch.float32))
    return found


@pytest.mark.parametrize(
    ("layout", "is_moe", "round_to"),
    [
        (Layout(tensor=2, experts=2), True, torch.bfloat16),
        (Layout(tensor=1, experts=2), True, None),
        pytest.param(Layout(tensor=4, experts=1), False, None, marks=pytest.mark.slow),
    ],
)
def test_a_whole_session_over_ranks_has_the_bits_of_one_process(
    layout: Layout, is_moe: bool, round_to: torch.dtype | None
) -> None:
    with started(Layout(tensor=1, experts=1), is_moe=is_moe, round_to=round_to) as alone:
        expected = session(alone)
    with started(layout, is_moe=is_moe, round_to=round_to) as model:
        assert model.cache.num_bytes > 0
        found = session(model)
        workers = [worker.process for worker in model._workers]
    assert all(torch.equal(ours, one) for ours, one in zip(found, expected, strict=True))
    assert [process.returncode for process in workers] == [0] * (layout.world - 1)


def test_a_worker_that_is_killed_ends_the_engine_with_its_name() -> None:
    layout = Layout(tensor=2, experts=1)
    with started(layout, is_moe=False) as model:
        pid = model._workers[0].process.pid

        async def kill_while_watching() -> None:
            watching = asyncio.create_task(model.watch())
            await asyncio.sleep(0)
            os.kill(pid, signal.SIGTERM)  # Workers leave signals of a group to the leader.
            assert model.hidden(rows_of([], (0, 0, 5))).shape == (5, HIDDEN)
            assert not watching.done()
            os.kill(pid, signal.SIGKILL)
            await asyncio.wait_for(watching, timeout=60)

        reason = rf"rank 1 of 2 \(pid {pid}\) ended with signal SIGKILL"
        with pytest.raises(EngineError, match=reason):
            asyncio.run(kill_while_watching())
        with pytest.raises(EngineError, match=reason):
            model.hidden(rows_of([], (0, 0, 5)))


ORPHAN_TEST = """
import sys
from rlmix.numerics.consistent.shard import Layout
from tests.unit.engine.test_embedded_ranks import rows_of, started
with started(Layout(tensor=2, experts=1), is_moe=False) as model:
    print(model._workers[0].process.pid, flush=True)
    while True:
        model.hidden(rows_of([], (0, 0, 5)))
"""


def test_no_worker_outlives_a_leader_that_is_killed_in_the_middle_of_a_step() -> None:
    leader = subprocess.Popen([sys.executable, "-c", ORPHAN_TEST], stdout=subprocess.PIPE)
    assert leader.stdout is not None
    worker = psutil.Process(int(leader.stdout.readline()))
    leader.kill()
    leader.wait()
    deadline_s = time.monotonic() + 60
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s, "the worker lives on"
        time.sleep(0.02)


def test_a_layout_that_does_not_fit_starts_nothing() -> None:
    plan, spec = new_plan(Layout(tensor=1, experts=2), is_moe=False)
    before = len(psutil.Process().children())
    with pytest.raises(ValueError, match="experts=2 does not divide 0 experts"):
        RankedModel.start(plan, new_tensors(spec, seed=0))
    assert len(psutil.Process().children()) == before
