import dataclasses

import pytest
import torch

from rlmix.core.errors import TrainerError
from rlmix.trainer.optimizer import MasterOptimizer
from rlmix.trainer.spec import OptimizerSpec

SGD = OptimizerSpec(
    name="sgd", lr=0.1, beta1=0.9, beta2=0.98, weight_decay=0.0, grad_clip=0.0, warmup_steps=0
)
ADAMW = dataclasses.replace(SGD, name="adamw", lr=0.01)


def model(dtype=torch.bfloat16):
    return {
        "matrix": torch.nn.Parameter(torch.full((2, 2), 1.0, dtype=dtype)),
        "norm": torch.nn.Parameter(torch.full((2,), 1.0, dtype=dtype)),
    }


def take_step(optimizer, parameters, *losses):
    with optimizer.accumulating():
        for loss in losses:
            loss(parameters).backward()
    norm = optimizer.grad_norm()
    return norm, optimizer.step(grad_norm=norm)


def linear(slope):
    return lambda parameters: slope * (parameters["matrix"].sum() + parameters["norm"].sum())


def master(optimizer, name="matrix"):
    return optimizer.state()[f"master/{name}"]


def test_updates_below_bfloat16_resolution_add_up_in_the_masters():
    # 1 - 0.001 rounds back to 1 in BF16 (steps of 1/256 below 1); ten of them do not
    parameters = model()
    optimizer = MasterOptimizer(parameters, SGD)
    take_step(optimizer, parameters, linear(0.01))
    assert parameters["matrix"].eq(1.0).all()
    assert master(optimizer).tolist() == [[pytest.approx(0.999, abs=1e-5)] * 2] * 2
    for _ in range(9):
        take_step(optimizer, parameters, linear(0.01))
    assert parameters["matrix"].lt(1.0).all()
    assert torch.equal(parameters["matrix"].detach(), master(optimizer).bfloat16())


def test_gradients_of_micro_batches_are_summed_in_float32():
    # 1 + 400 * 2^-9: in BF16 every small part would vanish beside the 1
    parameters = model()
    optimizer = MasterOptimizer(parameters, SGD)
    norm, _ = take_step(optimizer, parameters, linear(1.0), *[linear(2.0**-9)] * 400)
    assert norm == pytest.approx((1 + 400 / 512) * 6**0.5, rel=1e-6)
    assert parameters["matrix"].grad is None


def test_sums_start_at_zero_in_every_step():
    parameters = model()
    optimizer = MasterOptimizer(parameters, SGD)
    first, _ = take_step(optimizer, parameters, linear(1.0))
    second, _ = take_step(optimizer, parameters, linear(1.0))
    assert first == second


def test_clipping_scales_the_whole_gradient_to_the_norm():
    parameters = model()
    optimizer = MasterOptimizer(parameters, dataclasses.replace(SGD, grad_clip=1.0))
    norm, lr = take_step(optimizer, parameters, linear(10.0))
    assert norm == pytest.approx(10 * 6**0.5)
    moved = torch.cat([1 - master(optimizer).flatten(), 1 - master(optimizer, "norm")])
    assert float(moved.norm()) == pytest.approx(lr * 1.0, rel=1e-5)


def test_a_gradient_below_the_clip_is_left_alone():
    parameters = model()
    optimizer = MasterOptimizer(parameters, dataclasses.replace(SGD, grad_clip=100.0))
    take_step(optimizer, parameters, linear(1.0))
    assert master(optimizer)[0, 0].item() == pytest.approx(0.9)


def test_warm_up_rises_linearly_to_the_rate_and_stays():
    parameters = model()
    optimizer = MasterOptimizer(parameters, dataclasses.replace(SGD, warmup_steps=4))
    rates = [take_step(optimizer, parameters, linear(0.0))[1] for _ in range(6)]
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])


def test_weight_decay_shrinks_matrices_and_spares_norms():
    parameters = model()
    optimizer = MasterOptimizer(parameters, dataclasses.replace(ADAMW, weight_decay=0.5))
    take_step(optimizer, parameters, linear(0.0))
    assert master(optimizer)[0, 0].item() == pytest.approx(1 - 0.01 * 0.5)
    assert master(optimizer, "norm")[0].item() == 1.0


def test_first_adamw_step_moves_by_the_rate_against_the_gradients_sign():
    parameters = model()
    optimizer = MasterOptimizer(parameters, ADAMW)
    take_step(optimizer, parameters, linear(-3.0))
    assert master(optimizer)[0, 0].item() == pytest.approx(1.01, rel=1e-5)


@pytest.mark.parametrize("spec", [SGD, ADAMW])
def test_state_continues_bit_for_bit(spec):
    spec = dataclasses.replace(spec, warmup_steps=5)
    slopes = [0.3, -0.7, 0.2, 0.9]
    straight = model()
    optimizer = MasterOptimizer(straight, spec)
    for slope in slopes:
        take_step(optimizer, straight, linear(slope))
    first = model()
    halfway = MasterOptimizer(first, spec)
    for slope in slopes[:2]:
        take_step(halfway, first, linear(slope))
    saved = {name: tensor.clone() for name, tensor in halfway.state().items()}
    second = {name: torch.nn.Parameter(p.detach().clone()) for name, p in first.items()}
    resumed = MasterOptimizer(second, spec)
    resumed.load_state(saved)
    for slope in slopes[2:]:
        take_step(resumed, second, linear(slope))
    assert all(torch.equal(a, resumed.state()[name]) for name, a in optimizer.state().items())
    assert all(torch.equal(a, second[name]) for name, a in straight.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"master/norm": None}, "lacks master/norm"),
        ({"exp_avg/norm": None}, "lacks exp_avg/norm"),
        ({"master/matrix": torch.ones(3)}, r"master/matrix has the shape \(3,\), the model needs"),
        ({"master/other": torch.ones(3)}, r"holds \['master/other'\]"),
        ({"master/norm": torch.full((2,), 7.0)}, "come from different saves"),
    ],
)
def test_a_state_that_does_not_fit_the_model_is_refused(change, message):
    parameters = model()
    optimizer = MasterOptimizer(parameters, ADAMW)
    take_step(optimizer, parameters, linear(1.0))
    state = {k: v for k, v in (optimizer.state() | change).items() if v is not None}
    with pytest.raises(TrainerError, match=message):
        MasterOptimizer(parameters, ADAMW).load_state(state)


def test_an_unknown_optimizer_names_the_known_ones():
    with pytest.raises(TrainerError, match="optimizer='adam' is unknown; use one of adamw, sgd"):
        MasterOptimizer(model(), dataclasses.replace(SGD, name="adam"))
