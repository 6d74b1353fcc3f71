"""The study's page says what its records say."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_tables_and_figures_of_the_page_are_what_the_records_give() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/study.py", "report", "--check"],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
