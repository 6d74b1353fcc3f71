"""The trainer as one of the two sides: its policy, its operators, and their float64 reference."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlmix.diff.exact_side import exact_side, shape_of
from rlmix.diff.program import Side
from rlmix.diff.reference_side import reference_side
from rlmix.diff.texts import Recorded
from rlmix.numerics.consistent.model import ModelSpec, ModelTensors, tensors_of
from rlmix.trainer.exact import ExactPolicy, spec_of
from rlmix.trainer.operators import TransformersOperators
from rlmix.trainer.policy import Policy

SCORED_AT_ONCE = 8
"""Texts of one padded forward, as in a micro-batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSide:
    """What a comparison needs of the trainer."""

    policy: Policy
    side: Side
    reference: Side
    temperature: float

    @classmethod
    def load(cls, folder: Path, *, numerics: str, temperature: float) -> "TrainerSide":
        """
        Args:
            numerics: as in `TrainerSpec`.
        Raises:
            TrainerError: no model that the trainer takes, or one without known operators.
        """

        def exact(model: Any, *, replays_routing: bool) -> Policy:
            round_to = None if numerics == "exact_fp32" else torch.bfloat16
            return ExactPolicy(model, replays_routing=replays_routing, round_to=round_to)

        is_exact = numerics != "native"
        policy = Policy.load(folder, make=exact if is_exact else None)
        config: Any = policy.model.config.get_text_config()
        round_to = None if numerics == "exact_fp32" else torch.bfloat16
        spec = spec_of(config, round_to=round_to)
        with torch.no_grad():
            tensors = tensors_of(dict(policy.model.named_parameters()), spec)
        theta = float(config.rope_parameters["rope_theta"])
        settings = _settings(spec, tensors, theta=theta, temperature=temperature)
        if is_exact:
            side = exact_side(
                tensors, spec, name="trainer", theta=theta, temperature=temperature,
                settings=settings,
            )  # fmt: skip
        else:
            table = TransformersOperators(policy, temperature=temperature).table()
            side = Side(
                name="trainer",
                shape=shape_of(tensors, spec),
                operators=table,
                settings=settings,
                weights={},
            )
        reference = reference_side(tensors, spec, like=side, theta=theta, temperature=temperature)
        return cls(policy=policy, side=side, reference=reference, temperature=temperature)

    @torch.no_grad()
    def score(self, texts: list[Recorded], *, otherwise: bool = False) -> list[Tensor]:
        """float32 logprobs of each text's tokens from the second on, in padded batches.

        Args:
            otherwise: with the other of two equally good attention implementations.
        """
        found: list[Tensor] = []
        for first in range(0, len(texts), SCORED_AT_ONCE):
            batch = texts[first : first + SCORED_AT_ONCE]
            lengths = [len(text.ids) for text in batch]
            ids_BT = torch.zeros(len(batch), max(lengths), dtype=torch.int64)
            for row, text in zip(ids_BT, batch, strict=True):
                row[: len(text.ids)] = torch.tensor(text.ids)
            if otherwise:
                with self.policy.computed_otherwise(num_tokens=max(lengths)):
                    found += self.policy.next_logprobs(
                        ids_BT, lengths, temperature=self.temperature
                    )
            else:
                found += self.policy.next_logprobs(ids_BT, lengths, temperature=self.temperature)
        return found


def _settings(
    spec: ModelSpec, tensors: ModelTensors, *, theta: float, temperature: float
) -> dict[str, str | float]:
    return {
        "vocab_size": float(len(tensors.head)),
        "num_layers": float(spec.num_layers),
        "head_dim": float(spec.head_dim),
        "rms_eps": spec.rms_eps,
        "rope_theta": theta,
        "top_k_experts": float(spec.top_k),
        "norm_topk_prob": float(spec.norm_topk_prob),
        "temperature": temperature,
    }
