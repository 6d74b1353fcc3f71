"""The live view: what it shows, where it prints, and that it stays cheap."""

import dataclasses
import io
import subprocess
import sys

import pytest
from rich.console import Console

from rlmix.observe.closing_table import closing_view
from rlmix.observe.live import LiveView, live_block, open_console, step_line
from rlmix.observe.live_state import EventLine, LiveState, PoolState

STATE = LiveState(
    run="demo",
    phase="training",
    step=7,
    num_steps=30,
    elapsed_s=92.0,
    eta_s=204.0,
    policy_version=7,
    pools=(
        PoolState(
            name="b200",
            accelerator="B200",
            is_emulated=True,
            weights="nvfp4",
            kv="fp8",
            replicas_ready=0,
            replicas_total=1,
            running=12,
            queued=3,
            tokens_per_s=1234.0,
            version=6,
            k3_kl=1.2e-4,
            usd_per_hour=6.25,
        ),
        PoolState(
            name="h100",
            accelerator="H100",
            is_emulated=False,
            weights="fp8",
            kv="fp8",
            replicas_ready=2,
            replicas_total=2,
        ),
    ),
    done=40,
    needed=128,
    rewards=(0.3, 0.35, 0.41),
    metrics={"reward/mean": 0.41, "mismatch/k3_kl": 3e-4, "time/step_s": 8.1},
    cost_usd=0.21,
    events=(EventLine(run_s=75.0, kind="replica_lost", reason="b200-0: signal 9 [oops]"),),
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def drawn(state: LiveState, width: int) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(live_block(state, width=width))
    return console.export_text()


def test_block_shows_run_pools_progress_reward_and_events() -> None:
    text = drawn(STATE, 120)
    lines = text.splitlines()
    assert "demo  step 7/30  policy v7  training  1:32 elapsed, 3:24 left  $0.2100 modelled" in text
    b200 = next(line for line in lines if line.startswith("b200"))
    assert b200.split() == [
        *("b200", "B200", "(emulated)", "nvfp4/fp8", "0/1", "12", "3", "1.23k", "v6", "1.2e-04"),
        "6.25",
    ]
    h100 = next(line for line in lines if line.startswith("h100"))
    assert "emulated" not in h100
    assert h100.split()[-5:] == ["0", "-", "-", "-", "-"]
    assert "40/128 sessions" in text
    assert "0.410 (low 0.300, high 0.410)" in text
    assert "1:15 replica_lost: b200-0: signal 9 [oops]" in text


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_block_fits_the_terminal(width: int) -> None:
    many = dataclasses.replace(STATE, run="r" * 60, pools=STATE.pools * 3)
    text = drawn(many, width)
    assert max(len(line) for line in text.splitlines()) <= width
    # One header, two table heads, six pools, a caption at most, and four lines below.
    assert len(text.splitlines()) <= 16


def test_narrow_terminal_still_says_emulated() -> None:
    assert "accelerators are emulated" in drawn(STATE, 80)


def test_block_without_pools_steps_or_metrics_is_drawn() -> None:
    early = LiveState(run="x", phase="booting pools", step=0, num_steps=3, elapsed_s=0.0)
    assert "booting pools" in drawn(early, 80)


def test_output_to_a_file_is_one_line_per_step_and_new_phase() -> None:
    console = Console(file=io.StringIO(), width=200)
    with LiveView(console) as view:
        view.update(dataclasses.replace(STATE, step=0, phase="booting pools"))
        for step in (0, 1, 1, 1, 2):
            view.update(dataclasses.replace(STATE, step=step))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "[1:32] demo: booting pools"
    assert lines[1] == "[1:32] demo: training"
    assert [line.split("  ")[0] for line in lines[2:]] == ["step 1/30", "step 2/30"]
    assert "\x1b" not in console.file.getvalue()


ALARM = {"pool_drift/b200": "pool b200 is 34 times as far from the others as usual"}


def test_alarms_that_stand_are_in_the_block() -> None:
    lines = drawn(dataclasses.replace(STATE, alarms=ALARM), 60).splitlines()
    assert "ALARM pool b200 is 34 times as far from the others as usual" in lines


def test_the_scale_operation_under_way_has_a_line_until_it_is_over() -> None:
    line = "by-hand-1 running: h100 1>2 (0%; h100-1 verifying)"
    assert f"scaling   {line}" in drawn(dataclasses.replace(STATE, operation=line), 100)
    assert "scaling" not in drawn(STATE, 100)


def test_output_to_a_file_names_an_alarm_when_it_is_raised_and_raised_again() -> None:
    console = Console(file=io.StringIO(), width=200)
    with LiveView(console) as view:
        later = {"pool_drift/b200": "pool b200 is 40 times as far from the others as usual"}
        for alarms in ({}, ALARM, later, {}, later):
            view.update(dataclasses.replace(STATE, alarms=alarms))
    assert isinstance(console.file, io.StringIO)
    lines = [line for line in console.file.getvalue().splitlines() if line.startswith("ALARM")]
    assert [line.split()[4] for line in lines] == ["34", "40"]


def test_long_plain_line_is_not_wrapped() -> None:
    console = Console(file=io.StringIO(), width=40)
    LiveView(console).update(STATE)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines()[1] == step_line(STATE)


def test_drawing_is_paced_by_its_own_cost() -> None:
    clock, cpu = Clock(), Clock()

    def cpu_time() -> float:
        cpu.now_s += 0.006  # each reading 6 ms later: one drawing costs 6 ms
        return cpu.now_s

    console = Console(file=io.StringIO(), width=100, height=40, force_terminal=True)
    with LiveView(console, monotonic=clock, cpu_time=cpu_time) as view:
        for _ in range(1000):
            clock.now_s += 0.01
            view.update(STATE)
        # 10 s at 1.5 % of a core pay for 0.15 s of drawing: 25 drawings of 6 ms.
        drawings = cpu.now_s / 0.012
    assert drawings == pytest.approx(25, abs=1)


def test_cheap_drawing_is_held_to_four_a_second() -> None:
    clock, cpu = Clock(), Clock()
    readings = 0

    def cpu_time() -> float:
        nonlocal readings
        readings += 1
        return cpu.now_s

    console = Console(file=io.StringIO(), width=100, height=40, force_terminal=True)
    with LiveView(console, monotonic=clock, cpu_time=cpu_time) as view:
        for _ in range(1000):
            clock.now_s += 0.01
            view.update(STATE)
        assert readings / 2 == pytest.approx(40, abs=1)


def test_last_state_is_shown_at_the_end_even_if_it_came_too_soon() -> None:
    clock = Clock()
    console = Console(file=io.StringIO(), width=100, height=40, force_terminal=True)
    with LiveView(console, monotonic=clock) as view:
        view.update(STATE)
        view.update(dataclasses.replace(STATE, step=30, phase="done"))
    assert isinstance(console.file, io.StringIO)
    assert "step 30/30" in console.file.getvalue()


def test_json_mode_keeps_stdout_free() -> None:
    assert open_console(is_json=True).stderr
    assert not open_console(is_json=False).stderr


def test_closing_table_shows_rewards_interval_cost_and_report() -> None:
    document = {
        "run": "x",
        "run_dir": "runs/x",
        "steps": 30,
        "reward_first": 0.35,
        "reward_last": 0.61,
        "cost_usd": 0.63,
        "wall_s": 311,
        "exit_reason": "finished",
        "sessions": 3840,
        "void_frac": 0.001,
        "report": "runs/x/report.html",
        "eval": {
            "warm_start": 0.41,
            "trained": 0.58,
            "difference": 0.17,
            "ci95": [0.12, 0.22],
            "tasks": 400,
            "void": 2,
        },
        "pools": {"b200": {"accelerator": "B200", "tokens": 80_000, "cost_usd": 0.1}},
    }
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(closing_view(document))
    text = console.export_text()
    for part in (
        "run x: finished",
        "first 0.350, last 0.610",
        "warm start 0.410, trained 0.580 (400 tasks, 2 void)",
        "+0.170, 95 % interval +0.120 to +0.220 (paired)",
        "$0.6300 (modelled)",
        "5:11",
        "B200",
        "all accelerators emulated",
        "$1.25",
        "runs/x/report.html",
    ):
        assert part in text


@pytest.mark.parametrize("width", [80, 102, 140])
def test_closing_table_cuts_no_number_off(width: int) -> None:
    pool = {
        "accelerator": "RTX PRO 6000",
        "weights": "nvfp4",
        "kv": "fp8",
        "replicas": 1,
        "sessions": 1260,
        "tokens": 152_000,
        "reward": 0.505,
        "k3_kl": 1.2e-3,
        "cost_usd": 0.5603,
        "is_emulated": True,
    }
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(closing_view({"run": "x", "pools": {"rtx_pro_6000": pool}}))
    row = next(
        line for line in console.export_text().splitlines() if line.startswith("rtx_pro_6000 ")
    )
    assert row.split()[-6:] == ["1.26k", "152k", "0.505", "1.2e-03", "$0.5603", "$3.69"]
    assert "…" not in row


def test_closing_table_lists_alarms_and_pools_in_quarantine() -> None:
    alarm = {"text": "pool b200 drifts", "since_step": 7, "cleared_step": None}
    cleared = {"text": "too much is masked", "since_step": 2, "cleared_step": 6}
    document = {"run": "x", "alarms": [cleared, alarm], "quarantined": ["b200"]}

    def shown(document: dict[str, object]) -> list[str]:
        console = Console(width=90, record=True, file=io.StringIO())
        console.print(closing_view(document))
        return [" ".join(line.split()) for line in console.export_text().splitlines()]

    lines = shown(document)
    assert "alarms 2, 1 of them to the end" in lines
    assert "too much is masked, since step 2, cleared at step 6" in lines
    assert "pool b200 drifts, since step 7, to the end" in lines
    assert "in quarantine b200" in lines
    assert "and 1 more in the report" in shown({"run": "x", "alarms": [cleared] * 6})
    assert "alarms none" in shown({"run": "x", "alarms": []})
    assert "alarms -" in shown({"run": "x"})


def test_closing_table_of_an_early_end_shows_what_is_missing() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(closing_view({"run": "x", "steps": 0, "reward_first": None}))
    text = console.export_text()
    assert "first -, last -" in text
    assert "not evaluated" in text


def test_importing_the_room_is_light() -> None:
    code = (
        "import sys, rlmix.observe.runs, rlmix.observe.live, rlmix.observe.report, "
        "rlmix.observe.run_dir, rlmix.observe.runs_view\n"
        "heavy = {'torch', 'ray', 'transformers', 'hydra', 'tensorboard', 'rich', 'psutil'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
