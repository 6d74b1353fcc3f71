"""The router's own numbers, in Prometheus text form."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from rlmix.router.registry import Registry

PREFIX = "rlmix_router"


@dataclass(slots=True)
class Counters:
    """Counted since the start; none is ever reset."""

    responses: dict[int, int] = field(default_factory=dict)
    """HTTP status -> answers to `/generate`."""
    lost_requests: int = 0
    """Requests whose replica died under them; each was sent again or answered 503."""
    rehomed: int = 0
    """Moves of a session to another replica."""
    reconnects: int = 0
    """Requests sent again to the same replica after a broken connection."""

    def count_response(self, status: int) -> None:
        self.responses[status] = self.responses.get(status, 0) + 1


def _line(name: str, value: float, **labels: str) -> str:
    text = ",".join(f'{key}="{_escape(label)}"' for key, label in labels.items())
    return f"{PREFIX}_{name}{{{text}}} {value:g}" if text else f"{PREFIX}_{name} {value:g}"


def _escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def metrics_text(
    registry: Registry, counters: Counters, num_sessions: int, num_expired: int
) -> str:
    """One scrape."""
    lines: list[str] = []

    def block(name: str, kind: str, text: str, samples: Iterable[str]) -> None:
        lines.append(f"# HELP {PREFIX}_{name} {text}")
        lines.append(f"# TYPE {PREFIX}_{name} {kind}")
        lines.extend(samples)

    def single(name: str, kind: str, text: str, value: float) -> None:
        block(name, kind, text, [_line(name, value)])

    def per_replica(name: str, kind: str, text: str, attribute: str) -> None:
        samples = [
            _line(name, float(getattr(u, attribute)), pool=u.pool, replica=u.name)
            for u in registry.upstreams.values()
        ]
        block(name, kind, text, samples)

    responses = [
        _line("responses_total", count, status=str(status))
        for status, count in sorted(counters.responses.items())
    ]
    block("responses_total", "counter", "Answers to /generate by HTTP status.", responses)
    single("rehomed_total", "counter", "Session moves to another replica.", counters.rehomed)
    single("lost_requests_total", "counter", "Requests whose replica died.", counters.lost_requests)
    single("reconnects_total", "counter", "Resends after a broken connection.", counters.reconnects)
    single("expired_sessions_total", "counter", "Sessions forgotten while idle.", num_expired)
    single("sessions", "gauge", "Open sessions.", num_sessions)
    single("waiting", "gauge", "Requests that wait for a place.", registry.num_waiting)
    single("busy_frac", "gauge", "Share of session time spent in the model.", registry.busy_frac)
    single("cpu_seconds_total", "counter", "CPU time of this process.", time.process_time())
    per_replica("in_flight", "gauge", "Requests under way.", "in_flight")
    per_replica("replica_sessions", "gauge", "Sessions that live there.", "num_sessions")
    per_replica("version", "gauge", "Weight version served.", "version")
    per_replica("speed", "gauge", "Relative speed in use.", "speed")
    per_replica("turns_total", "counter", "Turns answered.", "turns")
    per_replica("turn_seconds_total", "counter", "Time of the turns answered.", "turn_s_sum")
    per_replica("faults_total", "counter", "Requests lost there.", "faults")
    states = [
        _line("state", 1, pool=u.pool, replica=u.name, state=u.state.value)
        for u in registry.upstreams.values()
    ]
    block("state", "gauge", "State of a replica, as a label.", states)
    return "\n".join(lines) + "\n"
