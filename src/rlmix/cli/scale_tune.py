"""`rlmix scale pools --tune POOL`: which engine arguments give most tokens per dollar."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlmix.cli.answer import Answer
from rlmix.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rlmix.config.schema.train import TrainConfig
    from rlmix.loop.tuning import Trial

Tune = Annotated[
    str | None,
    typer.Option("--tune", metavar="POOL", help="Measure engine arguments; writes a profile."),
]
Knobs = Annotated[
    list[str] | None,
    typer.Option("--knob", metavar="NAME", help="Tune only this argument; may be repeated."),
]
LoadFile = Annotated[
    Path | None,
    typer.Option("--load", metavar="FILE", help="Trajectories of a run, to tune on."),
]
TuneSessions = Annotated[
    int | None,
    typer.Option("--sessions", min=1, metavar="N", help="Sessions at a time while tuning."),
]
TuneLimit = Annotated[
    float, typer.Option("--limit", min=1, metavar="SECONDS", help="Longest time for tuning.")
]

MOST_SESSIONS = 48
BATCHES = 2
"""Sessions of a load in batches of the pool, so that there is a queue."""
TUNED_DIR = Path("rlmix-conf")
GROUP = "tuned"


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneRequest:
    pool: str
    config: "TrainConfig"
    conf_dir: Path | None
    """Where the profile goes, in `tuned/`; None: `rlmix-conf` in this folder."""
    knobs: Sequence[str]
    load: Path | None
    sessions: int | None
    limit_s: float


def answer_tune(asked: TuneRequest) -> Answer:
    """Search, write the profile if there is something to write, and say what was found."""
    import asyncio

    from rlmix.cli.train import plan_of
    from rlmix.loop.tuning import tune
    from rlmix.loop.tuning_load import generated_load, recorded_load, vocab_size_of
    from rlmix.model.bundle import resolve_model
    from rlmix.scaling.knobs import knobs_of

    config, name = asked.config, asked.pool
    if name not in config.pools:
        raise ConfigError(f"--tune {name}: no such pool; pools are {', '.join(config.pools)}")
    pool = config.pools[name]
    knobs = chosen_knobs(knobs_of(pool, config.accelerators[pool.accelerator]), asked.knobs)
    sessions = asked.sessions or min(MOST_SESSIONS, BATCHES * pool.max_running)
    vocab = vocab_size_of(resolve_model(config.model.path))
    load = (
        generated_load(config, vocab_size=vocab, sessions=sessions)
        if asked.load is None
        else recorded_load(asked.load, config, vocab_size=vocab, sessions=sessions)
    )
    tuned = asyncio.run(
        tune(
            config,
            name,
            plan_of=plan_of,
            knobs=knobs,
            load=load,
            limit_s=asked.limit_s,
            on_trial=_tell,
        )
    )
    document: dict[str, Any] = {
        "pool": name,
        "knobs": {knob: list(values) for knob, values in knobs.items()},
        "load": {"sessions": len(load.sessions), "tokens": load.num_tokens,
                 "recorded": str(asked.load) if asked.load else None},
        **tuned.to_dict(),
        "profile": None,
    }  # fmt: skip
    if tuned.verdict.is_better:
        folder = asked.conf_dir or TUNED_DIR
        path = write_profile(folder, name, document, written_s=time.time())
        document["profile"] = str(path)
        document["use"] = f"rlmix train --conf-dir {folder} +{GROUP}@pools.{name}={name}"
    return Answer(document=document, view=lambda: tune_view(document))


def chosen_knobs(
    known: Mapping[str, Sequence[Any]], asked: Sequence[str]
) -> dict[str, Sequence[Any]]:
    """Those that were named, or all."""
    if unknown := sorted(set(asked) - set(known)):
        raise ConfigError(
            f"--knob {unknown[0]}: this pool has {', '.join(known) or 'none'} (what decides "
            "numbers is never tuned)"
        )
    return {name: values for name, values in known.items() if not asked or name in asked}


def write_profile(
    folder: Path, pool: str, document: Mapping[str, Any], *, written_s: float
) -> Path:
    """A file that can be chosen with `+tuned@pools.POOL=POOL`; whole or not at all."""
    from datetime import UTC, datetime

    import yaml

    from rlmix.observe.jsonl import write_atomically
    from rlmix.scaling.knobs import POOL_KEYS

    chosen = document["chosen"]
    values: dict[str, Any] = {key: chosen[key] for key in POOL_KEYS if key in chosen}
    if arguments := {key: value for key, value in chosen.items() if key not in POOL_KEYS}:
        values["engine_args"] = arguments
    day = f"{datetime.fromtimestamp(written_s, UTC):%Y-%m-%d}"
    head = (
        f"# Written by `rlmix scale pools --tune {pool}`, {day}: "
        f"{100 * document['gain_frac']:+.1f} % tokens per USD,\n"
        f"# noise {100 * document['noise_frac']:.1f} %, on a load of "
        f"{document['load']['sessions']} sessions. Numerics: {document['numerics_key']}\n"
    )
    path = folder / GROUP / f"{pool}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (head + yaml.safe_dump(values, sort_keys=False)).encode())
    return path


def tune_view(document: Mapping[str, Any]) -> "RenderableType":
    """One line for each start, and the verdict."""
    from rich.console import Group
    from rich.text import Text

    from rlmix.cli.scale_view import new_table

    table = new_table("arguments", "tokens/s", "spread", "boot s", "")
    for trial in document["trials"]:
        rates = trial["tokens_per_s"]
        mean = sum(rates) / len(rates) if rates else None
        spread = (max(rates) - min(rates)) / mean if mean else None
        table.add_row(
            settings_text(trial["settings"]),
            "-" if mean is None else f"{mean:.1f}",
            "-" if spread is None else f"{spread:.0%}",
            f"{trial['boot_s']:.1f}",
            trial["failed"] or "",
        )
    return Group(table, *(Text(line) for line in _verdict_lines(document)))


def settings_text(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items()) or "as it is"


def _verdict_lines(document: Mapping[str, Any]) -> list[str]:
    gain, noise = document["gain_frac"], document["noise_frac"]
    best = settings_text(document["best"]["settings"])
    lines = [f"numerics key, the same for all: {document['numerics_key']}"]
    if document["is_emulated"]:
        lines.append("! emulated: this is the speed of a CPU, and says nothing of the accelerator")
    if document["usd_per_hour"] == 0:
        lines.append("! the replica has no price, so tokens per second decided")
    if document["is_better"]:
        lines.append(f"{best}: {gain:+.1%} tokens per USD, more than the noise of {noise:.1%}")
        lines.append(f"written to {document['profile']}; use it with: {document['use']}")
    elif document["is_cut_short"]:
        lines.append("the time was over before the last comparison; nothing changed (--limit)")
    else:
        lines.append(
            f"the pool stays as it is: the best found, {best}, gave {gain:+.1%} where {noise:.1%} "
            "may be chance"
        )
    return lines


def _tell(trial: "Trial") -> None:
    rates = trial.tokens_per_s
    what = trial.failed or f"{sum(rates) / len(rates):.1f} tokens/s"
    print(f"tuning: {settings_text(dict(trial.settings))}: {what}", file=sys.stderr, flush=True)
