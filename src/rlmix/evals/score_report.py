"""`report.md`, `report.json`, `report.html` and prediction files of an evaluation: the number with
everything that it depends on."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlmix.evals.attempts import diff_path
from rlmix.evals.ledger import Ledger
from rlmix.evals.pass_at_k import Estimate
from rlmix.evals.probes import Probe
from rlmix.evals.score import Score, document
from rlmix.observe.jsonl import write_atomically

REFERENCE_ROWS = (
    ("SWE-bench Pro V2, HARD-51, pass@4", "about 65 to 75 %", "the reference study, 35B policy"),
    ("SWE-bench Pro V2, all 642, best known", "up to about 94 %", "the reference study"),
)
"""Printed beside a result on those data, never beside another one."""
REFERENCE_DATA = "swe_bench_pro_v2"


def write_score_report(
    ledger: Ledger,
    result: Score,
    facts: Mapping[str, Any],
    *,
    probes: Mapping[str, Probe] | None = None,
) -> dict[str, Any]:
    """Write the reports and return the JSON document."""
    from rlmix.evals.score_page import page

    found = {**document(result), "probes": probed(probes or {}), "facts": dict(facts)}
    folder = ledger.folder
    text = json.dumps(plain(found), indent=1) + "\n"
    write_atomically(folder / "report.json", text.encode())
    write_atomically(folder / "report.md", markdown(result, found).encode())
    write_atomically(folder / "report.html", page(found).encode())
    rows = predictions(ledger)
    write_atomically(folder / "predictions.json", _json(rows))
    for number in sorted({number for _, number in ledger.attempts}):
        part = [row for row in rows if row["prefix"] == f"attempt{number}"]
        write_atomically(folder / f"predictions.attempt{number}.json", _json(part))
    return found


def add_comparison(
    folder: Path, result: Score, found: Mapping[str, Any], against: Mapping[str, Any]
) -> None:
    """Write a comparison into the reports of the second evaluation."""
    from rlmix.evals.comparison import sentence
    from rlmix.evals.score_page import page

    both = {**found, "against": against}
    text = markdown(result, found) + f"\n## {against['first']} to {against['second']}\n\n"
    for name, key in (("pass@1", "pass_at_1"), (f"pass@{against['k']}", "pass_at_k")):
        if against[key]:
            text += f"* {sentence(name, against[key])}\n"
    write_atomically(folder / "report.md", text.encode())
    write_atomically(folder / "report.html", page(both).encode())
    write_atomically(folder / "report.json", (json.dumps(plain(both), indent=1) + "\n").encode())


def _json(rows: list[dict[str, str]]) -> bytes:
    return (json.dumps(rows, indent=1) + "\n").encode()


def predictions(ledger: Ledger) -> list[dict[str, str]]:
    """All diffs in the form that the public SWE-bench Pro evaluator takes: a list of objects with
    `instance_id`, `patch` and `prefix` (one prefix per attempt). Bytes that are no UTF-8 stand as
    lone surrogates, so that `agents.read_predictions` gives the same bytes."""
    rows = []
    for task_id, number in sorted(ledger.attempts):
        path = diff_path(ledger.folder, task_id, number)
        diff = path.read_bytes().decode("utf-8", "surrogateescape") if path.is_file() else ""
        rows.append({"instance_id": task_id, "patch": diff, "prefix": f"attempt{number}"})
    return rows


def probed(probes: Mapping[str, Probe]) -> dict[str, Any]:
    """What sandboxes let agents see, over all tasks."""
    found = probes.values()
    return {
        "tasks": len(probes),
        "with_network": sum(bool(one.network) for one in found),
        "with_history": sum(any(one.history.values()) for one in found),
        "failed": sum(bool(one.fault) for one in found),
        "not_clean": sorted(one.task_id for one in found if not one.is_clean)[:20],
    }


def has_references(found: Mapping[str, Any]) -> bool:
    return str(found["facts"].get("benchmark", "")).startswith(REFERENCE_DATA)


def markdown(result: Score, found: Mapping[str, Any]) -> str:
    facts = found["facts"]
    lines = [
        f"# {title(facts)}",
        "",
        "| | value | 95 % interval over tasks | interval | tasks | void as failed |",
        "| --- | --- | --- | --- | --- | --- |",
        _line("pass@1", result.pass_at_1, result.pass_at_1_void_failed),
        *_at_k(result),
        "",
        f"{len(result.tasks)} tasks, {result.num_attempts} attempts of {result.n} each; void "
        f"{result.num_void}, tasks with fewer than {result.k} valid attempts "
        f"{result.num_dropped}, tests timed out {result.num_timed_out}, empty diffs "
        f"{result.num_empty}, diffs that did not apply {result.num_patch_failed}.",
        "",
        engine_line(facts),
        "",
        probe_line(found["probes"]),
        "",
    ]
    if has_references(found):
        lines += ["| for comparison | value | source |", "| --- | --- | --- |"]
        lines += [f"| {name} | {value} | {source} |" for name, value, source in REFERENCE_ROWS]
        lines += [""]
    for name, table in (("repository", result.by_repository), ("language", result.by_language)):
        lines += [f"| {name} | tasks | pass@1 | any attempt | void |", "| --- " * 5 + "|"]
        lines += [
            f"| {group} | {row['tasks']:.0f} | {row['pass_at_1']:.3f} | {row['any']:.3f} | "
            f"{row['void']:.0f} |"
            for group, row in table.items()
        ]
        lines += [""]
    lines += ["| ended because | attempts |", "| --- | --- |"]
    lines += [f"| {name} | {count} |" for name, count in found["stop_reasons"].items()]
    lines += ["", "## What this number depends on", "", "| | |", "| --- | --- |"]
    lines += [f"| {name} | {shown(value)} |" for name, value in facts.items()]
    return "\n".join(lines) + "\n"


def _at_k(result: Score) -> list[str]:
    """With k = 1 it would be the row above."""
    if result.k == 1:
        return []
    return [_line(f"pass@{result.k}", result.pass_at_k, result.pass_at_k_void_failed)]


def title(facts: Mapping[str, Any]) -> str:
    policy = f" {facts['policy']}" if facts.get("policy_sha256") else ""
    return f"{facts.get('benchmark', 'evaluation')}, agent {facts.get('agent', '')}{policy}"


def engine_line(facts: Mapping[str, Any]) -> str:
    """Who answered, and how full it was: beside the score, because time limits tie them."""
    engine = facts.get("engine") or {}
    said = engine.get("saturation")
    if said and said.get("looks"):
        return (
            f"Engines: {engine['replicas']} of {engine['engine']}, weights {engine['weights']}, KV "
            f"{engine['kv']}; {said['mean_busy_frac']:.0%} of {said['places']} places busy on "
            f"average, {said['peak_busy_frac']:.0%} at most, full "
            f"{said['full_frac']:.0%} of the time, {said['mean_queued']:.1f} requests waiting."
        )
    if engine.get("engine") == "endpoint":
        return (
            f"Endpoint: model {engine['model']}, {engine['requests']} requests, "
            f"{engine['busy_frac']:.1%} of them again after it was busy, "
            f"{engine['mean_answer_s']:.2f} s each."
        )
    return "Engines: none; this agent samples nothing."


def probe_line(found: Mapping[str, Any]) -> str:
    if not found["tasks"]:
        return "Probes: none; nothing of this agent ran beside a repository."
    names = f" ({', '.join(found['not_clean'])})" if found["not_clean"] else ""
    return (
        f"Probes of {found['tasks']} tasks: network in {found['with_network']}, foreign history in "
        f"{found['with_history']}, not looked at {found['failed']}{names}."
    )


def shown(value: Any) -> str:
    """A fact as text; a long list by its length and first entries."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {shown(inner)}" for name, inner in value.items())
    if isinstance(value, list | tuple):
        more = f" and {len(value) - 5} more" if len(value) > 5 else ""
        return "; ".join(map(str, value[:5])) + more if value else "none"
    return str(value).replace("|", "\\|").replace("\n", " ")


def _line(name: str, estimate: Estimate, void_failed: Estimate) -> str:
    return (
        f"| {name} | {estimate.value:.3f} | {estimate.low:.3f} to {estimate.high:.3f} | "
        f"{estimate.method} | {estimate.num_tasks} | {void_failed.value:.3f} |"
    )


def plain(value: Any) -> Any:
    """NaN is no JSON; it becomes null."""
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return None if isinstance(value, float) and value != value else value
