"""Continuous batching in time alone: a state machine that is told what time it is.

Prefill comes first and decoding stands still meanwhile, as in SGLang without mixed chunks. Running
requests all advance by one token a step, so one counter of steps is enough: a request is done when
the counter has moved by its number of output tokens. That makes the cost of a request independent
of its length.

Invariant: between two events the batch does not change and a step takes the same time; the state at
a time does not depend on how often the machine was asked on the way there.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field

from rlmix.engine.timed.cache import PrefixCache
from rlmix.engine.timed.steps import StepTimes

EPSILON_STEPS = 1e-6
"""Rounding of the step counter."""


@dataclass(eq=False, slots=True)
class Work:
    """One request."""

    blocks: list[int]
    prompt_tokens: int
    output_tokens: int
    block_tokens: float
    """Tokens that one block of the prompt stands for."""
    arrived_s: float = 0.0
    cached_tokens: int = 0
    first_token_s: float | None = None
    started_at: float = 0.0
    """Value of the step counter when the first token was sampled."""
    ends_at: float = 0.0
    sampled_before: int = 0
    """Tokens sampled before the last retraction; `prompt_tokens` has grown by them."""
    is_gone: bool = False
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(version, tokens sampled until that version ended), for versions that ended meanwhile."""

    @property
    def kv_tokens(self) -> float:
        return self.prompt_tokens + self.output_tokens / 2


