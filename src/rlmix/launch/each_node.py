"""Asks every machine of a Ray cluster the same question, each in a process of its own there.

Invariant: a machine that does not answer is an answer, too, and holds up no other one; nothing
stays on the cluster.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlmix.launch.needs import TYPE_LABEL
from rlmix.launch.ray import RayCluster

CLOCK_ROUNDS = 5
"""The shortest round trip bounds the error of a clock's difference."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeAnswer:
    """What one machine said."""

    address: str
    """As Ray knows it."""
    ray_label: str | None
    """Accelerator, as Ray took it for."""
    facts: Any = None
    error: str | None = None
    """Why there are no facts."""
    skew_s: float | None = None
    """Its clock minus ours."""
    skew_error_s: float = 0.0


class _Asked:
    """The process on the other machine."""

    def ask(self, function: Callable[[Any], Any], argument: Any) -> Any:
        return function(argument)

    def clock_s(self) -> float:
        return time.time()


def ask_each_node(
    address: str,
    function: Callable[[Any], Any],
    argument: Any,
    *,
    limit_s: float,
    on_answer: Callable[[str], None] = lambda address: None,
) -> list[NodeAnswer]:
    """Call `function(argument)` on every living machine, all at once.

    Args:
        address: of the cluster, as `launch.address`.
        function: importable there; its result can be pickled.
        limit_s: for each machine's answer.
        on_answer: told the address of each machine that has answered.
    Raises:
        LaunchError: no cluster answers at `address`.
    """
    with TemporaryDirectory(prefix="rlmix-ask-") as folder:
        cluster = RayCluster.join(
            address, "rlmix-doctor", log_dir=Path(folder), place_limit_s=limit_s
        )
        try:
            return _ask(function, argument, limit_s=limit_s, on_answer=on_answer)
        finally:
            cluster.stop()


def _ask(
    function: Callable[[Any], Any],
    argument: Any,
    *,
    limit_s: float,
    on_answer: Callable[[str], None],
) -> list[NodeAnswer]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node for node in ray.nodes() if node["Alive"]]
    asked: Any = ray.remote(_Asked)
    actors = [
        asked.options(
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        ).remote()
        for node in nodes
    ]
    answers = [actor.ask.remote(function, argument) for actor in actors]
    asked_of = {
        ref: str(node["NodeManagerAddress"]) for node, ref in zip(nodes, answers, strict=True)
    }
    waiting, deadline_s = answers, time.monotonic() + limit_s
    while waiting and (left_s := deadline_s - time.monotonic()) > 0:
        done, waiting = ray.wait(waiting, num_returns=1, timeout=left_s)
        for ref in done:
            on_answer(asked_of[ref])
    return [
        _answer(node, actor, ref, limit_s=limit_s)
        for node, actor, ref in zip(nodes, actors, answers, strict=True)
    ]


def _answer(node: dict[str, Any], actor: Any, ref: Any, *, limit_s: float) -> NodeAnswer:
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    address = str(node["NodeManagerAddress"])
    label = (node.get("Labels") or {}).get(TYPE_LABEL)
    try:
        facts = ray.get(ref, timeout=0.1)
        skew_s, error_s = _skew(lambda: float(ray.get(actor.clock_s.remote(), timeout=limit_s)))
    except GetTimeoutError:
        return NodeAnswer(address=address, ray_label=label, error=f"no answer in {limit_s:g} s")
    except RayError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = lines[-1] if lines else type(error).__name__
        return NodeAnswer(address=address, ray_label=label, error=why)
    return NodeAnswer(
        address=address, ray_label=label, facts=facts, skew_s=skew_s, skew_error_s=error_s
    )


def _skew(
    remote_s: Callable[[], float], *, here_s: Callable[[], float] = time.time
) -> tuple[float, float]:
    """(the other clock minus ours, how far that may be wrong), from the shortest round trip."""
    best = (0.0, float("inf"))
    for _ in range(CLOCK_ROUNDS):
        before_s = here_s()
        there_s = remote_s()
        after_s = here_s()
        error_s = (after_s - before_s) / 2
        if error_s < best[1]:
            best = (there_s - (before_s + after_s) / 2, error_s)
    return best
