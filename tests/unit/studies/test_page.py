"""The study's page says what its records say."""

import subprocess
import sys
from pathlib import Path

import pytest

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
