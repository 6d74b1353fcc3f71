"""Other sources of `rlmix diff-logprobs`: a finished run, a dump file, a running server."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rlmix.core.errors import ConfigError, DataError, EngineError

if TYPE_CHECKING:
    from rlmix.config.schema.train import TrainConfig
    from rlmix.diff.compare import DiffAsk
    from rlmix.diff.report_data import DiffReport

Say = Callable[[str], None]


def of_run(config: "TrainConfig", run: str, ask: "DiffAsk", *, say: Say) -> "DiffReport":
    """What a run's pools recorded, against the weights of the version that sampled it.

    Raises:
        ConfigError: no such run.
        DataError: it left no session whose weights are still there.
    """
    from dataclasses import replace

    from rlmix.diff.compare import compare
    from rlmix.diff.run_texts import bf16_versions, recorded_texts
    from rlmix.observe.runs import find_run

    folder = find_run(Path(config.run.dir), run)
    versions = bf16_versions(folder)
    names = [pool.name for pool in ask.pools]
    version, texts = recorded_texts(folder, names, versions=list(versions), most=ask.sessions)
    seen = {text.pool for text in texts}
    pools = tuple(pool for pool in ask.pools if pool.name in seen)
    say(f"run {folder.name}: {len(texts)} sessions of version {version}")
    return compare(
        replace(
            ask,
            weights=versions[version],
            pools=pools,
            recorded=tuple(texts),
            source=f"run {folder.name}, version {version}",
        ),
        say=say,
    )


def of_file(
    config: "TrainConfig", path: Path, shape: str, *, numerics: str, say: Say
) -> "DiffReport":
    """A dump: two columns of it where every text brings its trainer's logprobs, else its sampler
    against `model.path`.

    Raises:
        DataError: the file is not what its shape says.
    """
    from rlmix.diff.compare_dump import compare_dump
    from rlmix.diff.dump_files import read_dump
    from rlmix.model.bundle import resolve_model

    dumped = read_dump(path, shape=shape)
    has_trainer = [one.trainer_P is not None for one in dumped]
    if any(has_trainer) and not all(has_trainer):
        raise DataError(
            f"{path}: {sum(has_trainer)} of {len(dumped)} texts hold their trainer's logprobs; all "
            "or none must"
        )
    return compare_dump(
        dumped,
        source=f"{path} ({shape})",
        model=None if all(has_trainer) else resolve_model(config.model.path),
        numerics=numerics,
        temperature=config.algo.temperature,
        tolerances={name: pool.canary_tolerance_nats for name, pool in config.pools.items()},
        tolerance_nats=config.diff.tolerance_nats,
        tile=config.diff.tile,
        say=say,
    )


def of_server(config: "TrainConfig", url: str, *, numerics: str, say: Say) -> "DiffReport":
    """A server that serves `model.path`: it decodes a few texts, then reads them as prompts.

    Raises:
        ConfigError: the temperature is not 1, at which servers report logprobs of prompts; no such
            server, or one whose answers hold no logprobs.
    """
    from rlmix.diff.compare_dump import compare_dump
    from rlmix.diff.server import record
    from rlmix.model.bundle import resolve_model

    if config.algo.temperature != 1.0:
        raise ConfigError(
            f"algo.temperature={config.algo.temperature}: servers report logprobs of prompts at "
            "temperature 1 only; compare at algo.temperature=1"
        )
    model = resolve_model(config.model.path)
    say(f"{url}: sampling, and scoring the same tokens as prompts")
    try:
        dumped, prefill = record(
            url, model, sessions=config.diff.sessions, tokens=config.diff.session_tokens
        )
    except EngineError as error:
        # Nothing was compared, so this is no failed check.
        raise ConfigError(
            f"--server {url}: {error}; give the address of a running server, http://HOST:PORT"
        ) from error
    return compare_dump(
        dumped,
        source=f"{url}, {len(dumped)} texts",
        model=model,
        numerics=numerics,
        temperature=1.0,
        tolerances={},
        tolerance_nats=config.diff.tolerance_nats,
        tile=config.diff.tile,
        prefill=prefill,
        say=say,
    )
