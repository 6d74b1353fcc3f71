"""Measures engine arguments of a pool on a small load, one server at a time; see `scaling.tuning`.

A candidate is started with the pool's own command, is checked as any replica is (what it says of
itself, the numerics key), answers the load once to warm up and then several times, and is stopped.
Invariants: a candidate whose numerics key is another is refused; no server outlives the search.
"""

import asyncio
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlmix.config.schema.train import TrainConfig
from rlmix.core.errors import EngineError, LaunchError, PlanError
from rlmix.engine.client import EngineClient
from rlmix.engine.protocol import GenerateRequest
from rlmix.loop.fleets import training_fleet
from rlmix.loop.tuning_load import TuningLoad
from rlmix.model.bundle import resolve_model
from rlmix.observe.run_dir import RunDir
from rlmix.plan.build import ADMIN_TOKEN_VARIABLE, TOKEN_VARIABLE
from rlmix.plan.runplan import PoolPlan, RunPlan
from rlmix.plan.views import EXPERTS
from rlmix.pools.replica import Replica
from rlmix.scaling.knobs import with_settings
from rlmix.scaling.tuning import DEFAULT, Search, Settings, Verdict, spread_frac
from rlmix.weights.publish import publish_version
from rlmix.weights.store import version_dir

LOADS = 3
"""Of one start, after one to warm up."""
REQUEST_LIMIT_S = 300.0
NAME = "tune"

PlanOf = Callable[[TrainConfig], RunPlan]
"""The plan of a configuration; raises PlanError where it cannot be run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One start of one candidate."""

    settings: Settings
    tokens_per_s: tuple[float, ...]
    """Sampled tokens over time, of each load."""
    boot_s: float
    failed: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "settings": dict(self.settings),
            "tokens_per_s": [round(rate, 3) for rate in self.tokens_per_s],
            "boot_s": round(self.boot_s, 2),
            "failed": self.failed or None,
        }


@dataclass(kw_only=True, slots=True)
class Tuned:
    """What came of it."""

    verdict: Verdict
    usd_per_hour: float
    """Of one replica. 0: it is free, and tokens per second decide."""
    numerics_key: str
    is_emulated: bool
    took_s: float
    is_cut_short: bool
    """The time was over before the last comparison."""
    trials: list[Trial] = field(default_factory=list)

    def rates(self, settings: Settings) -> list[float]:
        return [
            rate for one in self.trials if one.settings == settings for rate in one.tokens_per_s
        ]

    def to_dict(self) -> dict[str, Any]:
        rates = {s: self.rates(s) for s in {one.settings for one in self.trials}}

        def described(settings: Settings) -> dict[str, Any]:
            found = rates.get(settings, [])
            mean = sum(found) / len(found) if found else None
            return {
                "settings": dict(settings),
                "tokens_per_s": mean,
                "tokens_per_usd": per_usd(mean, self.usd_per_hour) if mean else None,
                "spread_frac": spread_frac(found) if found else None,
                "loads": len(found),
            }

        return {
            "default": described(DEFAULT),
            "best": described(self.verdict.best),
            "chosen": dict(self.verdict.settings),
            "is_better": self.verdict.is_better,
            "gain_frac": self.verdict.gain_frac,
            "noise_frac": self.verdict.noise_frac,
            "usd_per_hour": self.usd_per_hour,
            "numerics_key": self.numerics_key,
            "is_emulated": self.is_emulated,
            "took_s": round(self.took_s, 1),
            "is_cut_short": self.is_cut_short,
            "trials": [one.to_dict() for one in self.trials],
        }


def per_usd(tokens_per_s: float, usd_per_hour: float) -> float | None:
    """Tokens for a dollar; None where the replica is free."""
    return 3600.0 * tokens_per_s / usd_per_hour if usd_per_hour > 0 else None


async def tune(
    config: TrainConfig,
    pool: str,
    *,
    plan_of: PlanOf,
    knobs: Mapping[str, Sequence[Any]],
    load: TuningLoad,
    limit_s: float,
    on_trial: Callable[[Trial], None] = lambda trial: None,
) -> Tuned:
    """Search until the end or until `limit_s` is over; a server that is being measured then is
    stopped, and its numbers are left out.

    Raises:
        PlanError: the pool cannot be tuned.
        RlmixError: the default itself cannot be started.
    """
    if config.pools[pool].engine == "sglang_external":
        raise PlanError(
            f"scale pools: --tune {pool}: its servers run already, so their arguments cannot be "
            "changed; tune a pool with engine=sglang and start the servers with what is found"
        )
    alone = replace(config, pools={pool: replace(config.pools[pool], replicas=1)})
    started_s = time.monotonic()
    search = Search(knobs=knobs)
    with tempfile.TemporaryDirectory(prefix="rlmix-tune-") as root, _keys():
        plan = plan_of(alone).pools[pool]
        tuned = Tuned(
            verdict=search.verdict(),
            usd_per_hour=plan.usd_per_replica_hour,
            numerics_key="",
            is_emulated=plan.is_emulated,
            took_s=0.0,
            is_cut_short=False,
        )
        run = RunDir.create(Path(root), NAME, overrides=[])
        with run:
            model_dir = resolve_model(config.model.path)
            await asyncio.to_thread(_publish, model_dir, plan, run.weights)
            try:
                async with asyncio.timeout(limit_s):
                    await _search(search, tuned, alone, plan_of, run, load, on_trial)
            except TimeoutError:
                tuned.is_cut_short = True
            run.close("finished")
    tuned.verdict = search.verdict()
    tuned.took_s = time.monotonic() - started_s
    return tuned