class Scheduler:
    """One engine. Times are seconds on the caller's clock and never go back."""

    def __init__(self, steps: StepTimes, *, max_running: int, kv_tokens: int) -> None:
        self.steps = steps
        self.max_running = max_running
        self.kv_tokens = kv_tokens
        self.cache = PrefixCache(kv_tokens)
        self.waiting: deque[Work] = deque()
        self.is_paused = False
        self.prefilled_tokens = 0
        self.prefill_us = 0.0
        self.generated_tokens = 0.0
        self.moments = [0.0] * 6
        """Steps, and sums of batch, microseconds, batch squared, batch times microseconds, tokens;
        see `/v1/loads`."""
        self._now_s = 0.0
        self._counter = 0.0
        self._running: list[tuple[float, int, Work]] = []
        self._num_running = 0
        self._sequence = 0
        self._prefill: Work | None = None
        self._prefill_left_s = 0.0
        self._kv_running = 0.0
        self._reserved = 0
        self._step_s = steps.decode_s(0, 0.0)

    @property
    def num_running(self) -> int:
        return self._num_running + (self._prefill is not None)

    @property
    def used_tokens(self) -> int:
        """KV tokens of the requests under way; what they will need is reserved."""
        return self._reserved

    @property
    def tokens_per_s(self) -> float:
        is_decoding = self._num_running > 0 and self._prefill is None and not self.is_paused
        return self._num_running / self._step_s if is_decoding else 0.0

    def waiting_uncached(self) -> int:
        return sum(self._uncached(work) for work in self.waiting)

    def submit(self, work: Work, now_s: float) -> list[Work]:
        """A request arrives; returns what finished until now."""
        done = self.advance(now_s)
        work.arrived_s = now_s
        self.waiting.append(work)
        self._start_next()
        return done

    def cancel(self, work: Work, now_s: float) -> list[Work]:
        """A request is given up by its client; returns what finished until now."""
        done = self.advance(now_s)
        if work.is_gone:
            return done
        work.is_gone = True
        if work is self._prefill:
            self._prefill = None
            self._reserved -= work.prompt_tokens + work.output_tokens
        elif work in self.waiting:
            self.waiting.remove(work)
        else:
            self._leave(work)
        self._start_next()
        return done

    def advance(self, now_s: float) -> list[Work]:
        """Let time pass; returns the requests that finished, in their order."""
        done: list[Work] = []
        while (next_s := self.next_s()) is not None and next_s <= now_s:
            self._run_to(next_s)
            if self._prefill is not None:
                self._prefill_left_s = 0.0
                self._end_prefill(done)
            else:
                self._counter = max(self._counter, self._running[0][0])
                self._finish_due(done)
            self._start_next()
        self._run_to(now_s)
        return done

    def next_s(self) -> float | None:
        """When the next request finishes or is prefilled, if nothing comes in between."""
        while self._running and self._running[0][2].is_gone:
            heapq.heappop(self._running)
        if self.is_paused:
            return None
        if self._prefill is not None:
            return self._now_s + self._prefill_left_s
        if self._running:
            left = max(0.0, self._running[0][0] - self._counter)
            return self._now_s + left * self._step_s
        return None

    def pause(self, now_s: float) -> list[Work]:
        done = self.advance(now_s)
        self.is_paused = True
        return done

    def resume(self, now_s: float) -> None:
        self.advance(now_s)
        self.is_paused = False
        self._start_next()

    def retract(self) -> int:
        """Running requests go back into the queue and lose what they hold; returns how many. Their
        sampled tokens stay and are prefilled again."""
        back = [self._prefill] if self._prefill is not None else []
        back += sorted((w for _, _, w in self._running if not w.is_gone), key=lambda w: w.arrived_s)
        for work in back:
            if work is not self._prefill:
                sampled = self.sampled(work) - work.sampled_before
                work.sampled_before += sampled
                work.prompt_tokens += sampled
                work.output_tokens -= sampled
        self._prefill, self._running, self._num_running = None, [], 0
        self._kv_running, self._reserved = 0.0, 0
        self.waiting.extendleft(reversed(back))
        return len(back)

    def drop_all(self) -> list[Work]:
        """Forget every request; returns them."""
        dropped = [w for _, _, w in self._running if not w.is_gone]
        dropped += [self._prefill] if self._prefill is not None else []
        dropped += self.waiting
        for work in dropped:
            work.is_gone = True
        self._prefill, self._running, self._num_running = None, [], 0
        self._kv_running, self._reserved = 0.0, 0
        self.waiting.clear()
        return dropped

    def end_version(self, version: int) -> None:
        """Note for every request under way how many tokens this version sampled."""
        for _, _, work in self._running:
            work.spans.append((version, self.sampled(work)))
        for work in self.waiting:
            if work.sampled_before:
                work.spans.append((version, work.sampled_before))

    def sampled(self, work: Work) -> int:
        """Tokens that a running request has."""
        steps = int(self._counter - work.started_at + EPSILON_STEPS)
        return work.sampled_before + min(work.output_tokens, 1 + steps)

    def _run_to(self, now_s: float) -> None:
        elapsed_s = max(0.0, now_s - self._now_s)
        self._now_s = max(self._now_s, now_s)
        if self.is_paused or not elapsed_s:
            return
        if self._prefill is not None:
            self._prefill_left_s = max(0.0, self._prefill_left_s - elapsed_s)
            self.prefill_us += elapsed_s * 1e6
        elif self._num_running:
            steps = elapsed_s / self._step_s
            self._counter += steps
            batch, us = self._num_running, elapsed_s * 1e6
            self.generated_tokens += steps * batch
            for index, value in enumerate(
                (steps, steps * batch, us, steps * batch**2, us * batch, steps * batch)
            ):
                self.moments[index] += value

    def _start_next(self) -> None:
        if self._prefill is not None or self.is_paused or not self.waiting:
            return
        work = self.waiting[0]
        need = work.prompt_tokens + work.output_tokens
        if self._num_running >= self.max_running:
            return
        if self._num_running and self._reserved + need > self.kv_tokens:
            return
        self.waiting.popleft()
        uncached = self._uncached(work)
        work.cached_tokens = work.prompt_tokens - uncached
        self._reserved += need
        self.prefilled_tokens += uncached
        self._prefill = work
        self._prefill_left_s = self.steps.prefill_s(uncached, work.prompt_tokens)

    def _uncached(self, work: Work) -> int:
        cached = int(self.cache.match(work.blocks) * work.block_tokens)
        return work.prompt_tokens - min(cached, work.prompt_tokens - 1)

    def _end_prefill(self, done: list[Work]) -> None:
        work = self._prefill
        assert work is not None
        self._prefill = None
        self.remember(work)
        if work.first_token_s is None:
            work.first_token_s = self._now_s
        self.generated_tokens += 1
        work.started_at = self._counter
        work.ends_at = self._counter + work.output_tokens - 1
        self._sequence += 1
        heapq.heappush(self._running, (work.ends_at, self._sequence, work))
        self._num_running += 1
        self._kv_running += work.kv_tokens
        self._set_step()
        self._finish_due(done)

    def _finish_due(self, done: list[Work]) -> None:
        while self._running and self._running[0][0] <= self._counter + EPSILON_STEPS:
            work = heapq.heappop(self._running)[2]
            if work.is_gone:
                continue
            work.is_gone = True
            self._leave(work)
            done.append(work)

    def _leave(self, work: Work) -> None:
        self._num_running -= 1
        self._kv_running -= work.kv_tokens
        self._reserved -= work.prompt_tokens + work.output_tokens
        self._set_step()

    def _set_step(self) -> None:
        self._step_s = self.steps.decode_s(self._num_running, max(0.0, self._kv_running))

    def remember(self, work: Work) -> None:
        """Put a prompt into the cache; what running requests hold has precedence."""
        new_tokens = sum(
            (w.prompt_tokens - w.cached_tokens + w.output_tokens)
            for _, _, w in self._running
            if not w.is_gone
        )
        self.cache.insert(
            work.blocks, block_tokens=work.block_tokens, room_tokens=self.kv_tokens - new_tokens
        )
