"""The report: every plot, nothing from outside, and never a crash."""

import html.parser
import re
from pathlib import Path

import pytest

from rlmix.core.trajectory import Outcome, StopReason, Trajectory, Turn, VersionSpan
from rlmix.observe.report import report_html, write_report
from rlmix.observe.run_dir import RunDir

POOLS = {"b200": "nvfp4", "h100": "fp8"}
PLOTS = (
    "Reward",
    "Reward by pool",
    "Mismatch between trainer and samplers",
    "Masked share",
    "Score-centering tail ratio",
    "Staleness",
    "Replicas over time",
    "Cost per step by pool (modelled)",
    "Time split",
)


def metrics_row(step: int) -> dict[str, float | int]:
    row: dict[str, float | int] = {
        "step": step,
        "reward/mean": 0.4 + 0.02 * step,
        "mismatch/k3_kl": 1e-4,
        "mismatch/mean_abs": 4e-3,
        "mismatch/noise_floor_mean_abs": 2e-3,
        "mismatch/noise_floor_k3": 5e-6,
        "correction/masked_frac": 0.01,
        "correction/sc_tail_ratio": 1.02,
        "staleness/mean_versions": 1.0,
        "staleness/max_versions": 2.0,
        "cost/step_usd": 0.03,
        "time/step_s": 8.0,
        "time/train_s": 3.0,
        "time/wait_s": 4.0,
        "time/train_cpu_s": 5.0,
        "time/session_model_s": 1.0,
        "time/run_s": 8.0 * step,
    }
    for number, pool in enumerate(POOLS):
        row[f"reward/by_pool/{pool}"] = 0.4 + 0.02 * step + 0.01 * number
        row[f"mismatch/by_pool/{pool}/k3_kl"] = 1e-4 * (number + 1)
        row[f"mismatch/by_pool/{pool}/mean_abs"] = 3e-3 * (number + 1)
        row[f"cost/by_pool/{pool}_usd"] = 0.01 * (number + 1)
        row[f"pools/{pool}/replicas"] = 1
    return row


def session(pool: str, outcome: Outcome) -> Trajectory:
    turn = Turn(
        output_ids=(1, 2),
        sampler_logprobs=(-0.5, -0.25),
        version_spans=(VersionSpan(version=0, start=0, end=2),),
        pool=pool,
        numerics_key=f"{pool}/{POOLS[pool]}/kv=fp8/emulated",
    )
    is_void = outcome is Outcome.VOID
    return Trajectory(
        session_id="s",
        group_id="g",
        task_id="t",
        prompt_ids=(1,),
        turns=(turn,),
        stop_reason=StopReason.ENGINE_LOST if is_void else StopReason.SUBMITTED,
        outcome=outcome,
        reward=float(outcome is Outcome.PASS),
    )


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    plan = {
        "pools": {
            pool: {
                "accelerator": pool.upper(),
                "weights": weights,
                "kv": "fp8",
                "replicas": 1,
                "engine": "embedded",
            }
            for pool, weights in POOLS.items()
        }
    }
    run = RunDir.create(tmp_path, "demo", overrides=["loop.steps=4"], plan=plan)
    for step in range(1, 5):
        run.write_trajectories(step, [session("b200", Outcome.PASS), session("h100", Outcome.VOID)])
        run.metrics.append(metrics_row(step))
    run.events.append("replica_lost", "h100-0 died with signal 9 <script>", pool="h100")
    for step, kind in ((2, "alarm_raised"), (4, "alarm_cleared")):
        facts = {"alarm": "pool_drift", "pool": "b200", "since_step": 1, "step": step}
        run.events.append(kind, "b200 is far off <script>", action="quarantine", **facts)
    run.events.append("pool_quarantined", "b200 is far off", pool="b200", step=2)
    run.close("interrupted")
    run = RunDir.open(run.path)
    run.truncate_after(3)
    run.metrics.append(metrics_row(4))
    evaluation = {
        "warm_start": 0.41,
        "trained": 0.58,
        "difference": 0.17,
        "ci95": [0.117, 0.222],
        "tasks": 400,
        "void": 0,
    }
    run.write_summary({"exit_reason": "finished", "cost_usd": 0.12, "eval": evaluation})
    write_report(run.path)
    run.close("finished")
    return run.path


def card(page: str, title: str) -> str:
    found = re.search(rf"<section[^>]*><h3>{re.escape(title)}</h3>(.*?)</section>", page, re.S)
    assert found is not None, title
    return found[1]


@pytest.mark.parametrize("title", PLOTS)
def test_plot_is_drawn_with_units_on_both_axes(finished: Path, title: str) -> None:
    body = card((finished / "report.html").read_text(), title)
    assert '<svg class="chart"' in body
    labels = re.findall(r'class="label"[^>]*>([^<]+)<', body)
    assert len(labels) >= 2
    assert "No data" not in body


def cells(body: str) -> list[list[str]]:
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", body, re.S)
    return [re.findall(r"<td[^>]*>(.*?)</td>", row, re.S) for row in rows]


def test_alarms_are_listed_with_their_steps_and_what_came_of_them(finished: Path) -> None:
    rows = cells(card((finished / "report.html").read_text(), "Alarms"))
    told = "b200 is far off &lt;script&gt;"
    assert ["pool_drift", "b200", "1", "2", "4", "quarantine", told] in rows
    assert ["2", "pool_quarantined", "b200 is far off"] in rows


