"""Two evaluations on the same tasks: the difference, its interval, and who won which task.

Invariant: pairs are tasks that have enough valid attempts in both; tasks that have not are counted
and never a 0.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rlmix.core.errors import ConfigError
from rlmix.evals.facts import COMPARABLE
from rlmix.evals.pass_at_k import Comparison, compare, pass_at_k

Row = Mapping[str, Any]


def compare_reports(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Second minus first, for pass@1 and pass@k.

    Args:
        first, second: documents of `report.json`.

    Raises:
        ConfigError: they did not answer the same question about their agents.
    """
    check_comparable(first["facts"], second["facts"])
    k = min(int(first["k"]), int(second["k"]))
    rows = {row["task_id"]: row for row in first["task_scores"]}
    pairs = [(rows[row["task_id"]], row) for row in second["task_scores"] if row["task_id"] in rows]
    return {
        "first": _who(first),
        "second": _who(second),
        "pass_at_1": _at(pairs, 1),
        "pass_at_k": _at(pairs, k),
        "k": k,
    }


def check_comparable(facts: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Refuse two evaluations whose difference is not one of their agents.

    With other numbers of attempts "solved by any" is easier for one of them, so that the tasks
    gained and lost say nothing.

    Raises:
        ConfigError: they differ in tasks, limits, prompt or attempts a task.
    """
    differ = [name for name in COMPARABLE if facts.get(name) != others.get(name)]
    if "prompt_sha256" in differ and facts["agent"] != others["agent"]:
        differ.remove("prompt_sha256")  # Agents of different kinds are told in different ways.
    if differ:
        raise ConfigError(
            f"--against: the two evaluations differ in {', '.join(differ)}, so their difference is "
            "not one of their agents; evaluate both on the same tasks, limits and eval.n"
        )


def _who(report: Mapping[str, Any]) -> str:
    facts = report["facts"]
    return f"{facts['agent']} {facts['policy']}" if facts.get("policy_sha256") else facts["agent"]


def _at(pairs: Sequence[tuple[Row, Row]], k: int) -> dict[str, Any] | None:
    enough = [(a, b) for a, b in pairs if min(a["valid"], b["valid"]) >= k]
    if not enough:
        return None
    first = [pass_at_k(a["valid"], a["passed"], k) for a, _ in enough]
    second = [pass_at_k(b["valid"], b["passed"], k) for _, b in enough]
    found = compare(first, second)
    return document_of(found) | {
        "first": sum(first) / len(first),
        "second": sum(second) / len(second),
        "dropped": len(pairs) - len(enough),
    }


def document_of(found: Comparison) -> dict[str, Any]:
    return {
        "difference": found.difference,
        "ci95": [found.low, found.high],
        "ci95_bootstrap": [found.bootstrap_low, found.bootstrap_high],
        "mcnemar_p": found.p_value,
        "gained": found.num_gained,
        "lost": found.num_lost,
        "tasks": found.num_tasks,
        "is_above_zero": found.is_above_zero,
    }


def sentence(at: str, found: Mapping[str, Any]) -> str:
    """The comparison in one line."""
    low, high = found["ci95"]
    return (
        f"{at}: {found['first']:.3f} to {found['second']:.3f}, difference "
        f"{found['difference']:+.3f} ({low:+.3f} to {high:+.3f}), gained {found['gained']}, lost "
        f"{found['lost']} of {found['tasks']} tasks, exact McNemar p = {found['mcnemar_p']:.2g}"
    )
