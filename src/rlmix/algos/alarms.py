"""When a run should be looked at: rules over the metrics of its steps, with a memory.

Pure: rules, a memory and one step's metrics in; the alarms that stand and the new memory out. No
clock, no file, no tensor; the loop acts on the answer.

A rule reads one number per step (or one per pool). Beyond its limit for `patience` steps in a row
it raises an alarm; within the limit for as many it clears it. A step without enough tokens says
nothing either way. Invariant: the past that a rule compares with never holds a step that was
beyond the limit, so a fault cannot become the new normal.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

MIN_RATIO_NATS = 1e-6
"""Below this a mean difference counts as this much: ratios of rounding noise say nothing."""

Metrics = Mapping[str, float | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """What one alarm watches for."""

    limit: float
    """In the rule's own unit, see `RULES`."""
    action: str
    """What the loop does at the onset: `event`, `quarantine` or `stop`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlarmRules:
    """All rules and what they have in common."""

    rules: Mapping[str, Rule]
    """By name, each one of `RULES`."""
    patience: int
    """Steps in a row beyond (or within) the limit until an alarm stands (or clears)."""
    min_tokens: int
    """Of a step, or of a pool in it; with fewer, the step says nothing."""
    head_min_tokens: int
    """The same for the tail ratio of recorded heads, which few tokens have."""
    window: int
    """Steps of its own past that a rule remembers."""
    drift_min_nats: float
    """Mean absolute difference below which a pool never drifts, whatever the others do."""
    drift_format_gap: float
    """Times the other pools' mismatch that a number format may explain: granted to a pool before
    it has a past, and at most."""
    tolerances_nats: Mapping[str, float]
    """Pool -> mean absolute difference that its replicas are admitted with at most. A pool that is
    missing is not judged by it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarm:
    """One alarm that stands."""

    name: str
    pool: str | None
    """None for a rule about the whole run."""
    value: float
    """The latest measured one."""
    threshold: float
    since_step: int
    """First of the steps beyond the limit."""
    action: str

    @property
    def key(self) -> str:
        return alarm_key(self.name, self.pool)

    def describe(self) -> str:
        """One sentence for a person."""
        return RULES[self.name].sentence.format(
            pool=self.pool, value=f"{self.value:.3g}", limit=f"{self.threshold:.3g}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Breach:
    """How a rule stands with its limit."""

    since_step: int
    over: int
    """Steps beyond the limit, in a row at first."""
    under: int
    """Steps within it, in a row, since the alarm stands."""
    is_active: bool
    value: float
    threshold: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AlarmMemory:
    """What the rules know of earlier steps. Part of a checkpoint."""

    past: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Series by name; see the rules that use them."""
    breaches: Mapping[str, Breach] = field(default_factory=dict)
    """By `alarm_key`."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "past": {name: list(values) for name, values in self.past.items()},
            "breaches": {
                key: {name: getattr(breach, name) for name in Breach.__dataclass_fields__}
                for key, breach in self.breaches.items()
            },
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "AlarmMemory":
        return cls(
            past={name: tuple(values) for name, values in data["past"].items()},
            breaches={key: Breach(**values) for key, values in data["breaches"].items()},
        )

    def forget_breach(self, key: str) -> "AlarmMemory":
        """As if the rule had never been beyond its limit; its past stays."""
        return replace(self, breaches={k: b for k, b in self.breaches.items() if k != key})


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What one rule measured in one step."""

    pool: str | None
    value: float
    is_beyond: bool
    past_name: str | None = None
    """Series that `past_value` joins."""
    past_value: float = 0.0
    is_remembered: bool = True
    """False: the step must not become part of the past."""


Measure = Callable[[Rule, AlarmRules, AlarmMemory, Metrics], Iterator[Reading]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleKind:
    """A rule as a function, and what it means."""

    measure: Measure
    is_per_pool: bool
    """Only such rules can quarantine: the others name no pool."""
    sentence: str
    """With `{value}`, `{limit}` and, per pool, `{pool}`."""


def check_alarms(
    rules: AlarmRules, memory: AlarmMemory, metrics: Metrics, *, step: int
) -> tuple[list[Alarm], AlarmMemory]:
    """Judge one step.

    Args:
        metrics: the step's row; what is missing, None or not finite was not measured.
        step: number of the step; growing by 1 from call to call, gaps allowed.
    Returns:
        (alarms that stand now, by name and pool; the memory for the next step). An alarm is new
        when its key had no active breach in `memory`, and cleared when only `memory` had one.
    Raises:
        KeyError: a rule that `RULES` does not know.
    """
    metrics = {key: v for key, v in metrics.items() if v is not None and math.isfinite(v)}
    past = dict(memory.past)
    breaches = dict(memory.breaches)
    for name, rule in rules.rules.items():
        for reading in RULES[name].measure(rule, rules, memory, metrics):
            key = alarm_key(name, reading.pool)
            breach = _moved(breaches.pop(key, None), reading, rule, rules.patience, step)
            if breach is not None:
                breaches[key] = breach
            if reading.past_name is not None and reading.is_remembered:
                series = (*past.get(reading.past_name, ()), reading.past_value)
                past[reading.past_name] = series[-rules.window :]
    standing = [
        Alarm(
            name=name,
            pool=pool,
            value=breach.value,
            threshold=breach.threshold,
            since_step=breach.since_step,
            action=rules.rules[name].action,
        )
        for (name, pool), breach in sorted(
            ((_split_key(key), breach) for key, breach in breaches.items() if breach.is_active),
            key=lambda item: (item[0][0], item[0][1] or ""),
        )
        if name in rules.rules
    ]
    return standing, AlarmMemory(past=past, breaches=breaches)


def alarm_key(name: str, pool: str | None) -> str:
    return name if pool is None else f"{name}/{pool}"


def _split_key(key: str) -> tuple[str, str | None]:
    name, _, pool = key.partition("/")
    return name, pool or None


def _moved(
    before: Breach | None, reading: Reading, rule: Rule, patience: int, step: int
) -> Breach | None:
    """The breach after one more reading; None when there is none any more."""
    if reading.is_beyond:
        if before is None:
            before = Breach(
                since_step=step, over=0, under=0, is_active=False, value=0.0, threshold=0.0
            )
        over = before.over + 1
        return replace(
            before,
            over=over,
            under=0,
            is_active=before.is_active or over >= patience,
            value=reading.value,
            threshold=rule.limit,
        )
    if before is None or not before.is_active or before.under + 1 >= patience:
        return None
    return replace(before, under=before.under + 1, value=reading.value, threshold=rule.limit)


def _above(key: str, tokens_key: str = "mismatch/tokens", *, sign: int = 1) -> Measure:
    """A rule about one number of the run: beyond when above the limit (`sign` -1: below)."""

    def measure(
        rule: Rule, rules: AlarmRules, memory: AlarmMemory, metrics: Metrics
    ) -> Iterator[Reading]:
        value = metrics.get(key)
        if value is not None and (metrics.get(tokens_key) or 0.0) >= rules.min_tokens:
            yield Reading(pool=None, value=value, is_beyond=sign * value > sign * rule.limit)

    return measure


def _pool_above(room: str, quantity: str) -> Measure:
    """A rule about one number of each pool: beyond when above the limit."""

    def measure(
        rule: Rule, rules: AlarmRules, memory: AlarmMemory, metrics: Metrics
    ) -> Iterator[Reading]:
        for pool in measured_pools(metrics, min_tokens=rules.min_tokens):
            value = metrics.get(f"{room}/by_pool/{pool}/{quantity}")
            if value is not None:
                yield Reading(pool=pool, value=value, is_beyond=value > rule.limit)

    return measure


def measured_pools(metrics: Metrics, *, min_tokens: int) -> list[str]:
    """Pools with enough tokens in the step."""
    start, end = "mismatch/by_pool/", "/tokens"
    return [
        key[len(start) : -len(end)]
        for key, tokens in metrics.items()
        if key.startswith(start) and key.endswith(end) and (tokens or 0.0) >= min_tokens
    ]


def _tail_ratio(
    rule: Rule, rules: AlarmRules, memory: AlarmMemory, metrics: Metrics
) -> Iterator[Reading]:
    """From recorded heads, or, when centering works with a head, from its own model."""
    value = metrics.get("correction/head_tail_ratio")
    is_measured = (metrics.get("correction/head_tokens") or 0.0) >= rules.head_min_tokens
    if value is None:
        value = metrics.get("correction/sc_tail_ratio")
        # Exactly 1 is what exact support says of itself: no measurement, so no sign of health
        # either, or a step in which no turn recorded a head would clear the alarm.
        is_measured = value != 1.0 and (metrics.get("mismatch/tokens") or 0.0) >= rules.min_tokens
    if value is not None and is_measured:
        yield Reading(pool=None, value=value, is_beyond=value > rule.limit)


def _entropy(
    rule: Rule, rules: AlarmRules, memory: AlarmMemory, metrics: Metrics
) -> Iterator[Reading]:
    """Entropy as a share of its median over the run's first steps."""
    value = metrics.get("loss/entropy")
    if value is None or (metrics.get("mismatch/tokens") or 0.0) < rules.min_tokens:
        return
    first = memory.past.get("entropy", ())
    if len(first) < rules.patience:
        yield Reading(pool=None, value=1.0, is_beyond=False, past_name="entropy", past_value=value)
        return
    share = value / max(median(first), MIN_RATIO_NATS)
    yield Reading(pool=None, value=share, is_beyond=share < rule.limit)


def _non_finite(
    rule: Rule, rules: AlarmRules, memory: AlarmMemory, metrics: Metrics
) -> Iterator[Reading]:
    """Share of the last `window` steps whose loss or gradient was not finite."""
    value = metrics.get("loss/is_non_finite")
    if value is None:
        return
    recent = (*memory.past.get("non_finite", ()), value)[-rules.window :]
    share = sum(recent) / rules.window
    yield Reading(
        pool=None,
        value=share,
        is_beyond=share > rule.limit,
        past_name="non_finite",
        past_value=value,
    )


def _pool_drift(
    rule: Rule, rules: AlarmRules, memory: AlarmMemory, metrics: Metrics
) -> Iterator[Reading]:
    """How many times farther a pool is from the other pools than it usually is.

    A pool's distance is its mean absolute difference over the median of the other pools'; what is
    usual for it is the median of its own past, or what a number format may explain. So neither a
    format's ordinary gap nor a step in which all pools move together raises an alarm.
    """
    floor = max(metrics.get("mismatch/noise_floor_mean_abs") or 0.0, MIN_RATIO_NATS)
    nats = {
        pool: value
        for pool in measured_pools(metrics, min_tokens=rules.min_tokens)
        if (value := metrics.get(f"mismatch/by_pool/{pool}/mean_abs")) is not None
    }
    for pool, value in nats.items():
        others = [other for name, other in nats.items() if name != pool]
        if not others:
            return
        gap = math.log(max(value, floor) / max(median(others), floor))
        past_name = alarm_key("pool_drift", pool)
        usual = _usual_gap(memory.past.get(past_name, ()), rules)
        times = math.exp(gap - usual)
        is_beyond = times > rule.limit and value > rules.drift_min_nats
        yield Reading(
            pool=pool,
            value=times,
            is_beyond=is_beyond,
            past_name=past_name,
            past_value=gap,
            is_remembered=not is_beyond,
        )


def _pool_tolerance(
    rule: Rule, rules: AlarmRules, memory: AlarmMemory, metrics: Metrics
) -> Iterator[Reading]:
    """How many times its own tolerance a pool is from the trainer."""
    for pool in measured_pools(metrics, min_tokens=rules.min_tokens):
        nats = metrics.get(f"mismatch/by_pool/{pool}/mean_abs")
        tolerance_nats = rules.tolerances_nats.get(pool)
        if nats is not None and tolerance_nats is not None:
            times = nats / tolerance_nats
            yield Reading(pool=pool, value=times, is_beyond=times > rule.limit)


def _usual_gap(past: Sequence[float], rules: AlarmRules) -> float:
    """Log of a pool's usual distance to the others."""
    most = math.log(rules.drift_format_gap)
    return most if len(past) < rules.patience else min(median(past), most)


RULES: Mapping[str, RuleKind] = {
    "tail_ratio": RuleKind(
        measure=_tail_ratio,
        is_per_pool=False,
        sentence="the sampler's tail holds {value} times the trainer's (limit {limit})",
    ),
    "ess": RuleKind(
        measure=_above("correction/ess_frac", sign=-1),
        is_per_pool=False,
        sentence="the weights are worth {value} of their tokens (limit {limit})",
    ),
    "masked": RuleKind(
        measure=_above("correction/masked_frac"),
        is_per_pool=False,
        sentence="a share of {value} of all tokens is masked (limit {limit})",
    ),
    "k3": RuleKind(
        measure=_above("mismatch/k3_kl"),
        is_per_pool=False,
        sentence="trainer and samplers are {value} nats apart by k3 (limit {limit})",
    ),
    "entropy": RuleKind(
        measure=_entropy,
        is_per_pool=False,
        sentence="the entropy is {value} of that of the first steps (limit {limit})",
    ),
    "non_finite": RuleKind(
        measure=_non_finite,
        is_per_pool=False,
        sentence="a share of {value} of the last steps was not finite (limit {limit})",
    ),
    "pool_drift": RuleKind(
        measure=_pool_drift,
        is_per_pool=True,
        sentence="pool {pool} is {value} times as far from the other pools as usual "
        "(limit {limit})",
    ),
    "pool_masked": RuleKind(
        measure=_pool_above("correction", "masked_frac"),
        is_per_pool=True,
        sentence="a share of {value} of the tokens of pool {pool} is masked (limit {limit})",
    ),
    "pool_k3": RuleKind(
        measure=_pool_above("mismatch", "k3_kl"),
        is_per_pool=True,
        sentence="trainer and pool {pool} are {value} nats apart by k3 (limit {limit})",
    ),
    "pool_tolerance": RuleKind(
        measure=_pool_tolerance,
        is_per_pool=True,
        sentence="pool {pool} is {value} times its canary_tolerance_nats from the trainer "
        "(limit {limit})",
    ),
}
"""Name -> rule. The names are keys of `conf/alarms/`, as NAME_limit and NAME_action."""
