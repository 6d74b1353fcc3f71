"""What a weight view is made of: its format, which matrices it quantises, in whose convention.

A spec travels as a string, the view's name first and then what differs from the usual, e.g. `bf16`,
`nvfp4`, `nvfp4:experts`, `nvfp4:compressed-tensors:4over6`, `fp8:channels`. Invariant: router,
norms, embeddings, output head, small projections, vision tower and MTP layers are never quantised.
"""

import re
from dataclasses import dataclass

from rlmix.core.errors import DataError

VIEWS = ("bf16", "fp8", "nvfp4")
SCOPES = ("all", "experts")
CONVENTIONS = {
    "bf16": ("plain",),
    "fp8": ("blocks", "channels"),
    "nvfp4": ("modelopt", "compressed-tensors"),
}
"""View -> conventions, the usual one first. `blocks`: 128x128 as in DeepSeek's and Qwen's
checkpoints. `channels`: a scale per output channel, written by compressed-tensors; it divides where
a tensor-parallel slice is no multiple of 128."""
FOUR_OVER_SIX = "4over6"

_EXPERT = re.compile(r".*\.mlp\.experts\.\d+\.(gate|up|down)_proj")
_OTHER = re.compile(
    r".*\.(self_attn\.[qkvo]_proj"
    r"|linear_attn\.(in_proj_qkv|in_proj_z|in_proj_qkvz|out_proj)"
    r"|mlp\.(shared_experts?\.)?(gate|up|down)_proj)"
)
_PASSED_THROUGH = re.compile(r"(.*\.)?(visual|vision_tower|mtp)\..*")

SHARED_SCALE = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    ("gate_proj", "up_proj"),
)
"""Projections that an engine fuses into one matrix and that therefore share a tensor scale."""

NEVER_QUANTISED = (
    "lm_head",
    "embed_tokens",
    "mlp.gate",
    "mlp.shared_expert_gate",
    "linear_attn.conv1d",
    "linear_attn.in_proj_a",
    "linear_attn.in_proj_b",
    "linear_attn.in_proj_ba",
    "visual",
    "vision_tower",
    "mtp",
)
"""Ends or middles of module paths, cut at dots."""
NOT_EXPERTS = (
    "self_attn",
    "linear_attn",
    "mlp.shared_expert",
    "mlp.shared_experts",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
"""What else stays BF16 where only experts are quantised."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewSpec:
    """One weight view. `str` gives the text that `parse_view` reads."""

    view: str
    """bf16, fp8 or nvfp4: the name of its folder."""
    scope: str
    """`all`: every large matrix of the text model; `experts`: those of routed experts."""
    convention: str
    """How it lies on disk, see `CONVENTIONS`."""
    four_over_six: bool
    """NVFP4 only: choose each block's scale for the smaller squared error."""

    def __str__(self) -> str:
        parts = [self.view]
        parts += [self.scope] if self.scope != SCOPES[0] else []
        parts += [self.convention] if self.convention != CONVENTIONS[self.view][0] else []
        parts += [FOUR_OVER_SIX] if self.four_over_six else []
        return ":".join(parts)

    def quantises(self, weight: str) -> bool:
        """True for the names of weights that this view stores quantised."""
        if self.view == "bf16" or not weight.endswith(".weight") or is_passed_through(weight):
            return False
        module = weight.removesuffix(".weight")
        if _EXPERT.fullmatch(module):
            return True
        return self.scope == "all" and _OTHER.fullmatch(module) is not None

    @property
    def unquantised_modules(self) -> tuple[str, ...]:
        """Parts of module paths that an engine must not take for quantised."""
        return NEVER_QUANTISED + (NOT_EXPERTS if self.scope == "experts" else ())


def parse_view(text: "str | ViewSpec") -> ViewSpec:
    """A spec from its text.

    Raises:
        DataError: unknown view, or an option that this view does not have.
    """
    if isinstance(text, ViewSpec):
        return text
    view, *options = text.split(":")
    if view not in VIEWS:
        raise DataError(f"view {text!r} is unknown; views are {', '.join(VIEWS)}")
    conventions = CONVENTIONS[view]
    scopes = () if view == "bf16" else SCOPES
    extras = (FOUR_OVER_SIX,) if view == "nvfp4" else ()
    known = (*scopes, *(conventions if view != "bf16" else ()), *extras)
    chosen = {
        "scope": [option for option in options if option in scopes],
        "convention": [option for option in options if option in conventions],
        "four_over_six": [option for option in options if option in extras],
    }
    unknown = [option for option in options if option not in known]
    if unknown or any(len(found) > 1 for found in chosen.values()):
        allowed = f"at most one each of {', '.join(known)}" if known else "no options"
        raise DataError(f"view {text!r}: {view} takes {allowed}, each after a colon")
    return ViewSpec(
        view=view,
        scope=(chosen["scope"] or [SCOPES[0]])[0],
        convention=(chosen["convention"] or [conventions[0]])[0],
        four_over_six=bool(chosen["four_over_six"]),
    )


def is_passed_through(name: str) -> bool:
    """True for tensors of the vision tower and of multi-token prediction."""
    return _PASSED_THROUGH.fullmatch(name) is not None
