"""The forward of exact mode: the consistent operators, in one process or several.

Invariant: the logits of a request have the bits of the trainer's, whatever else is in the step,
however its prompt was cut or found in the cache, and however many ranks compute it.
"""

# T rows of the step, M rows of a layer, E experts, K experts per token

from dataclasses import dataclass

import torch
from torch import Tensor

from rlmix.core.errors import ConfigError
from rlmix.engine.embedded.exact_weights import spec_of
from rlmix.engine.embedded.forward import Rows, Step
from rlmix.engine.embedded.kv import KvCache
from rlmix.engine.embedded.profile import Profile
from rlmix.engine.embedded.ranks import RankedModel, RankPlan, RowsOfStep
from rlmix.engine.embedded.routes import RouteCache
from rlmix.engine.embedded.shape import ModelShape
from rlmix.engine.embedded.weights import ExactWeights, ModelWeights
from rlmix.numerics.consistent.contract import CPU_TILING, Tiling
from rlmix.numerics.consistent.head import head_logits
from rlmix.numerics.consistent.model import ModelSpec, ModelTensors, own_route
from rlmix.numerics.consistent.selfcheck import check_model
from rlmix.numerics.consistent.serving import PromptChunk
from rlmix.numerics.consistent.shard import Layout

ONE_PROCESS = Layout(tensor=1, experts=1)


class ExactForward:
    """The model's arithmetic for exact pools; owns the cache, since its ranks share it."""

    def __init__(
        self,
        shape: ModelShape,
        profile: Profile,
        weights: ModelWeights,
        *,
        num_slots: int,
        context_length: int,
        layout: Layout = ONE_PROCESS,
        niceness: int = 0,
        tiling: Tiling = CPU_TILING,
    ) -> None:
        """
        Args:
            weights: what the ranks start with; `logits` may be given others later.
            niceness: added to the priority number of worker processes.
        Raises:
            ConfigError: the layout does not fit the model, or this machine breaks what the
                operators rely on.
            EngineError: a rank did not start.
        """
        self._spec = spec_of(shape, profile)
        self._loaded = weights
        tensors = _tensors(weights)
        try:
            found = check_model(tensors, self._spec, tiling=tiling, processes=layout.tensor)
        except ValueError as error:
            raise ConfigError(f"embedded engine: {error}; use consistency=native") from error
        if not found.is_exact:
            raise ConfigError(f"embedded engine: {found.refusal()}; use consistency=native")
        plan = RankPlan(
            layout=layout,
            shape=shape,
            spec=self._spec,
            tiling=tiling,
            num_slots=num_slots,
            context_length=context_length,
            niceness=niceness,
        )
        try:
            self.model = RankedModel.start(plan, tensors)
        except ValueError as error:
            raise ConfigError(f"embedded engine: {error}") from error
        self.cache: KvCache = self.model.cache
        self.routes: RouteCache | None = None
        """Gets the experts of every row; None records nothing."""

    @torch.inference_mode()
    def logits(self, weights: ModelWeights, step: Step) -> Tensor:
        """As `Forward.logits`."""
        if weights is not self._loaded:
            self.model.load(_tensors(weights))
            self._loaded = weights
        rows = Rows(step, self.cache)
        chunks = tuple(
            PromptChunk(slot=chunk.slot, start=chunk.start, num_tokens=chunk.num_tokens)
            for chunk in step.chunks
        )
        told = RowsOfStep(
            token_ids_T=rows.token_ids_T.numpy(),
            positions_T=rows.positions_T.numpy(),
            slots_T=rows.slots_T.numpy(),
            num_decoding=step.num_decoding,
            chunks=chunks,
        )
        watch = None if self.routes is None else _Watch(self._spec, [])
        hidden_TH = self.model.hidden(told, route=watch)
        if self.routes is not None and watch is not None:
            self.routes.write(rows.slots_T, rows.positions_T, watch.taken)
        wanted_H = hidden_TH if rows.logit_rows is None else hidden_TH[rows.logit_rows]
        return head_logits(wanted_H, self.model.head)[: rows.num_logits]


def _tensors(weights: ModelWeights) -> ModelTensors:
    assert isinstance(weights, ExactWeights), "the profile decides how weights are loaded"
    return weights.tensors


@dataclass(frozen=True, slots=True)
class _Watch:
    """`Route` that lets the model choose and writes it down."""

    spec: ModelSpec
    taken: list[tuple[Tensor, Tensor]]

    def __call__(self, layer: int, logits_ME: Tensor) -> tuple[Tensor, Tensor]:
        chosen = own_route(logits_ME, self.spec)
        self.taken.append(chosen)
        return chosen
