"""The router's own numbers, in Prometheus text form."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rlmix.router.registry import Registry
from rlmix.router.states import Health
from rlmix.router.upstream import Upstream

PREFIX = "rlmix_router"


@dataclass(slots=True)
class Counters:
    """Counted since the start; none is ever reset."""

    responses: dict[int, int] = field(default_factory=dict)
    """HTTP status -> answers to requests of sessions."""
    lost_requests: int = 0
    """Requests whose replica died under them; each was sent again or answered 503."""
    rehomed: int = 0
    """Moves of a session to another replica."""
    affinity_breaks: int = 0
    """Moves away from a living replica, because another would be done so much sooner."""
    view_changes: int = 0
    """Moves to another weight view; 0 under `view=strict`."""
    forwarded: int = 0
    """Requests passed on to the shard that owns their session."""

    def count_response(self, status: int) -> None:
        self.responses[status] = self.responses.get(status, 0) + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TableCounts:
    """Of the session table and the forwarder."""

    sessions: int
    expired: int
    spilled: int
    reconnects: int


def _line(name: str, value: float, **labels: str) -> str:
    text = ",".join(f'{key}="{_escape(label)}"' for key, label in labels.items())
    return f"{PREFIX}_{name}{{{text}}} {value:g}" if text else f"{PREFIX}_{name} {value:g}"


def _escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


Value = Callable[[Upstream], float]

PER_REPLICA: tuple[tuple[str, str, str, Value], ...] = (
    ("in_flight", "gauge", "Requests under way.", lambda u: u.in_flight),
    ("replica_sessions", "gauge", "Sessions that live there.", lambda u: u.num_sessions),
    ("others", "gauge", "Requests there that are not this process's.", lambda u: u.others),
    ("reserved_tokens", "gauge", "KV tokens of the requests under way.",
     lambda u: u.reserved_tokens),
    ("version", "gauge", "Weight version served.", lambda u: u.version),
    ("speed", "gauge", "Relative speed at full batch in use.", lambda u: u.speed),
    ("step_base_seconds", "gauge", "Of a decoding step, fitted.", lambda u: u.model.base_s),
    ("step_request_seconds", "gauge", "Of a request in a step, fitted.",
     lambda u: u.model.request_s),
    ("prefill_token_seconds", "gauge", "Of a prefilled token, fitted.",
     lambda u: u.model.prefill_token_s),
    ("turns_total", "counter", "Turns answered.", lambda u: u.turns),
    ("turn_seconds_total", "counter", "Time of the turns answered.", lambda u: u.turn_s_sum),
    ("prompt_tokens_total", "counter", "Prompt tokens of the turns answered.",
     lambda u: u.prompt_tokens),
    ("cached_tokens_total", "counter", "Of those, taken from the replica's prefix cache.",
     lambda u: u.cached_tokens),
    ("output_tokens_total", "counter", "Tokens sampled there.", lambda u: u.output_tokens),
    ("faults_total", "counter", "Requests lost there.", lambda u: u.faults),
    ("errors_total", "counter", "Error answers and timeouts there.", lambda u: u.errors),
)  # fmt: skip

PER_POOL: tuple[tuple[str, str, str, Value], ...] = (
    ("pool_ready", "gauge", "Replicas that take new sessions.",
     lambda u: u.state.takes_new_sessions and u.health is Health.HEALTHY),
    ("pool_sessions", "gauge", "Sessions that live in the pool.", lambda u: u.num_sessions),
    ("pool_in_flight", "gauge", "Requests under way in the pool.", lambda u: u.in_flight),
    ("pool_turns_total", "counter", "Turns that the pool answered.", lambda u: u.turns),
    ("pool_output_tokens_total", "counter", "Tokens sampled in the pool.",
     lambda u: u.output_tokens),
    ("pool_faults_total", "counter", "Requests lost in the pool.", lambda u: u.faults),
)  # fmt: skip


def metrics_text(registry: Registry, counters: Counters, table: TableCounts) -> str:
    """One scrape."""
    lines: list[str] = []

    def block(name: str, kind: str, text: str, samples: Iterable[str]) -> None:
        lines.append(f"# HELP {PREFIX}_{name} {text}")
        lines.append(f"# TYPE {PREFIX}_{name} {kind}")
        lines.extend(samples)

    def single(name: str, kind: str, text: str, value: float) -> None:
        block(name, kind, text, [_line(name, value)])

    responses = [
        _line("responses_total", count, status=str(status))
        for status, count in sorted(counters.responses.items())
    ]
    block("responses_total", "counter", "Answers to sessions by HTTP status.", responses)
    single("rehomed_total", "counter", "Session moves to another replica.", counters.rehomed)
    single("affinity_breaks_total", "counter", "Moves away from a living replica.",
           counters.affinity_breaks)  # fmt: skip
    single("view_changes_total", "counter", "Moves to another weight view.", counters.view_changes)
    single("lost_requests_total", "counter", "Requests whose replica died.", counters.lost_requests)
    single("reconnects_total", "counter", "Resends after a broken connection.", table.reconnects)
    single("forwarded_total", "counter", "Requests passed to another shard.", counters.forwarded)
    single("expired_sessions_total", "counter", "Sessions forgotten while idle.", table.expired)
    single("spilled_sessions_total", "counter", "Sessions moved out of memory.", table.spilled)
    single("sessions", "gauge", "Open sessions in memory.", table.sessions)
    single("waiting", "gauge", "Requests that wait for a place.", registry.num_waiting)
    single("busy_frac", "gauge", "Share of session time spent in the model.", registry.busy_frac)
    single("cpu_seconds_total", "counter", "CPU time of this process.", time.process_time())
    upstreams = list(registry.upstreams.values())
    for name, kind, text, value in PER_REPLICA:
        samples = [_line(name, float(value(u)), pool=u.pool, replica=u.name) for u in upstreams]
        block(name, kind, text, samples)
    pools = sorted({u.pool for u in upstreams})
    for name, kind, text, value in PER_POOL:
        sums = [
            _line(name, float(sum(value(u) for u in upstreams if u.pool == pool)), pool=pool)
            for pool in pools
        ]
        block(name, kind, text, sums)
    states = [
        _line("state", 1, pool=u.pool, replica=u.name, state=u.state.value) for u in upstreams
    ]
    block("state", "gauge", "What the fleet says of a replica, as a label.", states)
    healths = [
        _line("health", 1, pool=u.pool, replica=u.name, health=u.health.value) for u in upstreams
    ]
    block("health", "gauge", "What the router has seen of a replica, as a label.", healths)
    return "\n".join(lines) + "\n"
