"""How long a replica takes: one decoding step at a batch, one prefilled token. Pure.

It starts as a prior (a relative speed, or a roofline of the accelerator) and is fitted to what
the replica shows: sums over its decoding steps where it reports them, and turn times otherwise.
Invariant: a step never gets shorter with more requests in it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

REFERENCE_REQUEST_S = 1e-3
"""A request's share of a step at relative speed 1. Only ratios matter before the first
observation; then all priors are scaled together by what was observed (`common_scale`)."""
REFERENCE_PREFILL_S = 1e-4
"""A prefilled token at relative speed 1."""

BANDWIDTH_REACHED_FRAC = 0.6
"""Share of the memory bandwidth that decode kernels reach."""
FLOPS_REACHED_FRAC = 0.4
"""Share of the peak matrix rate that prefill reaches."""

TRUST_STEPS = 400.0
"""Decoding steps after which observation and prior weigh the same: a few turns."""
MEMORY_STEPS = 20_000.0
"""Older steps are forgotten so that the fit follows a replica whose contexts grow."""
TRUST_PREFILL_TOKENS = 2_000.0
MEMORY_PREFILL_TOKENS = 1e6

MAX_STEP_S = 600.0
"""Sums of longer steps, or with a mean batch that its squares rule out, are nonsense and are not
learned from: all replicas' priors are scaled by what each of them shows."""

SLOPE_FLOOR_FRAC = 0.5
"""At least this share of a step is taken to grow with the batch. Measured steps are nearly flat
over small batches, but every further request also brings prefill, cache and state traffic that
those steps do not show; with a flat model the fastest replica would get everybody."""

