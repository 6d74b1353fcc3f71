"""Evaluations by command: references 1, nothing 0, interrupted ones go on, others refused."""

import asyncio
import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlmix.core.errors import ConfigError
from rlmix.evals.agents import Answer, GoldAgent, ScriptedAgent, open_agent, read_predictions
from rlmix.evals.attempts import Attempts, diff_path
from rlmix.evals.ledger import Attempt, Ledger, read_attempts
from rlmix.evals.score import document, score
from rlmix.evals.score_report import predictions
from rlmix.sandbox.backend import open_backend
from rlmix.sandbox.protocol import SandboxLimits
from rlmix.tasks.benchmark import MINI, open_benchmark

IDS = ("python-interval-merge", "shell-count-words")


@pytest.fixture
def two(tmp_path: Path) -> str:
    """A subset of two tasks, so that a test takes a second."""
    file = tmp_path / "two.txt"
    file.write_text("".join(f"{name}\n" for name in IDS))
    return str(file)


Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def rlmix_eval() -> Ask:
    """The command's JSON document and its exit code."""

    def ask(folder: Path, *args: str) -> dict[str, Any]:
        command = ["eval", "swe-bench-pro", f"run.dir={folder}", "run.name=e", *args, "--json"]
        done = subprocess.run(
            [sys.executable, "-c", "from rlmix.cli import main; main()", *command],
            capture_output=True,
            text=True,
            timeout=200,
        )
        return {**json.loads(done.stdout), "code": done.returncode}

    return ask


def test_the_references_score_1_and_no_change_0(rlmix_eval: Ask, tmp_path: Path, two: str) -> None:
    gold = rlmix_eval(tmp_path / "g", f"eval.subset={two}", "eval.n=1", "eval.k=1", "agent=gold")
    assert (gold["pass_at_1"], gold["pass_at_k"], gold["code"]) == (1.0, 1.0, 0)
    assert (gold["tasks"], gold["void"], gold["attempts"]) == (2, 0, 2)
    empty = rlmix_eval(tmp_path / "e", f"eval.subset={two}", "eval.n=1", "eval.k=1", "agent=empty")
    assert (empty["pass_at_1"], empty["empty"], empty["code"]) == (0.0, 2, 0)
    report = (tmp_path / "g/e/report.md").read_text()
    assert "| pass@1 | 1.000 | 0.342 to 1.000 | wilson | 2 | 1.000 |" in report
    assert "| checksum |" in report
    assert "HARD-51" not in report  # Reference rows stand beside their own data only.


def test_predictions_go_out_and_come_back_with_the_same_score(
    rlmix_eval: Ask, tmp_path: Path, two: str
) -> None:
    rlmix_eval(tmp_path / "g", f"eval.subset={two}", "eval.n=2", "eval.k=2", "agent=gold")
    file = tmp_path / "g/e/predictions.json"
    rows = json.loads(file.read_text())
    assert [row["prefix"] for row in rows] == ["attempt0", "attempt1"] * 2
    again = rlmix_eval(
        tmp_path / "p", f"eval.subset={two}", "eval.n=2", "eval.k=2", f"agent=predictions:{file}"
    )
    assert again["pass_at_1"] == 1.0


def test_a_scripted_agent_runs_its_commands_in_a_sandbox(
    rlmix_eval: Ask, tmp_path: Path, two: str
) -> None:
    file = tmp_path / "commands.json"
    fix = (MINI / IDS[0] / "solution/gold_patch.diff").read_text()
    file.write_text(json.dumps({IDS[0]: [f"cat > p <<'E'\n{fix}E\ngit apply p && rm p", "submit"]}))
    found = rlmix_eval(
        tmp_path, f"eval.subset={two}", "eval.n=1", "eval.k=1", f"agent=scripted:{file}"
    )
    assert found["pass_at_1"] == 0.5
    details = {one.task_id: one.detail for one in read_attempts(tmp_path / "e")}
    assert details[IDS[1]] == "no answer for this attempt"


def test_an_interrupted_evaluation_goes_on_without_making_an_attempt_twice(
    rlmix_eval: Ask, tmp_path: Path, two: str
) -> None:
    args = (f"eval.subset={two}", "eval.n=2", "eval.k=2", "agent=gold")
    rlmix_eval(tmp_path, *args)
    file = tmp_path / "e/attempts.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    assert len(lines) == 4
    file.write_text("".join(lines[:2]) + lines[2][:20])  # Killed while writing the third.
    again = rlmix_eval(tmp_path, *args)
    assert (again["attempts"], again["pass_at_k"], again["is_whole"]) == (4, 1.0, True)
    after = file.read_text().splitlines(keepends=True)
    assert after[:2] == lines[:2]
    keys = [one.key for one in read_attempts(tmp_path / "e")]
    assert len(set(keys)) == len(keys) == 4


