"""Scale operations in the report."""

import re

from rlmix.observe.report import report_html
from rlmix.observe.report_data import read_report_data
from rlmix.observe.report_scaling import scale_marks
from rlmix.observe.run_dir import RunDir


def scaled_run(tmp_path):
    facts = {"operation": "<up>", "targets": {"h100": 2}, "from": {"h100": 1}, "progress": 1.0}
    failed = {"operation": "two", "targets": {"h100": 3}, "from": {"h100": 2}, "progress": 1.0}
    with RunDir.create(tmp_path, "r") as run:
        for step, replicas in ((1, 1), (2, 2), (3, 2)):
            row = {"step": step, "reward/mean": 0.5, "pools/h100/replicas": replicas}
            run.metrics.append(row)
            if step == 1:
                run.events.append("scale_started", "by hand", **facts)
                run.events.append("scale_step", "h100-1 is booting", operation="<up>")
                run.events.append("scale_done", "every replica has arrived", **facts)
        run.events.append("scale_started", "supply below the demand", **failed)
        run.events.append("scale_failed", "no driver", **failed)
    return run.path


def test_operations_are_listed_with_pools_end_and_reason(tmp_path):
    page = report_html(scaled_run(tmp_path))
    assert "Scale operations" in page
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", page)
    (up,) = [row for row in rows if "&lt;up&gt;" in row and "by hand" in row and "done" in row]
    assert "h100 1&gt;2" in up
    assert any("supply below the demand; no driver" in row for row in rows)


def test_beginnings_and_ends_are_marked_on_the_plot_of_replicas(tmp_path):
    path = scaled_run(tmp_path)
    texts = [text for _, text in scale_marks(read_report_data(path))]
    assert texts == [
        "<up>: h100 1>2, started", "<up>: h100 1>2, done",
        "two: h100 2>3, started", "two: h100 2>3, failed",
    ]  # fmt: skip
    assert "<title>&lt;up&gt;: h100 1&gt;2, done</title>" in report_html(path)


def test_a_run_that_never_scaled_has_no_such_card(tmp_path):
    with RunDir.create(tmp_path, "r") as run:
        run.metrics.append({"step": 1, "reward/mean": 0.5})
    assert "Scale operations" not in report_html(run.path)
