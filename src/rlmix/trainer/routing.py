"""Routing replay (R3): a mixture-of-experts forward that takes the sampler's experts.

The router still computes its logits; only which experts it takes comes from the record, and the
shares are recomputed from those logits as the model class does it, so gradients reach the router.
Invariants: the model is changed for one forward only; a position without a record routes by itself;
replaying the model's own routes changes no bit.

Source: arXiv:2510.11370 (R3); arXiv:2512.02556 section 3.1 (keep routing).
"""

# B rows, T padded length, N = B * T, L layers, K experts per token, E experts

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from rlmix.batch.packing import MicroBatch
from rlmix.core.errors import DataError, TrainerError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def _by_flag(router: Any) -> bool:
    return bool(router.norm_topk_prob)


def _always(router: Any) -> bool:
    return True


NORMALISES: Mapping[str, Callable[[Any], bool]] = {
    "OlmoeTopKRouter": _by_flag,
    "Qwen2MoeTopKRouter": _by_flag,
    "Qwen3MoeTopKRouter": _by_flag,
    "Qwen3NextTopKRouter": _by_flag,
    "Qwen3_5MoeTopKRouter": _always,
}
"""Router class of Transformers -> whether the shares of the chosen experts are made to sum to 1.
All of these give (logits, shares, ids), and shares that are a softmax in float32 over all experts,
taken at the ids. Loading checks that on numbers; other classes (sigmoid scores, groups, a bias in
the choice) are refused."""

CHECK_ROWS = 16
"""Random rows on which a router's shares must equal ours to the bit."""

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class RoutingTally:
    """What one forward replayed, summed over the layers that have a router."""

    replayed_BT: Tensor
    """int64: in how many layers the token's experts came from the record."""
    agreed_BT: Tensor
    """int64: in how many of those the router itself would have taken the same set."""
    num_layers: int
    """Layers that have a router."""


class Routers:
    """The routers of a loaded model, in the order of its layers."""

    def __init__(self, model: "PreTrainedModel") -> None:
        """
        Raises:
            TrainerError: the model has no experts, or a router that cannot be replayed.
        """
        name = type(model).__name__
        found = [
            (where, module)
            for where, module in model.named_modules()
            if type(module).__name__ in NORMALISES
        ]
        if not found:
            config = model.config.get_text_config()
            names = ("num_experts", "num_local_experts", "n_routed_experts")
            has_experts = any(getattr(config, key, None) for key in names)
            raise TrainerError(
                f"trainer: algo.routing_replay=true, but {name} "
                + (
                    f"has a router that cannot be replayed (known: {', '.join(NORMALISES)})"
                    if has_experts
                    else "has no experts"
                )
                + "; set algo.routing_replay=false"
            )
        self._num_layers = int(model.config.get_text_config().num_hidden_layers)
        self._routers: list[tuple[int, nn.Module, bool]] = []
        self._open: list[tuple[nn.Module, _Hook]] = []
        """Hooks of the forward under way."""
        for where, router in found:
            layer = _LAYER.search(where)
            is_normalising = NORMALISES[type(router).__name__](router)
            if layer is None or not _is_reproduced(router, is_normalising):
                raise TrainerError(
                    f"trainer: algo.routing_replay=true, but {where} of {name} computes other "
                    "shares than the softmax at its experts' ids; set algo.routing_replay=false"
                )
            self._routers.append((int(layer[1]), router, is_normalising))

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that have a router, among all layers of the model."""
        return tuple(layer for layer, _, _ in self._routers)

    @property
    def record_shape(self) -> tuple[int, int]:
        """Layers and experts per token of a record for this model."""
        top_k, _ = _sizes(self._routers[0][1])
        return self._num_layers, top_k

    def check(self, batch: MicroBatch) -> None:
        """Refuse a record that no router can have made.

        Raises:
            DataError: other sizes than the model's, or ids that are unknown or repeated: an engine
                whose kernel routes by itself leaves its record empty (all 0).
        """
        experts_BTLK = batch.experts_BTLK
        if experts_BTLK is None:
            return
        _, router, _ = self._routers[0]
        top_k, num_experts = _sizes(router)
        num_layers, width = experts_BTLK.shape[2:]
        if (num_layers, width) != self.record_shape:
            raise DataError(
                f"trainer: sessions {batch.session_ids[:3]} recorded {width} experts in each of "
                f"{num_layers} layers; the model takes {top_k} in {self._num_layers}"
            )
        ids_BTRK = np.sort(experts_BTLK[:, :, list(self.layers)], axis=-1)
        is_missing_BTR = (ids_BTRK == -1).all(axis=-1)
        is_good_BTR = (ids_BTRK[..., 0] >= 0) & (ids_BTRK[..., -1] < num_experts)
        is_good_BTR &= (np.diff(ids_BTRK, axis=-1) > 0).all(axis=-1)
        bad = np.argwhere(~(is_missing_BTR | is_good_BTR))
        if len(bad):
            row, position, place = bad[0].tolist()
            layer = self.layers[place]
            raise DataError(
                f"trainer: session {batch.session_ids[row]}, token {position}, layer {layer}: "
                f"recorded experts {experts_BTLK[row, position, layer].tolist()}, must be "
                f"{top_k} different ids below {num_experts}; the engine did not fill its record "
                "(its MoE kernel may route by itself): set record_experts=false for that pool"
            )

    def empty_tally(self, shape: tuple[int, ...]) -> RoutingTally:
        """Nothing replayed yet, for ids of shape [B, T]."""
        device = self._device()
        return RoutingTally(
            replayed_BT=torch.zeros(shape, dtype=torch.int64, device=device),
            agreed_BT=torch.zeros(shape, dtype=torch.int64, device=device),
            num_layers=len(self._routers),
        )

    def _device(self) -> torch.device:
        _, router, _ = self._routers[0]
        return next(router.parameters()).device

    @contextmanager
    def replaying(self, experts_BTLK: np.ndarray) -> Iterator[RoutingTally]:
        """While this is open, forwards over [B, T] ids take these experts.

        Args:
            experts_BTLK: integers, -1 where nothing was recorded, checked by `check`.
        Returns:
            Counts that fill up during the forward. Hooks are gone afterwards, also after an error.
        """
        rows, length = experts_BTLK.shape[:2]
        tally = self.empty_tally((rows, length))
        hooks = []
        for layer, router, is_normalising in self._routers:
            recorded_BTK = torch.from_numpy(experts_BTLK[:, :, layer].astype(np.int64))
            recorded_NK = recorded_BTK.view(rows * length, -1).to(self._device())
            hooks.append((router, _Hook(recorded_NK, is_normalising, tally)))
        self._open = hooks
        try:
            with _hooked(hooks):
                yield tally
        finally:
            self._open = []

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For a layer that is computed again in the backward pass: now nothing, and then the
        experts that are being replayed now, which are not counted a second time."""
        again = [(router, hook.uncounted()) for router, hook in self._open]
        return nullcontext(), _hooked(again)