async def _search(
    search: Search,
    tuned: Tuned,
    config: TrainConfig,
    plan_of: PlanOf,
    run: RunDir,
    load: TuningLoad,
    on_trial: Callable[[Trial], None],
) -> None:
    ((pool, base),) = config.pools.items()
    while (settings := search.ask()) is not None:
        if settings in search.failed:
            continue
        began_s = time.monotonic()
        rates: list[float] = []
        boot_s, failed = 0.0, ""
        try:
            candidate = replace(config, pools={pool: with_settings(base, settings)})
            plan = plan_of(candidate)
            spec = training_fleet(
                plan, candidate, run, model_dir=resolve_model(config.model.path)
            ).replicas[0]
            replica = Replica(replace(spec, staging=None))
            try:
                info = await replica.boot(0, version_dir(run.weights, spec.view, 0))
                boot_s = time.monotonic() - began_s
                if not tuned.numerics_key:
                    tuned.numerics_key = info.numerics_key
                if info.numerics_key != tuned.numerics_key:
                    raise EngineError(f"its numerics key is {info.numerics_key}")
                token = os.environ.get(spec.token_env) if spec.token_env else None
                rates = await measure(info.url, token, load, loads=LOADS)
            finally:
                await replica.stop()
                replica.kill()
        except (LaunchError, EngineError, PlanError) as error:
            if settings == DEFAULT:
                raise
            failed = str(error).splitlines()[0]
        trial = Trial(settings=settings, tokens_per_s=tuple(rates), boot_s=boot_s, failed=failed)
        tuned.trials.append(trial)
        if failed:
            search.fail(settings, failed)
        else:
            # A free replica has no price to divide by; one dollar an hour keeps the order.
            search.tell(
                settings, [per_usd(rate, tuned.usd_per_hour or 1.0) or 0.0 for rate in rates]
            )
        on_trial(trial)


async def measure(url: str, token: str | None, load: TuningLoad, *, loads: int) -> list[float]:
    """Sampled tokens per second of the load, several times, after one that is not counted.

    Raises:
        EngineError: the engine failed a request.
    """
    client = EngineClient(url, token=token, timeout_s=REQUEST_LIMIT_S)
    try:
        rates = []
        for number in range(loads + 1):
            started_s = time.monotonic()
            tokens = sum(
                await asyncio.gather(
                    *[_play(client, load, session, number) for session in range(len(load.sessions))]
                )
            )
            rates.append(tokens / (time.monotonic() - started_s))
        return rates[1:]
    finally:
        await client.close()


async def _play(client: EngineClient, load: TuningLoad, index: int, number: int) -> int:
    """One session, turn by turn. What it sends does not depend on what it gets, so that every
    candidate has the same work; returns the sampled tokens."""
    session, tokens = load.sessions[index], 0
    context = list(session.prompt_ids)
    for turn_number, turn in enumerate(session.turns):
        answer = await client.generate(
            GenerateRequest(
                session_id=f"tune-{number}-{index}",
                request_id=f"tune-{number}-{index}-{turn_number}",
                # One token differs from load to load: prefixes are found within a load only.
                input_ids=(context[0], load.mark(number), *context[1:]),
                sampling=replace(load.sampling, max_new_tokens=len(turn.output_ids)),
                record=load.record,
            )
        )
        tokens += len(answer.output_ids)
        context += [*turn.output_ids, *turn.observation_ids]
    return tokens


@contextmanager
def _keys() -> Iterator[None]:
    """Keys of this search's servers, as a run has them."""
    names = (TOKEN_VARIABLE, ADMIN_TOKEN_VARIABLE)
    before = {name: os.environ.get(name) for name in names}
    os.environ.update({name: secrets.token_urlsafe(24) for name in names})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _publish(model_dir: Path, plan: PoolPlan, store: Path) -> None:
    """The pool's view of the model, which servers start from."""
    from safetensors.torch import load_file

    state: dict[str, Any] = {}
    for file in sorted(model_dir.glob("*.safetensors")):
        state |= {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    view = f"{plan.weights}:{EXPERTS}" if plan.scope == EXPERTS else plan.weights
    publish_version(state, version=0, store=store, views=[view], model_files=model_dir)
