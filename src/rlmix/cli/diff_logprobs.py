"""`rlmix diff-logprobs`: measure how far trainer and pools are apart, and say why."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlmix.cli.answer import Answer, answered
from rlmix.cli.options import AsJson, ConfDir, Overrides
from rlmix.core.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from rlmix.config.schema.train import TrainConfig
    from rlmix.diff.compare import DiffAsk
    from rlmix.diff.report_data import DiffReport

Write = Annotated[
    Path | None,
    typer.Option(
        "--report", metavar="DIR", help="Also write report.json, report.md and report.html here."
    ),
]


@answered
def diff_logprobs(
    overrides: Overrides = None,
    report: Write = None,
    conf_dir: ConfDir = None,
    as_json: AsJson = False,
) -> Answer:
    """Compare trainer and pools on the same tokens, and name the cause.

    Every pool of the configuration samples a few sessions in this process; the trainer scores
    them; operators that differ on the same inputs are named with their share of the difference.

    \b
    rlmix diff-logprobs                              the default pools
    rlmix diff-logprobs experiment=exact             nothing may differ
    rlmix diff-logprobs pools=two --report DIR       with a report to keep

    Exit code 0: every pool is within its canary_tolerance_nats; 1: one is not; 3: not comparable.
    """
    from rlmix.config.compose import load_config

    config = load_config("train", list(overrides or []), extra_dir=conf_dir).config
    from rlmix.cli.diff_view import diff_view
    from rlmix.diff.compare import compare

    found = compare(ask_of(config), say=lambda line: print(line, file=sys.stderr, flush=True))
    if report is not None:
        from rlmix.diff.report_files import write_report

        write_report(found, report)
    return Answer(document=found.to_dict(), view=lambda: diff_view(found), code=code_of(found))


def code_of(found: "DiffReport") -> int:
    """The exit code of a comparison."""
    if found.obstacles or not found.pools:
        return ExitCode.NOT_COMPARABLE
    return ExitCode.GOOD if found.is_within else ExitCode.CHECK_FAILED


def ask_of(config: "TrainConfig") -> "DiffAsk":
    """What a configuration asks to compare.

    Raises:
        ConfigError: pools that are not served in this process.
        PlanError: the pools cannot be planned.
    """
    from rlmix.cli.train import facts_of, plan_of
    from rlmix.diff.compare import DiffAsk
    from rlmix.diff.findings import Thresholds
    from rlmix.diff.pool import PoolAsk
    from rlmix.model.bundle import resolve_model
    from rlmix.plan.views import pool_view, scoped

    others = [name for name, pool in config.pools.items() if pool.engine != "embedded"]
    if others:
        raise ConfigError(
            f"diff-logprobs: pools {', '.join(others)} have engine="
            f"{config.pools[others[0]].engine}; this command samples embedded pools only. Leave "
            "them out (~pools.NAME), or compare what a real server recorded with --file"
        )
    if not config.pools:
        raise ConfigError("diff-logprobs: no pools; choose some, for example pools=six")
    plan_of(config)  # Refuses what no pool can be.
    whole = scoped(config, facts_of(config))
    diff = config.diff
    pools = tuple(
        PoolAsk(
            name=name,
            accelerator=pool.accelerator,
            weights=pool.weights,
            activations=pool.activations,
            kv=pool.kv,
            attention=pool.attention,
            moe=pool.moe,
            view=pool_view(pool),
            consistency=config.numerics.consistency,
            max_running=pool.max_running,
            tolerance_nats=pool.canary_tolerance_nats,
        )
        for name, pool in whole.pools.items()
    )
    limits = Thresholds(**{name: getattr(diff, name) for name in Thresholds.__dataclass_fields__})
    return DiffAsk(
        model=resolve_model(config.model.path),
        pools=pools,
        numerics=_numerics(config),
        temperature=config.algo.temperature,
        sessions=diff.sessions,
        session_tokens=diff.session_tokens,
        seed=config.run.seed,
        diagnose=diff.diagnose,
        traced_texts=diff.traced_texts,
        least_share=diff.least_share,
        limits=limits,
    )


def _numerics(config: "TrainConfig") -> str:
    """How the trainer computes: as the pools do in exact mode, which share one format."""
    if config.numerics.consistency == "native":
        return "native"
    is_rounded = any(pool.activations == "bf16" for pool in config.pools.values())
    return "exact" if is_rounded else "exact_fp32"