def test_a_cancelled_attempt_leaves_no_line(tmp_path: Path) -> None:
    class Waiting(GoldAgent):
        async def answer(self, task, number, backend):  # type: ignore[no-untyped-def]
            await asyncio.sleep(60)

    async def run() -> bool:
        ledger = Ledger(tmp_path, {"agent": "gold"})
        attempts = Attempts(
            benchmark=open_benchmark("mini"),
            agent=Waiting(),
            backend=None,  # type: ignore[arg-type]
            ledger=ledger,
            per_task=1,
            jobs=3,
        )
        return await attempts.make(0.05)

    assert asyncio.run(run()) is False
    assert read_attempts(tmp_path) == []


def test_another_question_under_the_same_name_is_refused(
    rlmix_eval: Ask, tmp_path: Path, two: str
) -> None:
    args = (f"eval.subset={two}", "eval.n=1", "eval.k=1")
    rlmix_eval(tmp_path, *args, "agent=gold")
    other = rlmix_eval(tmp_path, *args, "agent=empty")
    assert other["code"] == 2
    assert "holds another evaluation: agent differ" in other["error"]


def attempt(task: str, number: int, outcome: str, **facts: object) -> Attempt:
    return Attempt(
        task_id=task, number=number, outcome=outcome, detail="", diff_bytes=1, agent_s=0.0,
        verify_s=0.0, **facts,  # type: ignore[arg-type]
    )  # fmt: skip


def test_voids_are_counted_both_ways() -> None:
    """Two tasks, four attempts each: (2 passed, 2 failed) and (1 passed, 1 failed, 2 void)."""
    tasks = [task for task in open_benchmark("mini").tasks if task.public.task_id in IDS]
    outcomes = {IDS[0]: "pass pass fail fail", IDS[1]: "pass fail void void"}
    made = [
        attempt(name, number, outcome)
        for name, text in outcomes.items()
        for number, outcome in enumerate(text.split())
    ]
    result = score(tasks, made, k=2, n=4)
    assert result.pass_at_1.value == 0.5
    # pass@2 of 2 of 4 is 1 - 1/6; of 1 of 2 valid ones 1; with voids as failures 1 - 3/6.
    assert math.isclose(result.pass_at_k.value, (5 / 6 + 1) / 2)
    assert math.isclose(result.pass_at_k_void_failed.value, (5 / 6 + 1 / 2) / 2)
    assert math.isclose(result.pass_at_1_void_failed.value, (1 / 2 + 1 / 4) / 2)
    assert (result.num_void, result.num_dropped) == (2, 0)
    assert score(tasks, made, k=3, n=4).num_dropped == 1
    found = document(result)
    assert found["by_language"]["shell"]["void"] == 2
    assert {"pass_at_1", "pass_at_k", "k", "n", "tasks", "void", "ci95"} <= set(found)


def test_the_bundled_tasks_of_several_files_are_told_apart(rlmix_eval: Ask, tmp_path: Path) -> None:
    found = rlmix_eval(tmp_path, "eval.subset=all+hard", "eval.n=1", "eval.k=1", "agent=gold")
    assert (found["pass_at_1"], found["tasks"]) == (1.0, 12)
    assert (found["hard"]["pass_at_1"], found["hard"]["tasks"]) == (1.0, 4)


def test_the_plan_of_an_evaluation_names_tasks_time_and_cost(
    rlmix_eval: Ask, tmp_path: Path
) -> None:
    plan = rlmix_eval(tmp_path, "--cfg", "plan")
    assert (plan["tasks"], plan["attempts"], plan["cost_usd"]) == (12, 48, 0.0)
    assert plan["at_most_h"] == round(48 * 3060 / 2 / 3600, 2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nobody", "allowed: gold, empty, scripted:FILE"),
        ("gold:x", "allowed: gold"),
        ("predictions:/nowhere", "/nowhere cannot be read"),
        ("scripted:", "allowed: gold"),
    ],
)
def test_an_agent_that_is_none_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        open_agent(text)


@pytest.mark.parametrize(
    "text",
    [
        '[{"instance_id": "a", "patch": "x\\n"}, {"instance_id": "a", "patch": "y"}]',
        '{"instance_id": "a", "model_patch": "x\\n"}\n{"instance_id": "a", "model_patch": "y"}\n',
    ],
)
def test_predictions_are_read_in_the_public_forms(tmp_path: Path, text: str) -> None:
    file = tmp_path / "p.json"
    file.write_text(text)
    assert read_predictions(file) == {"a": [b"x\n", b"y"]}


