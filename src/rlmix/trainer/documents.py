"""Several documents one behind another in one row, none of which sees another.

Attention runs over each document for itself (on accelerators the varlen flash kernels do the same
in one call); layers that carry a state along the row are called once per document, so the state
begins anew. Nothing is masked and no [T, T] mask exists. Invariant: what comes out for a document
does not depend on its neighbours; loading checks that on numbers, because a class may mix positions
in a way that nobody told us of.
"""

# B = 1 row, N heads, T tokens of all documents, D head size, H hidden size

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlmix.core.errors import TrainerError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DOCUMENTS_ATTENTION = "rlmix_documents"
"""Our implementation's name in Transformers' registry."""

FLASH_ATTENTION = ("flash_attention_2", "flash_attention_3")
"""Implementations that take documents by the same arguments as ours."""

STATE_MODULES = ("linear_attn", "mamba")
"""Names, inside a layer, of modules that carry a state along the row."""

LEAK_FRAC = 0.05
"""Largest change of a document's hidden states, as a share of their size, when its neighbour
changes; BF16 kernels of another shape give 0.01, a neighbour that is seen over 0.3."""

CHECK_TOKENS = (24, 16)


def add_documents_attention() -> None:
    """Tell Transformers of `DOCUMENTS_ATTENTION`; may be called again."""
    from transformers import AttentionInterface

    AttentionInterface.register(DOCUMENTS_ATTENTION, documents_attention)


def documents_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each document.

    Args:
        query: [1, N, T, D]; key and value may have fewer heads.
        cu_seq_lens_q: int32, where documents begin, and the end; None: every row is one.
    Returns:
        [1, T, N, D], and no attention weights.
    """
    if sliding_window is not None or kwargs.get("softcap") is not None:
        raise TrainerError(
            f"trainer: {type(module).__name__} has a sliding window or capped scores, which "
            "trainer.packing=documents does not compute; set trainer.packing=rows"
        )
    dtype = query.dtype
    if query.device.type == "cpu" and dtype == torch.bfloat16:
        # Closer, and on a CPU without BF16 instructions four times as fast: 0.4 s in place of 1.6
        # for 4,096 tokens, forward and backward.
        query, key, value = query.float(), key.float(), value.float()
    starts = [0, query.shape[2]] if cu_seq_lens_q is None else cu_seq_lens_q.tolist()
    parts = [
        F.scaled_dot_product_attention(
            query[:, :, first:end],
            key[:, :, first:end],
            value[:, :, first:end],
            is_causal=True,
            scale=scaling,
            enable_gqa=key.shape[1] != query.shape[1],
        )
        for first, end in pairwise(starts)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous().to(dtype), None


def documents_arguments(starts: np.ndarray, device: torch.device) -> dict[str, Any]:
    """Arguments of a Transformers model that say where documents begin.

    Args:
        starts: int64 [documents + 1], 0 first and the row's length last.
    """
    lengths = np.diff(starts)
    positions_T = np.concatenate([np.arange(length) for length in lengths])
    bounds = torch.from_numpy(starts.astype(np.int32)).to(device)
    longest = int(lengths.max())
    return {
        "position_ids": torch.from_numpy(positions_T)[None].to(device),
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def reset_states(layers: list[nn.Module]) -> None:
    """Call every module that carries a state once per document from now on."""
    for layer in layers:
        for name in STATE_MODULES:
            module: Any = getattr(layer, name, None)
            if module is not None:
                module.forward = _per_document(module.forward)


def _per_document(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(hidden_states: Tensor, *, cu_seq_lens_q: Tensor | None = None, **kwargs: Any) -> Tensor:
        if cu_seq_lens_q is None:
            return forward(hidden_states=hidden_states, **kwargs)
        kwargs = {k: v for k, v in kwargs.items() if not k.startswith(("cu_seq", "max_length"))}
        parts = [
            forward(hidden_states=hidden_states[:, first:end], **kwargs)
            for first, end in pairwise(cu_seq_lens_q.tolist())
        ]
        return torch.cat(parts, dim=1)

    return run


@torch.no_grad()
def check_no_leak(
    model: "PreTrainedModel", hidden: Callable[[Tensor, np.ndarray | None], Tensor]
) -> None:
    """Raise TrainerError when the first of two documents changes what comes out for the second."""
    first, second = CHECK_TOKENS
    embedding: Any = model.get_input_embeddings()
    ids_T = (torch.arange(first + second) * 7 + 1) % embedding.weight.shape[0]
    alone = hidden(ids_T[None, first:], None)[0]
    packed = hidden(ids_T[None], np.array([0, first, first + second]))[0, first:]
    gap = float((packed - alone).float().norm() / alone.float().norm())
    if not gap <= LEAK_FRAC:
        raise TrainerError(
            f"trainer: {type(model).__name__} lets packed documents see each other (hidden states "
            f"differ by {gap:.3g} of their size, allowed {LEAK_FRAC}); set trainer.packing=rows"
        )
