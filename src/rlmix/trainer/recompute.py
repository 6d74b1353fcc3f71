"""Activation checkpointing: a layer keeps its input only, and is computed again for its gradient.

Invariant: the second forward is the first one to the bit, also where a hook changes it: experts
that were replayed are replayed again.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""For the first forward and for the second."""


def no_contexts() -> Contexts:
    """Nothing changes a forward."""
    return nullcontext(), nullcontext()


def recompute_layers(layers: list[nn.Module], contexts: Callable[[], Contexts]) -> None:
    """Replace the forward of each layer; parameters keep their names.

    Args:
        contexts: called at each first forward.
    """
    for layer in layers:
        module: Any = layer
        # `forward` and not the call: FSDP's hooks stay outside, the gathered weights are there
        # during the backward pass anyway.
        module.forward = _recomputed(module.forward, contexts)


def _recomputed(
    forward: Callable[..., Any], contexts: Callable[[], Contexts]
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(
            forward,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,  # Dropout is off.
            context_fn=contexts,
            **kwargs,
        )

    return run