@contextmanager
def _hooked(hooks: "Sequence[tuple[nn.Module, _Hook]]") -> Iterator[None]:
    handles = [router.register_forward_hook(hook) for router, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Hook:
    """Replaces what one router gives in one forward."""

    def __init__(
        self, recorded_NK: Tensor, is_normalising: bool, tally: RoutingTally | None
    ) -> None:
        self._recorded_NK = recorded_NK
        self._is_normalising = is_normalising
        self._tally = tally

    def uncounted(self) -> "_Hook":
        return _Hook(self._recorded_NK, self._is_normalising, None)

    def __call__(
        self, router: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits_NE, shares_NK, own_NK = output
        is_recorded_N = self._recorded_NK[:, 0] >= 0
        chosen_NK = torch.where(is_recorded_N[:, None], self._recorded_NK, own_NK)
        if self._tally is not None:
            same_set_N = (chosen_NK.sort(-1).values == own_NK.sort(-1).values).all(-1)
            self._tally.replayed_BT.view(-1).add_(is_recorded_N)
            self._tally.agreed_BT.view(-1).add_(is_recorded_N & same_set_N)
        shares = shares_at(logits_NE, chosen_NK, is_normalising=self._is_normalising)
        return logits_NE, shares.to(shares_NK.dtype), chosen_NK


def shares_at(logits_NE: Tensor, ids_NK: Tensor, *, is_normalising: bool) -> Tensor:
    """float32 [N, K]: the router's softmax at given experts, made to sum to 1 if the class does.

    Differentiable in the logits: an expert that the record names gets its gradient through the
    share that the trainer's own router gives it, however small.
    """
    probs_NE = torch.softmax(logits_NE, dim=-1, dtype=torch.float)
    shares_NK = probs_NE.gather(-1, ids_NK)
    if is_normalising:
        shares_NK = shares_NK / shares_NK.sum(dim=-1, keepdim=True)
    return shares_NK


def _sizes(router: Any) -> tuple[int, int]:
    """Experts per token, experts."""
    return int(router.top_k), int(router.weight.shape[0])


@torch.no_grad()
def _is_reproduced(router: Any, is_normalising: bool) -> bool:
    """Do we get the router's own shares from its logits and ids, bit for bit?"""
    weight = router.weight
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(CHECK_ROWS, weight.shape[1], generator=generator)
    output = router(rows.to(weight.device, weight.dtype))
    if not (isinstance(output, tuple) and len(output) == 3):
        return False
    logits_NE, shares_NK, ids_NK = output
    ours = shares_at(logits_NE, ids_NK, is_normalising=is_normalising)
    return torch.equal(ours.to(shares_NK.dtype), shares_NK)


def routing_metrics(
    batches: Sequence[MicroBatch], tallies: Sequence[RoutingTally], *, pool_names: tuple[str, ...]
) -> dict[str, float]:
    """Shares of token-layers that were replayed, and in which the trainer agrees.

    Args:
        batches, tallies: micro-batches of a step, and what the forward of each replayed.
        pool_names: index space of `MicroBatch.pools_P`.
    Returns:
        `routing/replayed_frac` of the token-layers that reach a loss: a session's last token does
        not, so 1 is a complete record. `routing/agree_frac` of the replayed ones, and by pool of
        the tokens that the pool sampled; absent where nothing was replayed.
    """
    total = replayed = agreed = 0
    by_pool = np.zeros((2, len(pool_names)), dtype=np.int64)
    for batch, tally in zip(batches, tallies, strict=True):
        total += tally.num_layers * (batch.num_tokens - len(batch.session_ids))
        replayed += int(tally.replayed_BT.sum())
        agreed += int(tally.agreed_BT.sum())
        for row, counts_BT in enumerate((tally.replayed_BT, tally.agreed_BT)):
            counts_P = counts_BT.cpu().numpy()[batch.places_P]
            np.add.at(by_pool[row], batch.pools_P, counts_P)
    metrics = {"routing/replayed_frac": replayed / total if total else 0.0}
    if replayed:
        metrics["routing/agree_frac"] = agreed / replayed
    for name, num_replayed, num_agreed in zip(pool_names, *by_pool.tolist(), strict=True):
        if num_replayed:
            metrics[f"routing/by_pool/{name}/agree_frac"] = num_agreed / num_replayed
    return metrics
