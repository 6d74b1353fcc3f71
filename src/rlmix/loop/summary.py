"""What a finished run says about itself, for the closing table and `--json`."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rlmix.loop.alarms import AlarmWatch
from rlmix.loop.progress import Progress
from rlmix.observe.report import REPORT_FILE
from rlmix.observe.run_dir import RunDir
from rlmix.plan.runplan import RunPlan


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
    alarms: list[dict[str, Any]]
    """Every alarm of the run: name, pool, since, raised and cleared step, value, threshold."""
    quarantined: list[str]
    """Pools that were out of routing at the end."""
    pools: dict[str, dict[str, Any]]
    report: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def build_summary(
    *,
    plan: RunPlan,
    run: RunDir,
    progress: Progress,
    evaluation: dict[str, Any] | None,
    alarms: AlarmWatch | None,
    last_metrics: Mapping[str, float],
    exit_reason: str,
    wall_s: float,
) -> TrainSummary:
    """Put the run's counters into words that outside scripts rely on."""
    pools = {
        name: {
            "accelerator": pool.accelerator,
            "weights": pool.weights,
            "kv": pool.kv,
            "is_emulated": pool.is_emulated,
            "replicas": pool.replicas,
            "sessions": progress.pool_sessions.get(name, 0),
            "tokens": progress.pool_tokens.get(name, 0),
            "cost_usd": progress.pool_cost_usd.get(name, 0.0),
            "reward": last_metrics.get(f"reward/by_pool/{name}"),
            "k3_kl": last_metrics.get(f"mismatch/by_pool/{name}/k3_kl"),
        }
        for name, pool in plan.pools.items()
    }
    return TrainSummary(
        run=run.name,
        run_dir=str(run.path),
        steps=progress.step,
        reward_first=progress.reward_first,
        reward_last=progress.reward_last,
        cost_usd=progress.cost_usd,
        wall_s=round(wall_s, 2),
        exit_reason=exit_reason,
        sessions=progress.sessions,
        void_frac=progress.void_frac,
        policy_version=progress.published_version,
        eval=evaluation,
        alarms=[asdict(record) for record in alarms.records] if alarms else [],
        quarantined=list(alarms.quarantined) if alarms else [],
        pools=pools,
        report=str(run.path / REPORT_FILE),
    )
