"""Two evaluations compared, and what their reports say."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlmix.core.errors import ConfigError
from rlmix.evals.comparison import compare_reports, sentence
from rlmix.evals.facts import read_report
from rlmix.evals.saturation import Load, saturation
from rlmix.evals.score_page import page
from rlmix.evals.score_report import engine_line, probed

FACTS = {
    "benchmark": "mini", "checksum": "c", "task_ids_sha256": "i", "agent_limit_s": "60",
    "prompt_sha256": "p", "agent": "policy", "policy": "r:0", "policy_sha256": "d",
}  # fmt: skip


def report(passed: list[int], *, valid: int = 4, **facts: Any) -> dict[str, Any]:
    rows = [
        {"task_id": f"t{number}", "valid": valid, "passed": count, "void": 0}
        for number, count in enumerate(passed)
    ]
    return {"k": 4, "task_scores": rows, "facts": {**FACTS, **facts}}


def test_two_policies_are_compared_task_by_task() -> None:
    """pass@1 rises by (1 + 2 + 0 - 1 + 0) / 4 / 5; pass@4 gains t1 and loses none."""
    found = compare_reports(report([1, 0, 4, 2, 0]), report([2, 2, 4, 1, 0], policy="r:20"))
    one, four = found["pass_at_1"], found["pass_at_k"]
    assert (found["first"], found["second"]) == ("policy r:0", "policy r:20")
    assert math.isclose(one["difference"], 2 / 4 / 5)
    assert (four["gained"], four["lost"], four["tasks"]) == (1, 0, 5)
    assert math.isclose(four["difference"], 1 / 5)
    assert four["mcnemar_p"] == 1.0
    assert one["ci95"][0] < one["difference"] < one["ci95"][1]
    assert "gained 1, lost 0 of 5 tasks" in sentence("pass@4", four)


def test_tasks_with_too_few_valid_attempts_leave_the_pair_and_are_counted() -> None:
    first, second = report([1, 1]), report([1, 1])
    second["task_scores"][1] |= {"valid": 3, "void": 1}
    found = compare_reports(first, second)
    assert (found["pass_at_k"]["tasks"], found["pass_at_k"]["dropped"]) == (1, 1)
    assert found["pass_at_1"]["tasks"] == 2
    second["task_scores"][0] |= {"valid": 0, "void": 4}
    assert compare_reports(first, second)["pass_at_k"] is None


def test_other_tasks_or_limits_are_not_compared() -> None:
    with pytest.raises(ConfigError, match="differ in checksum, agent_limit_s"):
        compare_reports(report([1]), report([1], checksum="x", agent_limit_s="30"))
    # Agents of other kinds are told in another way; policies are not.
    compare_reports(report([1], agent="gold"), report([1], prompt_sha256="x"))
    with pytest.raises(ConfigError, match="differ in prompt_sha256"):
        compare_reports(report([1]), report([1], prompt_sha256="x"))


def test_what_is_no_report_is_refused(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("{}")
    for place in (tmp_path, tmp_path / "report.json", tmp_path / "nothing"):
        with pytest.raises(ConfigError, match="no report of an evaluation"):
            read_report(str(place))


def test_saturation_is_told_beside_the_score() -> None:
    """Places 8: busy 4, 8 and 8 of them, the last with a queue."""
    looks = [
        Load(running=running, queued=queued, tokens_per_s=100.0)
        for running, queued in ((4, 0), (8, 0), (8, 3))
    ]
    found = saturation(looks, places=8)
    assert found["mean_busy_frac"] == round(20 / 24, 4)
    assert (found["peak_busy_frac"], found["mean_queued"], found["full_frac"]) == (1.0, 1.0, 0.6667)
    engine = {"engine": "embedded", "replicas": 2, "weights": "bf16", "kv": "bf16"}
    line = engine_line({"engine": {**engine, "saturation": found}})
    assert (
        "83% of 8 places busy on average, 100% at most, full 67% of the time, 1.0 requests waiting"
        in line
    )
    assert saturation([], places=8) == {"places": 8, "looks": 0}


def test_gold_and_nothing_are_compared_by_command_and_shown_on_a_page(tmp_path: Path) -> None:
    ids = tmp_path / "two.txt"
    ids.write_text("python-interval-merge\nshell-count-words\n")

    def ask(name: str, *args: str) -> dict[str, Any]:
        command = [
            "eval", "swe-bench-pro", f"run.dir={tmp_path}", f"run.name={name}", "eval.n=1",
            "eval.k=1", f"eval.subset={ids}", *args, "--json",
        ]  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", "from rlmix.cli import main; main()", *command],
            capture_output=True,
            text=True,
            timeout=200,
        )
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    ask("empty", "agent=empty")
    found = ask("gold", "agent=gold", "--against", str(tmp_path / "empty"))
    assert found["against"]["pass_at_1"]["difference"] == 1.0
    assert (found["against"]["pass_at_1"]["gained"], found["against"]["first"]) == (2, "empty")
    html = (tmp_path / "gold/report.html").read_text()
    assert "<script" not in html
    assert "http" not in html.replace("http-equiv", "")
    for text in ("prompt_sha256", "subset_sha256", "version_rlmix", "wilson", "gained 2, lost 0"):
        assert text in html, text
    assert "gained 2, lost 0" in (tmp_path / "gold/report.md").read_text()
    rows = json.loads((tmp_path / "gold/predictions.attempt0.json").read_text())
    assert [row["prefix"] for row in rows] == ["attempt0"] * 2
    assert page({**found, "probes": probed({})})


def test_reference_rows_stand_beside_their_data_only() -> None:
    for name, is_shown in (("swe_bench_pro_v2/hard51_ids", True), ("mini", False)):
        document = {
            "pass_at_1": 0.5, "pass_at_k": 0.5, "k": 4, "tasks": 1, "attempts": 1, "void": 0,
            "timed_out": 0, "empty": 0, "patch_failed": 0, "ci95": [0, 1], "ci95_k": [0, 1],
            "intervals": {
                name: {"method": "wilson", "tasks": 1} for name in ("pass_at_1", "pass_at_k")
            },
            "void_as_failed": {"pass_at_1": 0.5, "pass_at_k": 0.5}, "by_repository": {},
            "by_language": {}, "stop_reasons": {}, "task_scores": [], "probes": probed({}),
            "facts": {"benchmark": name},
        }  # fmt: skip
        assert ("HARD-51, pass@4" in page(document)) == is_shown
        assert ("about 65 to 75 %" in page(document)) == is_shown
