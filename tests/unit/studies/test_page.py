"""The study's page says what its records say."""

import subprocess
import sys
from pathlib import Path

import pytest

from rlmix.studies import agentic_report
from rlmix.studies.agentic_findings import lost
from rlmix.studies.records import read_records, those_with, values_of
from rlmix.studies.token_findings import distance_table
from rlmix.studies.token_report import WARNINGS, judged

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def records():
    return read_records(ROOT / "docs" / "studies" / "data" / "token")


def verdicts(records, **wanted):
    return {judged(record).verdict for record in those_with(records, **wanted)}


def test_tables_and_figures_of_the_page_are_what_the_records_give() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/study.py", "report", "--check"],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_the_text_says_of_arms_is_in_the_records(records) -> None:
    stale = [r for r in records if r["refresh_every"] == 64]
    fresh = [r for r in records if r["refresh_every"] == 1]
    assert len(records) == 135
    assert verdicts(stale, arm="grpo") == {"collapsed"}
    for arm in ("tis", "mis_sc_full", "mis_sc"):
        assert verdicts(stale, arm=arm) == {"stable"}
    assert verdicts(fresh) == {"stable"}
    (decayed,) = [r for r in those_with(stale, arm="mis") if judged(r).verdict != "stable"]
    assert (decayed["fleet"], judged(decayed).verdict) == ("exact", "decayed")
    for fleet in ("exact", "bf16", "nvfp4", "mixed"):
        assert "decayed" in verdicts(stale, arm="sc", fleet=fleet)
    assert verdicts(stale, arm="sc") == {"stable", "decayed"}
    assert verdicts(stale, arm="grpo_topp") == {"collapsed", "decayed"}


def test_what_the_text_says_of_warnings_and_fleets_is_in_the_records(records) -> None:
    for record in records:
        crossed = [
            key
            for key, (_, line) in WARNINGS.items()
            if record["curves"].get(key) and max(values_of(record, key)) > line
        ]
        if judged(record).verdict == "collapsed":
            measured = [key for key in WARNINGS if record["curves"].get(key)]
            assert crossed == measured
        if judged(record).verdict == "stable" and crossed:
            assert record["arm"] == "sc"
    (full,) = [row for row in distance_table(records).splitlines() if "SC + MIS + top-p" in row]
    assert full.count("close") == 3


def highest_k3(record) -> float:
    return max(values_of(record, "mismatch/k3_kl"))


def test_what_the_text_says_of_the_agentic_runs_is_in_the_records() -> None:
    records = read_records(ROOT / "docs" / "studies" / "data" / "agentic")
    assert len(records) == 24
    grpo = those_with(records, arm="grpo")
    corrected = [r for r in records if r["arm"] != "grpo"]
    ends = {(r["fleet"], r["seed"]): r["eval"]["trained"] for r in grpo if lost(r)}
    assert ends == {("bf16", 1): 0.02, ("mixed", 0): 0.0, ("mixed", 2): 0.0}
    least = min(r["eval"]["trained"] for r in corrected)
    assert all(0.43 <= r["eval"]["trained"] < least for r in grpo if not lost(r))
    scores = [r["eval"]["trained"] for r in corrected]
    assert (min(scores), max(scores)) == (0.585, 0.67)
    decayed = [r for r in corrected if agentic_report.judged(r).verdict == "decayed"]
    assert len(decayed) == 3
    assert [r["fleet"] for r in decayed if r["arm"] == "mis"] == ["bf16", "bf16"]
    for arm in ("mis", "mis_sc_full", "mis_sc"):
        both = [
            {r["seed"]: r["eval"]["trained"] for r in those_with(corrected, arm=arm, fleet=fleet)}
            for fleet in ("mixed", "bf16")
        ]
        gaps = [both[0][seed] - both[1][seed] for seed in (0, 1, 2)]
        assert max(map(abs, gaps)) < 0.0651
        assert abs(sum(gaps)) / 3 < 0.0084
    verdicts = [agentic_report.judged(r).verdict for r in grpo if lost(r)]
    assert sorted(verdicts) == ["collapsed", "decayed", "stable"]
    assert "collapsed" not in {agentic_report.judged(r).verdict for r in corrected}
    (late,) = [r for r in grpo if lost(r) and agentic_report.judged(r).verdict == "stable"]
    assert agentic_report.judged(late).last == pytest.approx(0.71, abs=0.01)
    # k3, by the line of tier A and by the one that was drawn afterwards.
    assert sorted(round(highest_k3(r), 2) for r in grpo if lost(r)) == [0.92, 0.98, 2.2]
    assert max(highest_k3(r) for r in grpo if not lost(r)) < 0.46
    assert sum(highest_k3(r) > 0.1 for r in grpo) == 5
    assert max(highest_k3(r) for r in corrected) < 0.08
    first = [next(s for s, v in r["curves"]["mismatch/k3_kl"] if v > 0.1)
             for r in grpo if highest_k3(r) > 0.1]  # fmt: skip
    assert first.count(9) == 4
