"""`report.md`, `report.json` and `predictions.json` of an evaluation: the number with everything
that it depends on."""

import json
from collections.abc import Mapping
from typing import Any

from rlmix.evals.attempts import diff_path
from rlmix.evals.ledger import Ledger
from rlmix.evals.pass_at_k import Estimate
from rlmix.evals.score import Score, document
from rlmix.observe.jsonl import write_atomically

REFERENCE_ROWS = (
    ("SWE-bench Pro V2, HARD-51, pass@4", "about 65 to 75 %", "the reference study, 35B policy"),
    ("SWE-bench Pro V2, all 642, best known", "up to about 94 %", "the reference study"),
)
"""Printed beside a result on those data, never beside another one."""


def write_score_report(
    ledger: Ledger, result: Score, facts: Mapping[str, Any], *, is_reference_data: bool
) -> dict[str, Any]:
    """Write the three files and return the JSON document."""
    found = {**document(result), "facts": dict(facts)}
    folder = ledger.folder
    text = json.dumps(_plain(found), indent=1) + "\n"
    write_atomically(folder / "report.json", text.encode())
    lines = markdown(result, facts, is_reference_data=is_reference_data)
    write_atomically(folder / "report.md", lines.encode())
    write_atomically(folder / "predictions.json", predictions(ledger).encode())
    return found


def predictions(ledger: Ledger) -> str:
    """All diffs in the form that the public SWE-bench Pro evaluator takes: a list of objects with
    `instance_id`, `patch` and `prefix` (one prefix per attempt). Bytes that are no UTF-8 stand as
    lone surrogates, so that `agents.read_predictions` gives the same bytes."""
    rows = []
    for task_id, number in sorted(ledger.attempts):
        path = diff_path(ledger.folder, task_id, number)
        diff = path.read_bytes().decode("utf-8", "surrogateescape") if path.is_file() else ""
        rows.append({"instance_id": task_id, "patch": diff, "prefix": f"attempt{number}"})
    return json.dumps(rows, indent=1) + "\n"


def markdown(result: Score, facts: Mapping[str, Any], *, is_reference_data: bool) -> str:
    lines = [
        f"# {facts.get('benchmark', 'evaluation')}, agent {facts.get('agent', '')}",
        "",
        "| | value | 95 % interval over tasks | tasks | void as failed |",
        "| --- | --- | --- | --- | --- |",
        _line("pass@1", result.pass_at_1, result.pass_at_1_void_failed),
        _line(f"pass@{result.k}", result.pass_at_k, result.pass_at_k_void_failed),
        "",
        f"{len(result.tasks)} tasks, {result.num_attempts} attempts of {result.n} each; void "
        f"{result.num_void}, tasks with fewer than {result.k} valid attempts "
        f"{result.num_dropped}, timed out {result.num_timed_out}, empty diffs "
        f"{result.num_empty}, diffs that did not apply {result.num_patch_failed}.",
        "",
    ]
    if is_reference_data:
        lines += ["| for comparison | value | source |", "| --- | --- | --- |"]
        lines += [f"| {name} | {value} | {source} |" for name, value, source in REFERENCE_ROWS]
        lines += [""]
    for title, table in (("repository", result.by_repository), ("language", result.by_language)):
        lines += [f"| {title} | tasks | pass@1 | any attempt | void |", "| --- " * 5 + "|"]
        lines += [
            f"| {name} | {row['tasks']:.0f} | {row['pass_at_1']:.3f} | {row['any']:.3f} | "
            f"{row['void']:.0f} |"
            for name, row in table.items()
        ]
        lines += [""]
    lines += ["## What this number depends on", "", "| | |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in facts.items()]
    return "\n".join(lines) + "\n"


def _line(name: str, estimate: Estimate, void_failed: Estimate) -> str:
    return (
        f"| {name} | {estimate.value:.3f} | {estimate.low:.3f} to {estimate.high:.3f} | "
        f"{estimate.num_tasks} | {void_failed.value:.3f} |"
    )


def _plain(value: Any) -> Any:
    """NaN is no JSON; it becomes null."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and value != value else value
