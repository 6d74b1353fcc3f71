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


From = Annotated[
    str | None,
    typer.Option("--run", metavar="RUN", help="Compare what a finished run recorded."),
]
File = Annotated[
    Path | None,
    typer.Option("--file", metavar="FILE", help="Compare a dump: .jsonl or .safetensors."),
]
FileShape = Annotated[
    str,
    typer.Option(
        "--shape",
        metavar="SHAPE",
        help="Of the dump: rlmix, verl, slime, miles, trl, vllm, sglang.",
    ),
]
Server = Annotated[
    str | None,
    typer.Option("--server", metavar="URL", help="Compare a running SGLang server of model.path."),
]


@answered
def diff_logprobs(
    overrides: Overrides = None,
    run: From = None,
    file: File = None,
    shape: FileShape = "rlmix",
    server: Server = None,
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
    rlmix diff-logprobs --run RUN                    what a finished run recorded
    rlmix diff-logprobs --file DUMP --shape verl     what another system recorded
    rlmix diff-logprobs --server URL                 a real server, prefill and decode

    Exit code 0: every pool is within its canary_tolerance_nats; 1: one is not; 3: not comparable,
    or beyond the limit and inconclusive.
    """
    from rlmix.config.compose import load_config

    if sum(one is not None for one in (run, file, server)) > 1:
        raise ConfigError("diff-logprobs: give one of --run, --file and --server")
    if report is not None and report.exists() and not report.is_dir():
        raise ConfigError(f"--report {report}: a file is there; give a folder")
    given = list(overrides or [])
    if run is not None:
        from rlmix.cli.train import _overrides_of

        given = _overrides_of(run, given, conf_dir)
    config = load_config("train", given, extra_dir=conf_dir).config
    from rlmix.cli.diff_view import diff_view

    found = _found(config, run=run, file=file, shape=shape, server=server)
    if report is not None:
        from rlmix.diff.report_files import write_report

        write_report(found, report)
    return Answer(document=found.to_dict(), view=lambda: diff_view(found), code=code_of(found))


def _found(
    config: "TrainConfig", *, run: str | None, file: Path | None, shape: str, server: str | None
) -> "DiffReport":
    from rlmix.cli import diff_sources

    if run is not None:
        return diff_sources.of_run(config, run, ask_of(config), say=_say)
    if file is not None:
        return diff_sources.of_file(config, file, shape, numerics=_numerics(config), say=_say)
    if server is not None:
        return diff_sources.of_server(config, server, numerics=_numerics(config), say=_say)
    from rlmix.diff.compare import compare

    return compare(ask_of(config), say=_say)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def code_of(found: "DiffReport") -> int:
    """The exit code of a comparison."""
    if found.obstacles or not found.pools or not found.is_conclusive:
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
        least_share=diff.least_share,
        limits=limits,
        source=f"{diff.sessions} sessions sampled by each pool",
    )


def _numerics(config: "TrainConfig") -> str:
    """How the trainer computes: as the pools do in exact mode, which share one format."""
    if config.numerics.consistency == "native":
        return "native"
    is_rounded = any(pool.activations == "bf16" for pool in config.pools.values())
    return "exact" if is_rounded else "exact_fp32"
