"""Faults in a pool whose formats and casts differ anyway: what is wrong is named beside them."""

import pytest
import torch

from rlmix.diff.faults import FROZEN, Ground, planted
from rlmix.diff.judge import replay
from rlmix.diff.later_faults import LATER
from rlmix.diff.pool import EmbeddedPool, PoolAsk, write_view
from rlmix.diff.program import Text, Trace, trace
from rlmix.diff.trainer_side import TrainerSide
from rlmix.model.bundle import resolve_model
from rlmix.numerics.consistent.model import tensors_of
from rlmix.trainer.exact import spec_of
from tests.unit.diff.lab import limits

MODEL = resolve_model("bundled:tiny")
NAMES = (
    "norm_eps", "rope_theta", "attention_scale", "mask_off_by_one", "temperature", "top_p",
    "label_shift", "stale_layer", "position_jump", "changed_token", "kv_scale", "swapped_experts",
    "unnormalised_shares", "gelu",
)  # fmt: skip


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainerSide, Trace, Ground]:
    """A trainer, its trace of a text, and an NVFP4 pool with an FP8 cache to plant faults into."""
    trainer = TrainerSide.load(MODEL, numerics="native", temperature=1.0)
    ask = PoolAsk(
        name="b200", accelerator="b200", weights="nvfp4", activations="bf16", kv="fp8",
        attention="trtllm_mha", moe="flashinfer_cutedsl", view="nvfp4", consistency="native",
        max_running=1, tolerance_nats=0.5,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("views") / "nvfp4"
    pool = EmbeddedPool(
        ask, write_view(MODEL, trainer.policy.state(), "nvfp4", folder), temperature=1.0
    )
    spec = spec_of(trainer.policy.model.config, round_to=torch.bfloat16)
    state = {name: p.detach() for name, p in trainer.policy.model.named_parameters()}
    ground = Ground(
        side=pool.side(trainer.side.shape, prefilled=None),
        tensors=tensors_of(state, spec),
        spec=spec,
        theta=10_000.0,
        temperature=1.0,
    )
    ids = torch.randint(0, 590, (160,), generator=torch.Generator().manual_seed(1))
    return trainer, trace(trainer.side, Text.of(ids)), ground


@pytest.mark.parametrize("name", NAMES)
def test_a_framework_fault_is_named_in_a_pool_of_other_formats(
    native: tuple[TrainerSide, Trace, Ground], name: str
) -> None:
    trainer, seen, ground = native
    fault = next(one for one in FROZEN + LATER if one.name == name)
    steps = [step for step in seen.steps if step.place.name == fault.operator]

    def told(side) -> set[tuple[int, str]]:
        found = replay(trainer.side, side, trainer.reference, steps, limits())
        return {(one.place.layer, one.judgement.cause) for one in found}

    before, after = told(ground.side), told(planted(ground, fault))
    assert fault.cause not in {cause for _, cause in before}
    assert fault.cause in {cause for _, cause in after}