def test_a_map_of_predictions_is_read_and_a_wrong_entry_named(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_text('{"a": "x", "b": {"model_patch": "y"}}')
    assert read_predictions(file) == {"a": [b"x"], "b": [b"y"]}
    file.write_text('[{"instance_id": "a", "patch": 3}]')
    with pytest.raises(ConfigError, match="entry 0 needs a text in one of"):
        read_predictions(file)


ODD_FILES = {
    "5": "holds a int; allowed: a list of objects",
    '["a"]': "entry 0 needs a text in one of instance_id",
    '[{"instance_id": "a", "patch": 3}]': "entry 0 needs a text",
    '[{"instance_id": "a", "patch": "\\ud800"}]': "entry 0 (a): its patch holds no text",
    "{": "is neither JSON nor JSON Lines",
}


@pytest.mark.parametrize("text", ODD_FILES)
def test_odd_predictions_are_refused_with_one_sentence(tmp_path: Path, text: str) -> None:
    file = tmp_path / "p.json"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_predictions(file)
    assert ODD_FILES[text] in str(error.value)


def test_predictions_of_another_benchmark_are_refused_and_leave_nothing(
    rlmix_eval: Ask, tmp_path: Path, two: str
) -> None:
    file = tmp_path / "p.json"
    file.write_text('[{"instance_id": "elsewhere", "patch": "x"}]')
    args = (f"eval.subset={two}", "eval.n=1", "eval.k=1", f"agent=predictions:{file}")
    found = rlmix_eval(tmp_path / "runs", *args)
    assert found["code"] == 2
    assert "none of its 1 task ids is in mini/two; one of those there is" in found["error"]
    assert not (tmp_path / "runs").exists()


def test_another_file_of_predictions_under_one_name_is_another_question(
    rlmix_eval: Ask, tmp_path: Path, two: str
) -> None:
    file = tmp_path / "p.json"
    args = (f"eval.subset={two}", "eval.n=1", "eval.k=1", f"agent=predictions:{file}")
    for patch, code in (("x", 0), ("y", 2), ("x", 0)):
        file.write_text(json.dumps([{"instance_id": IDS[0], "patch": patch}]))
        found = rlmix_eval(tmp_path, *args)
        assert found["code"] == code, found
        assert code == 0 or "agent_file_sha256 differ" in found["error"]


def test_diffs_with_bytes_that_are_no_utf8_go_out_and_come_back(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "e", {})
    ledger.add(Attempt(task_id="a/b", number=0, outcome="fail", detail="", diff_bytes=6,
                       agent_s=0.0, verify_s=0.0))  # fmt: skip
    path = diff_path(ledger.folder, "a/b", 0)
    path.parent.mkdir()
    path.write_bytes(b"+caf\xe9\n")
    (tmp_path / "p.json").write_text(json.dumps(predictions(ledger)))
    ledger.close()
    assert read_predictions(tmp_path / "p.json") == {"a/b": [b"+caf\xe9\n"]}


def test_every_attempt_has_a_file_of_its_own_whatever_its_id(tmp_path: Path) -> None:
    names = ("a/b", "a_b", "a:b", "\u00e9" * 150, "\u00e9" * 151)
    paths = {diff_path(tmp_path, name, 0) for name in names}
    assert len(paths) == len(names)
    assert all(len(path.name.encode()) < 240 for path in paths)


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("a: run")
    with pytest.raises(ConfigError, match="holds something that is no evaluation"):
        Ledger(tmp_path / "run", {})
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.yaml"]
    (tmp_path / "run/question.json").write_text("{")
    with pytest.raises(ConfigError, match=r"question\.json is damaged"):
        Ledger(tmp_path / "run", {})


def test_what_an_agent_had_when_its_time_was_over_is_judged(tmp_path: Path) -> None:
    task = replace(open_benchmark("mini").tasks[0], agent_s=2.0)
    file = tmp_path / "c.json"
    file.write_text(json.dumps({task.public.task_id: ["echo x > note.txt; sleep 100", "false"]}))

    async def run() -> Answer:
        limits = SandboxLimits(
            memory_mib=512, pids=64, disk_mib=64, output_chars=1000, command_timeout_s=50.0
        )
        backend = await open_backend("auto", limits, tmp_path / "s", "t")
        try:
            return await ScriptedAgent(file).answer(task, 0, backend)
        finally:
            await backend.close()

    answer = asyncio.run(run())
    assert answer.stop_reason == "time_limit"
    assert b"+++ b/note.txt" in answer.diff
