"""Float32 master weights behind a BF16 model.

BF16 keeps 8 bits: an update below 1/256 of a weight would vanish. So gradients are accumulated
in float32, the optimizer moves float32 masters, and the model gets their rounding.

Invariants: after `step` the model is exactly the rounding of the masters; a step that was not
taken leaves masters, moments and model untouched.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from rlmix.core.errors import TrainerError
from rlmix.numerics.consistent.reduction import flat_of, parts_of
from rlmix.trainer.spec import OptimizerSpec

ADAM_EPS = 1e-8
"""Dimensionless, added to the root of the second moment; Adam's published constant."""

MATRIX_DIM = 2
"""Weight decay is for tensors of at least this many dimensions."""


class MasterOptimizer:
    """Owns masters, gradient sums and moments for the named parameters of a model."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], spec: OptimizerSpec) -> None:
        if not parameters:
            raise TrainerError("trainer: the model has no trainable parameter")
        self._spec = spec
        self._model = dict(parameters)
        self._masters = {name: p.detach().float().clone() for name, p in parameters.items()}
        self._gradients = {name: torch.zeros_like(m) for name, m in self._masters.items()}
        self._optimizer = build_optimizer(self._masters, spec)
        self.num_steps = 0
        """Optimizer steps taken, which the warm-up counts."""

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Within: every backward adds its gradient to the float32 sums and frees the BF16 one."""
        for gradient in self._gradients.values():
            gradient.zero_()
        handles = [
            parameter.register_post_accumulate_grad_hook(_adder(self._gradients[name]))
            for name, parameter in self._model.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def take_sum(self) -> Tensor:
        """The sums so far as one vector, and begin again with zeros: one leaf of a tree."""
        flat = flat_of(self._gradients)
        for gradient in self._gradients.values():
            gradient.zero_()
        return flat

    def put_sum(self, flat: Tensor | None) -> None:
        """Make a vector as of `take_sum` the sums; None counts as zeros."""
        parts = {} if flat is None else parts_of(flat, self._gradients)
        for name, gradient in self._gradients.items():
            if flat is None:
                gradient.zero_()
            else:
                gradient.copy_(parts[name])

    def grad_norm(self) -> float:
        """Global L2 norm of the accumulated gradient, before clipping."""
        return float(torch.nn.utils.get_total_norm(list(self._gradients.values())))

    def step(self, *, grad_norm: float) -> float:
        """Clip, update the masters, round them into the model; returns the learning rate used."""
        lr = self.learning_rate()
        clip = self._spec.grad_clip
        if clip > 0 and grad_norm > clip:
            for gradient in self._gradients.values():
                gradient.mul_(clip / grad_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        for name, master in self._masters.items():
            master.grad = self._gradients[name]
        self._optimizer.step()
        for master in self._masters.values():
            master.grad = None
        self.num_steps += 1
        self._round_into_model()
        return lr

    def learning_rate(self) -> float:
        """The rate of the next step."""
        return warmed_up(self._spec, self.num_steps)

    @torch.no_grad()
    def _round_into_model(self) -> None:
        for name, parameter in self._model.items():
            parameter.copy_(self._masters[name])

    def state(self) -> dict[str, Tensor]:
        """Masters and moments by `<kind>/<parameter>`, plus `num_steps`; shares memory."""
        state = {f"master/{name}": master for name, master in self._masters.items()}
        for kind in MOMENTS[self._spec.name] if self.num_steps else ():
            for name, master in self._masters.items():
                state[f"{kind}/{name}"] = self._optimizer.state[master][kind]
        state["num_steps"] = torch.tensor(self.num_steps, dtype=torch.int64)
        return state

    def full_state(self) -> dict[str, Tensor]:
        """The same; a sharded optimizer puts its shards together here."""
        return self.state()

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state`, which must fit parameter by parameter.

        Raises:
            TrainerError: a tensor is missing, of another size or unknown, or the rounded masters
                are not the loaded model (then model and optimizer come from different saves).
        """
        state = dict(state)
        self.num_steps = int(take(state, "num_steps", like=None))
        for name, master in self._masters.items():
            master.copy_(take(state, f"master/{name}", like=master))
            self._optimizer.state[master] = {
                kind: take(state, f"{kind}/{name}", like=master if kind != "step" else None).clone()
                for kind in (MOMENTS[self._spec.name] if self.num_steps else ())
            }
        if state:
            raise TrainerError(
                f"trainer: the checkpoint's optimizer holds {sorted(state)[:3]} and "
                f"{max(0, len(state) - 3)} more that no parameter of the model has"
            )
        for name, parameter in self._model.items():
            if not torch.equal(parameter, self._masters[name].to(parameter.dtype)):
                raise TrainerError(
                    f"trainer: checkpoint: {name} in the model is not the rounding of its master "
                    "weight; model and optimizer come from different saves"
                )


def build_optimizer(masters: Mapping[str, Tensor], spec: OptimizerSpec) -> torch.optim.Optimizer:
    """Torch's optimizer over float32 masters; weight decay on matrices only.

    Raises:
        TrainerError: unknown name.
    """
    decayed = [master for master in masters.values() if master.dim() >= MATRIX_DIM]
    plain = [master for master in masters.values() if master.dim() < MATRIX_DIM]
    groups: list[dict[str, object]] = [
        {"params": decayed, "weight_decay": spec.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return _BUILDERS.get(spec.name, _unknown)([g for g in groups if g["params"]], spec)


def warmed_up(spec: OptimizerSpec, num_steps: int) -> float:
    """Learning rate of the step after `num_steps` steps."""
    warmup = spec.warmup_steps
    return spec.lr * min(1.0, (num_steps + 1) / warmup if warmup else 1.0)


def take(state: dict[str, Tensor], key: str, *, like: Tensor | None) -> Tensor:
    """Remove a tensor from a checkpoint's state; TrainerError when it is not there or unlike."""
    if key not in state:
        raise TrainerError(f"trainer: the checkpoint's optimizer lacks {key}")
    value = state.pop(key)
    if like is not None and value.shape != like.shape:
        raise TrainerError(
            f"trainer: checkpoint: {key} has the shape {tuple(value.shape)}, the model needs "
            f"{tuple(like.shape)}"
        )
    return value


def _adder(total: Tensor) -> Callable[[Tensor], None]:
    def add(parameter: Tensor) -> None:
        assert parameter.grad is not None
        total.add_(parameter.grad)
        parameter.grad = None

    return add


def _adamw(groups: list[dict[str, object]], spec: OptimizerSpec) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        groups, lr=spec.lr, betas=(spec.beta1, spec.beta2), eps=ADAM_EPS, foreach=False
    )


def _sgd(groups: list[dict[str, object]], spec: OptimizerSpec) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=spec.lr, foreach=False)


def _unknown(groups: list[dict[str, object]], spec: OptimizerSpec) -> torch.optim.Optimizer:
    raise TrainerError(
        f"trainer: optimizer={spec.name!r} is unknown; use one of {', '.join(_BUILDERS)}"
    )


_BUILDERS: dict[str, Callable[[list[dict[str, object]], OptimizerSpec], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "sgd": _sgd,
}

MOMENTS: dict[str, tuple[str, ...]] = {"adamw": ("step", "exp_avg", "exp_avg_sq"), "sgd": ()}
"""Per-parameter tensors of torch's optimizers that a checkpoint must carry."""

OPTIMIZERS = tuple(_BUILDERS)
