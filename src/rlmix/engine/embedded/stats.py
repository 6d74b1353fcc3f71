"""Counters of an engine: what `/v1/loads` and `/metrics` report."""

import time
from collections import deque

WINDOW_S = 5.0
"""Throughput is that of the last so many seconds."""
SAMPLE_S = 0.25


class EngineStats:
    """Sums since the start. Pure bookkeeping: the scheduler pushes, the server reads."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_aborted = 0
        self.num_retracted = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.prefill_tokens = 0
        self.prefill_us = 0
        self.decode_steps = 0
        self.decode_rows = 0
        self.decode_us = 0
        self.decode_rows_squared = 0
        self.decode_rows_us = 0
        self.decode_tokens = 0
        self.first_token_s = 0.0
        self.latency_s = 0.0
        self.num_updates = 0
        self.update_s = 0.0
        self._samples: deque[tuple[float, int]] = deque()

    @property
    def decode_moments(self) -> tuple[int, int, int, int, int, int]:
        """Steps, sum of batch, of microseconds, of batch squared, of batch times microseconds, and
        of tokens, over pure decode steps: enough to fit step time against batch."""
        return (
            self.decode_steps,
            self.decode_rows,
            self.decode_us,
            self.decode_rows_squared,
            self.decode_rows_us,
            self.decode_tokens,
        )

    def add_step(self, *, num_decoding: int, num_prefill: int, num_sampled: int, us: int) -> None:
        """Count one step of `us` microseconds."""
        self.generated_tokens += num_sampled
        if num_prefill:
            self.prefill_tokens += num_prefill
            self.prefill_us += us
        else:
            self.decode_steps += 1
            self.decode_rows += num_decoding
            self.decode_us += us
            self.decode_rows_squared += num_decoding * num_decoding
            self.decode_rows_us += num_decoding * us
            self.decode_tokens += num_sampled
        now_s = time.monotonic()
        if not self._samples or now_s - self._samples[-1][0] >= SAMPLE_S:
            self._samples.append((now_s, self.generated_tokens))
            while now_s - self._samples[0][0] > WINDOW_S:
                self._samples.popleft()

    def throughput(self) -> float:
        """Output tokens per second over the last WINDOW_S."""
        now_s = time.monotonic()
        recent = [sample for sample in self._samples if now_s - sample[0] <= WINDOW_S]
        if not recent:
            return 0.0
        start_s, tokens = recent[0]
        return (self.generated_tokens - tokens) / max(now_s - start_s, SAMPLE_S)

    @property
    def cache_hit_frac(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
