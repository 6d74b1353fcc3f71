"""What to try next, for each class of cause: the experiment that would confirm it or not."""

from collections.abc import Mapping

NEXT: Mapping[str, str] = {
    "order": "run both sides with numerics.consistency=exact: order alone then leaves nothing",
    "tiling": "compare a prefill with a decode replay, and run with numerics.consistency=exact",
    "cast": "run both sides with numerics.consistency=exact: rounding at the same places, in one "
    "order, leaves nothing (fp32 on the pool's side alone keeps the trainer's roundings)",
    "quantisation": "set this pool's weights, activations and kv to bf16 one at a time",
    "tokens": "hash token ids and targets on both sides; look for re-encoding and a shift by one",
    "mask": "print which keys a row sees at the first position that differs, on both sides",
    "positions": "print position ids on both sides from the first position that differs",
    "sampling": "compare temperature, top_p, top_k and the logprob mode of both sides",
    "weights": "compare checksums of the weights by tensor, publish them again, restart the engine",
    "vocabulary": "compare the real vocabulary with the width of the logits on both sides",
    "hyper-parameter": "compare config.json of both sides with what their code uses",
    "router": "replay experts, then experts with shares (algo.routing_replay=true)",
    "cache": "flush the prefix cache and score the same tokens again",
}


def next_experiment(cause: str, operator: str) -> str:
    """One sentence; raises KeyError for an unknown class."""
    if cause == "quantisation" and operator == "kv":
        return "set this pool's kv=bf16"
    if cause == "quantisation" and operator == "attention":
        return "set this pool's kv=bf16, or attention=flashinfer, which multiplies in BF16"
    return NEXT[cause]
