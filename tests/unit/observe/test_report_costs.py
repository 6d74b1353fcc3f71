"""The card of unit prices."""

import json
from pathlib import Path

from rlmix.observe.figures import MISSING
from rlmix.observe.report_costs import unit_costs_card
from rlmix.observe.report_data import read_report_data


def write(path: Path, rows: list[dict[str, float]]) -> None:
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_card_has_means_in_all_and_by_pool(tmp_path: Path) -> None:
    rows = [
        {
            "step": step,
            "cost/by_pool/b200_usd": 0.1,
            "cost/trajectory_usd": 0.25 * step,
            "cost/per_1k_tokens_usd": 2.0 * step,
            "cost/per_1k_tokens_by_pool/b200_usd": 1.0,
        }
        for step in (1, 2, 3)
    ]
    write(tmp_path, rows)
    card = unit_costs_card(read_report_data(tmp_path))
    assert "USD per 1,000 trained tokens" in card
    assert "$0.5000" in card
    assert "$4.00" in card
    # The pool trained no trajectory of its own: said as missing, not as free.
    row = card[card.index("b200") :]
    assert MISSING in row
    assert "$1.00" in row


def test_a_run_without_these_keys_has_no_card(tmp_path: Path) -> None:
    write(tmp_path, [{"step": 1, "cost/step_usd": 0.1}])
    assert unit_costs_card(read_report_data(tmp_path)) == ""