SPEED_RATIO_MAX = 4.0
"""Observation moves a replica by at most this factor against its prior, relative to the others:
a fit on few odd turns must not take it out of play."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepModel:
    """Seconds; none is negative."""

    base_s: float
    """Of a step, whatever its batch: weights are read once."""
    request_s: float
    """For each request in the step."""
    token_s: float
    """For each token of context in the step: its keys and values are read."""
    prefill_token_s: float

    def step_s(self, batch: float, context_tokens: float) -> float:
        """One step of `batch` requests with `context_tokens` in all."""
        return self.base_s + self.request_s * batch + self.token_s * context_tokens

    def scaled(self, factor: float) -> "StepModel":
        return StepModel(
            base_s=self.base_s * factor,
            request_s=self.request_s * factor,
            token_s=self.token_s * factor,
            prefill_token_s=self.prefill_token_s * factor,
        )


def relative_prior(speed: float) -> StepModel:
    """The prior of a replica of which only its speed relative to the others is known: a step
    that grows with its batch, so that work is shared in proportion to the speeds."""
    return StepModel(
        base_s=0.0,
        request_s=REFERENCE_REQUEST_S / speed,
        token_s=0.0,
        prefill_token_s=REFERENCE_PREFILL_S / speed,
    )


def roofline_prior(
    *,
    bandwidth_bytes_s: float,
    weight_bytes: float,
    kv_bytes_per_token: float,
    state_bytes: float = 0.0,
    flops_per_token: float = 0.0,
    peak_flops_s: float = 0.0,
    fixed_s: float = 0.0,
) -> StepModel:
    """The prior of an accelerator whose facts are known: what a step moves over how fast.

    Args:
        bandwidth_bytes_s: of the memory, as the vendor says it.
        weight_bytes: read by one step; all experts, once a batch touches nearly all of them.
        state_bytes: recurrent state of one request, read and written.
        flops_per_token, peak_flops_s: for prefill; without them a prefilled token is taken to cost
            a request's share of a step.
        fixed_s: kernel launches of a step.
    """
    reached = BANDWIDTH_REACHED_FRAC * bandwidth_bytes_s
    request_s = 2.0 * state_bytes / reached
    token_s = kv_bytes_per_token / reached
    base_s = weight_bytes / reached + fixed_s
    if flops_per_token and peak_flops_s:
        prefill_token_s = flops_per_token / (FLOPS_REACHED_FRAC * peak_flops_s)
    else:
        prefill_token_s = base_s / 64.0
    return StepModel(
        base_s=base_s, request_s=request_s, token_s=token_s, prefill_token_s=prefill_token_s
    )


class StepFit:
    """Sums of what one replica has shown, and the model that they and the prior give."""

    __slots__ = (
        "_moments", "_prefill_s", "_prefill_seen", "_prefill_tokens", "_w", "_wb", "_wbb", "_wby",
        "_wy",
    )  # fmt: skip

    def __init__(self) -> None:
        # Sums over steps: weight, batch, batch squared, seconds, batch times seconds.
        self._w = self._wb = self._wbb = self._wy = self._wby = 0.0
        self._moments: Sequence[float] | None = None
        self._prefill_seen: tuple[float, float] | None = None
        self._prefill_tokens = self._prefill_s = 0.0

    @property
    def steps(self) -> float:
        """Steps that the fit rests on."""
        return self._w

    @property
    def mean_batch(self) -> float:
        return self._wb / self._w if self._w else 0.0

    @property
    def mean_step_s(self) -> float:
        return self._wy / self._w if self._w else 0.0

    @property
    def has_moments(self) -> bool:
        return self._moments is not None

    def observe_moments(self, moments: Sequence[float]) -> None:
        """The engine's sums since its start (`decode_moments`); a restart starts them again."""
        before, self._moments = self._moments, tuple(moments)
        if before is None:
            # The first look replaces what turns had said: the engine's own clock is better.
            self._w = self._wb = self._wbb = self._wy = self._wby = 0.0
            before = (0.0,) * 6
        if moments[0] < before[0]:
            before = (0.0,) * 6
        steps, batch, us, squared, batch_us = (moments[i] - before[i] for i in range(5))
        is_possible = squared * steps >= 0.999 * batch * batch and us <= steps * MAX_STEP_S * 1e6
        if steps > 0 and us > 0 and batch > 0 and batch_us >= 0 and is_possible:
            self._add(steps, batch, squared, us * 1e-6, batch_us * 1e-6)

    def observe_turn(
        self, *, turn_s: float, output_tokens: float, uncached_tokens: float, batch: float,
        prefill_token_s: float,
    ) -> None:  # fmt: skip
        """A turn that was never queued: its steps had `batch` requests on the mean. Ignored once
        the engine reports its own sums."""
        if self._moments is not None or output_tokens <= 0 or batch <= 0:
            return
        decode_s = max(turn_s - uncached_tokens * prefill_token_s, 0.1 * turn_s)
        n = output_tokens
        self._add(n, n * batch, n * batch * batch, decode_s, decode_s * batch)

    def observe_prefill(self, tokens: float, us: float) -> None:
        """The engine's sums of prefilled tokens and the time they took."""
        before = self._prefill_seen
        self._prefill_seen = (tokens, us)
        if before is None or tokens < before[0]:
            before = (0.0, 0.0)
        new_tokens, new_us = tokens - before[0], us - before[1]
        if new_tokens > 0 and new_us > 0:
            keep = min(1.0, MEMORY_PREFILL_TOKENS / (self._prefill_tokens + new_tokens))
            self._prefill_tokens = keep * (self._prefill_tokens + new_tokens)
            self._prefill_s = keep * (self._prefill_s + new_us * 1e-6)

    def model(self, prior: StepModel, *, context_tokens: float) -> StepModel:
        """Base and request share by least squares with a pull towards the prior worth
        `TRUST_STEPS`; what a context token costs stays the prior's.

        Args:
            context_tokens: mean context of a request, of which the prior's share is taken out.
        """
        fitted = prior
        if self._w > 0 and self._wb > 0:
            fitted = self._fitted(prior, context_tokens)
        if self._prefill_tokens > 0:
            trusted_s = TRUST_PREFILL_TOKENS * prior.prefill_token_s
            total = self._prefill_tokens + TRUST_PREFILL_TOKENS
            fitted = replace(fitted, prefill_token_s=(self._prefill_s + trusted_s) / total)
        return fitted

    def _fitted(self, prior: StepModel, context_tokens: float) -> StepModel:
        pull = TRUST_STEPS
        batch = self.mean_batch
        per_request = prior.token_s * context_tokens
        w, wb, wbb = self._w, self._wb, self._wbb
        wy, wby = self._wy - per_request * wb, self._wby - per_request * wbb
        a11, a12, a22 = w + pull, wb, wbb + pull * batch * batch
        b1 = wy + pull * prior.base_s
        b2 = wby + pull * batch * batch * prior.request_s
        det = a11 * a22 - a12 * a12
        slope = (a11 * b2 - a12 * b1) / det
        mean_s = max((self._wy + pull * prior.step_s(batch, batch * context_tokens)) / a11, 1e-9)
        # What grows with the batch, contexts included, has a floor and cannot be all there is.
        low = max(SLOPE_FLOOR_FRAC * mean_s / batch - per_request, 0.0)
        high = max(mean_s / batch - per_request, 0.0)
        slope = min(max(slope, low), max(high, low))
        base = max(mean_s - (slope + per_request) * batch, 0.0)
        return replace(prior, base_s=base, request_s=slope)

    def _add(self, w: float, wb: float, wbb: float, wy: float, wby: float) -> None:
        keep = min(1.0, MEMORY_STEPS / (self._w + w))
        self._w = keep * (self._w + w)
        self._wb = keep * (self._wb + wb)
        self._wbb = keep * (self._wbb + wbb)
        self._wy = keep * (self._wy + wy)
        self._wby = keep * (self._wby + wby)


def common_scale(ratios: Iterable[tuple[float, float]]) -> float:
    """By how much all priors are off together: exp of the weighted mean of log ratios.

    Args:
        ratios: (observed over prior step time, steps it rests on) of each replica.
    Returns:
        1 when nothing was observed.
    """
    total = weight = 0.0
    for ratio, steps in ratios:
        if ratio > 0 and steps > 0:
            trust = steps / (steps + TRUST_STEPS)
            total += trust * math.log(ratio)
            weight += trust
    return math.exp(total / weight) if weight else 1.0


def bounded(
    model: StepModel, prior: StepModel, *, batch: float, context_tokens: float
) -> StepModel:
    """The model, kept within `SPEED_RATIO_MAX` of its (scaled) prior at `batch`."""
    batch = max(batch, 1.0)
    tokens = batch * context_tokens
    ratio = model.step_s(batch, tokens) / max(prior.step_s(batch, tokens), 1e-12)
    limit = min(max(ratio, 1.0 / SPEED_RATIO_MAX), SPEED_RATIO_MAX)
    if limit == ratio:
        return model
    factor = limit / ratio
    return replace(model, base_s=model.base_s * factor, request_s=model.request_s * factor)