def test_each_pool_is_shown_beside_the_trainers_own_noise(finished: Path) -> None:
    page = (finished / "report.html").read_text()
    rows = {
        row[0]: row[1:4]
        for row in cells(card(page, "Mismatch beside the noise of the trainer"))
        if row
    }
    assert rows["all pools"] == ["4.0e-03", "2.0", "1.0e-04"]
    assert rows["h100"] == ["6.0e-03", "3.0", "2.0e-04"]
    assert rows["trainer alone"] == ["2.0e-03", "1.0", "5.0e-06"]


def test_time_split_holds_wall_time_parts_and_the_rest_only(finished: Path) -> None:
    body = card((finished / "report.html").read_text(), "Time split")
    tips = set(re.findall(r"step 1 · ([^<]+)<", body))
    assert tips == {
        "waiting for sessions · 4.00 s",
        "training · 3.00 s",
        "rest of the step · 1.00 s",
    }


def test_page_asks_nothing_of_the_outside(finished: Path) -> None:
    page = (finished / "report.html").read_text()
    assert "<script" not in page
    assert not re.search(r"""(?:src|href)\s*=|@import|url\(|https?:""", page)
    assert "default-src 'none'" in page


def test_page_is_well_formed(finished: Path) -> None:
    class Checker(html.parser.HTMLParser):
        open_tags: list[str] = []  # noqa: RUF012

        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag not in ("meta", "br"):
                self.open_tags.append(tag)

        def handle_startendtag(self, tag: str, attrs: object) -> None: ...

        def handle_endtag(self, tag: str) -> None:
            assert self.open_tags.pop() == tag

    checker = Checker()
    checker.feed((finished / "report.html").read_text())
    assert checker.open_tags == []


def test_tables_hold_evaluation_pools_faults_and_stop_reasons(finished: Path) -> None:
    page = (finished / "report.html").read_text()
    evaluation = card(page, "Closing evaluation")
    assert "warm start 0.410, trained 0.580 (400 tasks)" in evaluation
    assert "+0.170, 95 % interval +0.117 to +0.222 (paired)" in evaluation
    pools = card(page, "Pools")
    assert "B200 (emulated)" in pools
    assert "b200/nvfp4/kv=fp8/emulated" in pools
    ended = card(page, "How sessions ended")
    assert "submitted" in ended
    assert "engine lost" in ended
    events = card(page, "Events and faults")
    assert '<tr class="trouble">' in events
    assert "signal 9 &lt;script&gt;" in events
    facts = card(page, "Run facts")
    assert "attempt 2" in facts
    assert "loop.steps=4" in facts


def test_state_cost_and_emulation_are_said_at_the_top(finished: Path) -> None:
    head = (finished / "report.html").read_text().split("<h2>")[0]
    assert '<span class="state finished">finished</span>' in head
    assert "are emulated" in head
    assert "cost, modelled" in head
    # 8 sessions were written; step 4 was set aside with its 2, so 6 count.
    assert "<b>6</b><span>sessions, 3 void</span>" in head


def test_resume_is_marked_in_the_plots(finished: Path) -> None:
    assert "resumed after step 3" in card((finished / "report.html").read_text(), "Reward")


def test_real_accelerators_are_not_called_modelled(tmp_path: Path) -> None:
    plan = {"pools": {"h100": {"accelerator": "H100", "engine": "sglang"}}}
    run = RunDir.create(tmp_path, "x", plan=plan)
    run.metrics.append({"step": 1, "cost/by_pool/h100_usd": 1.0, "cost/step_usd": 1.0})
    run.close("finished")
    page = report_html(run.path)
    assert "emulated" not in page
    assert "modelled" not in page
    assert card(page, "Cost per step by pool")


def test_run_without_a_step_says_so(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "x")
    run.close("failed")
    page = write_report(run.path).read_text()
    assert "metrics.jsonl has no step" in page
    assert "No data: no step in metrics.jsonl has <code>reward/mean</code>" in page
    assert "state failed" in page


def test_short_run_is_plotted_with_a_warning(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "x")
    run.metrics.append(metrics_row(1))
    run.close("interrupted")
    page = report_html(run.path)
    assert "only 1 step(s)" in page
    assert '<svg class="chart"' in card(page, "Reward")


def test_damaged_and_missing_files_become_notes(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "x")
    run.metrics.append(metrics_row(1))
    run.close("failed")
    (run.path / "metrics.jsonl").write_bytes(b'{"step":1,"reward/mean":0.5}\n{"st\n{"step":3}\n')
    (run.path / "plan.json").write_bytes(b"{")
    (run.path / "manifest.json").unlink()
    (run.path / "events.jsonl").unlink()
    page = report_html(run.path)
    for note in ("metrics.jsonl line 2: not JSON", "plan.json cannot be read", "events.jsonl is"):
        assert note in page
    assert "is no run directory" in page


def test_empty_folder_gives_a_report_too(tmp_path: Path) -> None:
    assert "nothing to plot yet" in write_report(tmp_path).read_text()


def test_null_and_text_values_are_left_out_of_plots(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "x")
    run.metrics.append({"step": 1, "reward/mean": float("nan")})
    run.metrics.append({"step": 2, "reward/mean": "high"})
    run.metrics.append({"step": 3, "reward/mean": 0.5})
    run.close("finished")
    assert card(report_html(run.path), "Reward").count("<title>optimizer step 3") == 2
    assert "<title>optimizer step 1" not in report_html(run.path)
