"""One model over several ranks: FSDP2 shards of float32 master weights, BF16 compute.

Every decoder layer is gathered in BF16 just before it is used, in the forward pass and again in the
backward one, and its gradients are added over ranks in float32. What lies outside the layers
(embedding, last norm, head) is gathered for the whole pass, so the loss is computed inside it.

Invariants: gradients are sums over ranks, never means, because the loss is divided by the whole
step's denominator; a rank that used no parameter of a layer still adds zeros, so that all ranks
make the same exchanges; a step that was not taken leaves masters and moments untouched.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlmix.core.errors import TrainerError
from rlmix.trainer.checkpoint import Checkpoint
from rlmix.trainer.optimizer import MOMENTS, build_optimizer, warmed_up
from rlmix.trainer.spec import OptimizerSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def decoder_layers(model: "PreTrainedModel") -> list[nn.Module]:
    """The model's layers in order: the module list that has as many as its configuration says.

    Raises:
        TrainerError: there is none, or several.
    """
    count = int(model.config.get_text_config().num_hidden_layers)
    found = [
        module
        for module in model.base_model.modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    named = [module for module in found if module is getattr(model.base_model, "layers", None)]
    if len(named or found) != 1:
        raise TrainerError(
            f"trainer: {type(model).__name__} has {len(found)} lists of {count} layers, one is "
            "needed to shard it; set trainer.ranks=1"
        )
    return list((named or found)[0])


def run_gathered(model: Any, body: Callable[[], Any]) -> Any:
    """`body()`, while parameters outside the layers are gathered; its tensors take gradients."""
    return body()


def shard_model(model: "PreTrainedModel", *, mesh: Any, offloads: bool) -> None:
    """Turn a BF16 model on the CPU into float32 shards on the mesh's device, layer after layer.

    Args:
        offloads: shards, gradients and moments stay in main memory (accelerators only).
    """
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        FSDPModule,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
        "offload_policy": CPUOffloadPolicy() if offloads else OffloadPolicy(),
    }
    for layer in decoder_layers(model):
        fully_shard(layer.float(), **options)
    fully_shard(model.float(), **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The sum, and said in a way that gloo knows: it has no mean and no premultiplied sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    root: Any = model
    root.set_reduce_scatter_unused_params(True)
    type(root).run_gathered = run_gathered
    register_fsdp_forward_method(root, "run_gathered")


class ShardedOptimizer:
    """AdamW or SGD on the float32 shards of a model that `shard_model` cut."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], spec: OptimizerSpec) -> None:
        if not parameters:
            raise TrainerError("trainer: the model has no trainable parameter")
        self._spec = spec
        self._masters: dict[str, Any] = dict(parameters)
        self.optimizer = build_optimizer(self._masters, spec)
        self.num_steps = 0
        """Optimizer steps taken, which the warm-up counts."""

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Within: every backward adds its gradient, summed over ranks, to float32 shards."""
        self.optimizer.zero_grad(set_to_none=True)
        yield

    def grad_norm(self) -> float:
        """Global L2 norm of the accumulated gradient; every rank must call this."""
        gradients = [self._gradient(master) for master in self._masters.values()]
        norm: Any = torch.nn.utils.get_total_norm(gradients)
        return float(norm.full_tensor())

    def step(self, *, grad_norm: float) -> float:
        """Clip and update the masters; returns the learning rate used."""
        lr = self.learning_rate()
        clip = self._spec.grad_clip
        for master in self._masters.values():
            master.grad = self._gradient(master)
            if clip > 0 and grad_norm > clip:
                master.grad.mul_(clip / grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.num_steps += 1
        return lr

    @staticmethod
    def _gradient(master: Any) -> Any:
        # As with one rank, a parameter that no backward reached decays with a gradient of zero.
        return torch.zeros_like(master) if master.grad is None else master.grad

    def learning_rate(self) -> float:
        """The rate of the next step."""
        return warmed_up(self._spec, self.num_steps)

    def state(self) -> dict[str, Any]:
        """Shards (DTensor) of masters and moments by `<kind>/<parameter>`, plus `num_steps`: what
        `torch.distributed.checkpoint` saves. Shares memory."""
        state = {f"master/{name}": master.detach() for name, master in self._masters.items()}
        for kind in MOMENTS[self._spec.name] if self.num_steps else ():
            for name, master in self._masters.items():
                state[f"{kind}/{name}"] = self.optimizer.state[master][kind]
        state["num_steps"] = torch.tensor(self.num_steps, dtype=torch.int64)
        return state

    def full_state(self) -> dict[str, Tensor]:
        """`state` with whole tensors, as one rank has it; every rank must call this."""
        return {name: whole(tensor) for name, tensor in self.state().items()}

    @torch.no_grad()
    def load_from(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint of any number of ranks; this one reads its own shards only.

        Raises:
            TrainerError: a tensor is missing, of another size or unknown, or the rounded masters
                are not the loaded model (then model and optimizer come from different saves).
        """
        needed = MOMENTS[self._spec.name]
        moments = needed if checkpoint.has_moments else ()
        places: dict[str, Any] = {"num_steps": torch.zeros((), dtype=torch.int64)}
        for name, master in self._masters.items():
            for kind in ("master", *moments):
                is_shared = kind == "step"
                places[f"{kind}/{name}"] = (
                    torch.zeros(()) if is_shared else torch.empty_like(master.detach())
                )
        checkpoint.read_optimizer_into(places)
        self.num_steps = int(places["num_steps"])
        if self.num_steps and needed and not moments:
            raise TrainerError(
                f"trainer: the checkpoint {checkpoint.folder} has no moments; it was saved by "
                f"another trainer.optimizer than {self._spec.name}"
            )
        for name, master in self._masters.items():
            mine, theirs = master.to_local(), places[f"master/{name}"].to_local()
            if not torch.equal(mine.bfloat16(), theirs.bfloat16()):
                raise TrainerError(
                    f"trainer: checkpoint: {name} in the model is not the rounding of its master "
                    "weight; model and optimizer come from different saves"
                )
            mine.copy_(theirs)
            self.optimizer.state[master] = {kind: places[f"{kind}/{name}"] for kind in moments}


def whole(tensor: Any) -> Tensor:
    """A whole tensor on the CPU out of a shard; every rank must call this. Others as they are."""
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor):
        return tensor.full_tensor().cpu()
    return tensor
