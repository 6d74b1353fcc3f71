"""What a finished run says about itself, for the closing table and `--json`."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSummary:
    """The result of `rlmix train`. `None` means not measured, never zero."""

    run: str
    run_dir: str
    steps: int
    """Optimizer steps in the run, over all attempts."""
    reward_first: float | None
    """Mean training reward over the first three steps (or fewer)."""
    reward_last: float | None
    """The same over the last three."""
    cost_usd: float
    """Modelled: replica-seconds times price; the accelerators of embedded pools are emulated."""
    wall_s: float
    """This attempt, from the command to the closing table."""
    exit_reason: str
    """`finished`, `interrupted` or `failed`."""
    sessions: int
    void_frac: float
    policy_version: int
    eval: dict[str, Any] | None
    """Closing evaluation: warm start, trained, difference, ci95, tasks, void."""
    pools: dict[str, dict[str, Any]]
    report: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
