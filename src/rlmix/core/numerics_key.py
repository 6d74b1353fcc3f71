"""The label that says in which numbers a token was sampled."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class NumericsKey:
    """Everything that decides the bits of a sampler's logprobs. Stored with every sample."""

    accelerator: str
    """As detected on the node; for the embedded engine the accelerator it emulates."""
    weights: str
    """Format: bf16, fp8 or nvfp4."""
    activations: str
    kv: str
    attention: str
    view: str = ""
    """Which matrices have that format and in whose convention, as `numerics.view_spec` writes it:
    `nvfp4:experts`; empty where that is not known."""
    linear_attention: str = "none"
    state_dtype: str = "none"
    moe: str = "grouped"
    gemm: str = "native"
    tp: int = 1
    consistency: str = "native"
    """`exact`: operators with one order of additions, whatever the kernels above are called."""
    engine: str = "embedded"
    engine_version: str = ""
    is_emulated: bool = True
    """True when the accelerator is not there and its formats are reproduced on another chip."""

    def compact(self) -> str:
        """One line for records and table cells, e.g. `b200/nvfp4/a=bf16/kv=fp8/...`."""
        head = (
            f"{self.accelerator}/{self.view or self.weights}/a={self.activations}/kv={self.kv}"
            f"/attn={self.attention}/lin={self.linear_attention}/state={self.state_dtype}"
            f"/moe={self.moe}/gemm={self.gemm}/tp={self.tp}/{self.engine}-{self.engine_version}"
        )
        if self.consistency != "native":
            head = f"{head}/{self.consistency}"
        return f"{head}/{'emulated' if self.is_emulated else 'real'}"

    def to_dict(self) -> dict[str, object]:
        return asdict(self)
