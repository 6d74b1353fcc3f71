"""`rlmix scale pools`: what pools are, should be, and would cost. Live commands: `scale_live`."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlmix.cli.answer import Answer, answered
from rlmix.cli.options import AsJson, ConfDir, RunsDir
from rlmix.cli.scale_live import LiveRequest, answer_live
from rlmix.cli.scale_tune import (
    Knobs,
    LoadFile,
    Tune,
    TuneLimit,
    TuneRequest,
    TuneSessions,
    answer_tune,
)
from rlmix.core.errors import ConfigError

if TYPE_CHECKING:
    from rlmix.config.schema.train import TrainConfig
    from rlmix.scaling.scenarios import Request

app = typer.Typer(help="Plan, simulate and change the pools of a run.", no_args_is_help=True)

Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[POOL=N]... [KEY=VALUE]...", help="Replicas of pools, and values."),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Today's mix, the best mix, and the saving; modelled.")
]
Simulate = Annotated[
    bool, typer.Option("--simulate", help="Simulate fleets side by side; modelled.")
]
TraceIn = Annotated[
    Path | None, typer.Option("--trace-in", metavar="FILE", help="Sessions and losses to replay.")
]
TraceOut = Annotated[
    Path | None, typer.Option("--trace-out", metavar="FILE", help="What the mixed fleet went by.")
]

RunOfScale = Annotated[
    str | None,
    typer.Option("--run", metavar="RUN", help="Name, folder or http://HOST:PORT of a running run."),
]
Watch = Annotated[bool, typer.Option("--watch", help="Draw the table again and again.")]
Wait = Annotated[
    float,
    typer.Option("--wait", min=0, metavar="SECONDS", help="Follow a change so long; 0: do not."),
]
OperationId = Annotated[
    str | None,
    typer.Option("--id", metavar="ID", help="Name of the change; the same name is done once."),
]
Cancel = Annotated[
    str | None, typer.Option("--cancel", metavar="ID", help="Undo a change that is under way.")
]
Leave = Annotated[
    str | None,
    typer.Option(
        "--leave",
        metavar="HOST",
        help="Drain a machine that is about to go; host name, address or id.",
    ),
]
Stay = Annotated[
    str | None, typer.Option("--stay", metavar="HOST", help="Take --leave of a machine back.")
]
Within = Annotated[
    float | None,
    typer.Option(
        "--within", min=0, metavar="SECONDS", help="With --leave: then sessions move; or drain_s."
    ),
]

REPLICAS = re.compile(r"([A-Za-z0-9_-]+)=([+-]?[0-9][0-9.,_e]*)")
"""A pool and its replicas. Groups choose files by name and keys have dots, so neither is meant."""
MOST_REPLICAS = 10_000
"""Of a pool; more is a slip of the finger, and none could be placed."""


@app.callback()
def _scale() -> None:
    """Keeps `pools` a command of its own name."""


@app.command("pools")
@answered
def scale_pools(
    arguments: Arguments = None,
    dry_run: DryRun = False,
    simulate: Simulate = False,
    trace_in: TraceIn = None,
    trace_out: TraceOut = None,
    run: RunOfScale = None,
    directory: RunsDir = None,
    watch: Watch = False,
    wait: Wait = 600.0,
    operation_id: OperationId = None,
    cancel: Cancel = None,
    leave: Leave = None,
    stay: Stay = None,
    within: Within = None,
    tune: Tune = None,
    knob: Knobs = None,
    load: LoadFile = None,
    sessions: TuneSessions = None,
    limit: TuneLimit = 600.0,
    conf_dir: ConfDir = None,
    as_json: AsJson = False,
) -> Answer:
    """Show, change, plan, simulate or tune the pools of a run.

    \b
    rlmix scale pools                                            the newest running run
    rlmix scale pools h100=2 a100=0                              change it, and follow the change
    rlmix scale pools scaling.auto=true                          let it change itself
    rlmix scale pools --leave gpu-7 --within 90                  its machine goes in 90 seconds
    rlmix scale pools --dry-run experiment=qwen36_mixed          the best mix for the demand
    rlmix scale pools --dry-run h100=3 a100=0                    what a change would do
    rlmix scale pools --simulate experiment=qwen36_mixed         mixed, planned, homogeneous
    rlmix scale pools --simulate scaling.simulate.burst_factor=2 fixed against scaled
    rlmix scale pools --tune h100 experiment=qwen36_mixed        faster with the same numbers
    """
    replicas, overrides = split_arguments(arguments or [])
    if dry_run + simulate + (tune is not None) > 1:
        raise ConfigError(
            "scale pools: got two of --dry-run, --simulate and --tune; choose one of them"
        )
    if (knob or load or sessions) and tune is None:
        raise ConfigError("scale pools: --knob, --load and --sessions need --tune")
    if (trace_in or trace_out) and not simulate:
        raise ConfigError("scale pools: --trace-in and --trace-out need --simulate")
    if not dry_run and not simulate and tune is None:
        return answer_live(
            LiveRequest(
                replicas=replicas,
                overrides=overrides,
                run=run,
                directory=directory,
                conf_dir=conf_dir,
                watch=watch,
                wait_s=wait,
                operation_id=operation_id,
                cancel=cancel,
                leave=leave,
                stay=stay,
                within_s=within,
            )
        )
    if run or watch or cancel or operation_id or leave or stay or within is not None:
        raise ConfigError(
            "scale pools: --run, --watch, --id, --cancel, --leave, --stay and --within are for a "
            "running run; leave out --dry-run, --simulate and --tune"
        )
    config = _config(overrides, replicas, conf_dir)
    if tune is not None:
        return answer_tune(
            TuneRequest(
                pool=tune,
                config=config,
                conf_dir=conf_dir,
                knobs=knob or [],
                load=load,
                sessions=sessions,
                limit_s=limit,
            )
        )
    asked = _request(config)
    if dry_run:
        return _dry_run(asked, is_changed=bool(replicas))
    return _simulate(asked, trace_in, trace_out, is_given=bool(replicas))


def split_arguments(arguments: Sequence[str]) -> tuple[dict[str, int], list[str]]:
    """`POOL=N` apart from `KEY=VALUE`.

    Raises:
        ConfigError: N is no number of replicas, or a pool is named twice.
    """
    replicas: dict[str, int] = {}
    overrides = []
    for argument in arguments:
        if match := REPLICAS.fullmatch(argument):
            pool, number = match[1], match[2]
            if not (number.isdecimal() and len(number) < 9 and int(number) <= MOST_REPLICAS):
                raise ConfigError(
                    f"{argument}: replicas of a pool are a whole number from 0 to {MOST_REPLICAS}"
                )
            if pool in replicas:
                raise ConfigError(f"{argument}: pool {pool} is named twice; give it one number")
            replicas[pool] = int(number)
        else:
            overrides.append(argument)
    return replicas, overrides


def _config(
    overrides: Sequence[str], replicas: Mapping[str, int], conf_dir: Path | None
) -> "TrainConfig":
    from rlmix.cli.train import plan_problems
    from rlmix.config.compose import load_config

    if replicas:
        pools = load_config("train", list(overrides), extra_dir=conf_dir).config.pools
        if unknown := sorted(set(replicas) - set(pools)):
            raise ConfigError(
                f"{unknown[0]}={replicas[unknown[0]]}: no pool {unknown[0]!r}; pools are "
                f"{', '.join(pools)}"
            )
    named = [f"pools.{name}.replicas={count}" for name, count in replicas.items()]
    return load_config(
        "train", [*overrides, *named], extra_dir=conf_dir, judge=plan_problems
    ).config


def _request(config: "TrainConfig") -> "Request":
    import sys

    from rlmix.cli.train import facts_of
    from rlmix.plan.build import build_plan
    from rlmix.scaling.scenarios import request_of

    facts = facts_of(config)
    return request_of(config, build_plan(config, facts=facts, python=sys.executable), facts)


def _dry_run(asked: "Request", *, is_changed: bool) -> Answer:
    from rlmix.cli.scale_view import dry_run_view
    from rlmix.scaling.compare import planned_fleet
    from rlmix.scaling.scenarios import todays_fleet

    market = asked.market
    today = todays_fleet(asked)
    best = planned_fleet("best", list(asked.today), market)
    load = today.needed_per_s / today.supply_per_s if today.supply_per_s > 0 else None
    document: dict[str, Any] = {
        "pools": {
            name: {
                "replicas": count,
                "ready": None,
                "target": best.replicas[name],
                "load": load,
                "usd_per_hour": count * market.model(name).usd_per_hour,
                "per_s": count * market.per_s(name),
                "usd_per_trajectory": usd_per_trajectory(asked, name),
            }
            for name, count in asked.today.items()
        },
        "today": today.to_dict(),
        "best": best.to_dict(),
        "saved_usd_per_hour": today.usd_per_hour - best.usd_per_hour,
        "is_modelled": True,
    }
    return Answer(
        document=document, view=lambda: dry_run_view(asked, document, is_changed=is_changed)
    )


def usd_per_trajectory(asked: "Request", pool: str) -> float | None:
    """Of a replica at its best load; None where the context does not fit."""
    rate = asked.market.per_s(pool)
    return asked.market.model(pool).usd_per_hour / 3600.0 / rate if rate > 0 else None


def _simulate(
    asked: "Request", trace_in: Path | None, trace_out: Path | None, *, is_given: bool
) -> Answer:
    from dataclasses import replace

    from rlmix.cli.scale_view import simulation_view
    from rlmix.scaling.compare import given_fleet, run_fleet
    from rlmix.scaling.scenarios import MIXED, fleets_of
    from rlmix.scaling.traces import read_trace, write_trace

    scenario = asked.scenario
    if trace_in is not None:
        scenario = replace(scenario, trace=tuple(read_trace(trace_in)))
    fleets = fleets_of(asked)
    if is_given:
        fleets[0] = given_fleet(MIXED, asked.today, asked.market)
    scaled = replace(fleets[0], name=f"{MIXED}_scaled")
    lines: list[Mapping[str, Any]] = []
    rows = []
    for fleet in (fleets[0], scaled, *fleets[1:]):
        is_traced = trace_out is not None and fleet is fleets[0]
        outcome = run_fleet(
            fleet,
            asked.market,
            scenario,
            rules=asked.rules if fleet is scaled else None,
            record=lines.append if is_traced else None,
        )
        bought = {
            "bought": dict(fleet.replicas),
            "gpus": fleet.gpus,
            "needed_per_s": fleet.needed_per_s,
            "missing": fleet.missing,
        }
        rows.append({**outcome.to_dict(), **bought})
    document = {
        "fleets": rows,
        "hours": scenario.duration_s / 3600.0,
        "trainer_step_s": scenario.step_s,
        "context_tokens": scenario.shape.context_tokens,
        "is_modelled": True,
    }
    if trace_out is not None:
        document["trace_lines"] = write_trace(trace_out, lines)
    return Answer(document=document, view=lambda: simulation_view(document))
