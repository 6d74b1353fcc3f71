"""Plain Harbor tasks: their own script at /tests/test.sh, a reward file or an exit code."""

from dataclasses import replace

import pytest

from rlmix.core.task import Commit, HiddenTask, PreparedRepository, PublicTask
from rlmix.core.trajectory import Outcome
from rlmix.sandbox.repository import build_template, fast_import_stream
from rlmix.tasks.evidence.harbor import parse_reward

from .conftest import Court

CHECK = '[ "$(bash /app/total.sh 2 3)" = 5 ]'
HIDDEN = HiddenTask(
    task_id="h",
    tests={},
    required_tests=(),
    reference_diff="",
    test_command="/tests/test.sh",
    runner="harbor",
    scripts={"/tests/test.sh": f"{CHECK}\necho $((1 - $?)) > /logs/verifier/reward.txt\n"},
)
FIX = "sed -i 's/ - / + /' total.sh"


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> PublicTask:
    folder = tmp_path_factory.mktemp("prepared") / "one"
    history = (Commit(message="m", files={"total.sh": "echo $(($1 - $2))\n"}),)
    made = build_template(folder, fast_import_stream(history))
    return PublicTask(
        task_id="h",
        split="train",
        issue="x",
        prepared=PreparedRepository(
            folder=str(folder),
            commit=made.base_commit,
            workdir="/app",
            writable=("/tests", "/logs", "/solution"),
        ),
    )


def scripted(text: str) -> HiddenTask:
    return replace(HIDDEN, scripts={"/tests/test.sh": text})


def test_the_fix_earns_1_weakly_and_another_edit_0(court: Court, public: PublicTask) -> None:
    verdict = court.judge(court.diff(FIX, public), public, HIDDEN)
    assert (verdict.outcome, verdict.detail) == (Outcome.PASS, "the script's reward is 1")
    assert verdict.is_weak
    verdict = court.judge(court.diff("echo x > note", public), public, HIDDEN)
    assert (verdict.outcome, verdict.detail) == (Outcome.FAIL, "the script's reward is 0")


def test_what_an_agent_writes_to_the_folders_of_the_harness_decides_nothing(
    court: Court, public: PublicTask
) -> None:
    command = (
        "mkdir -p /logs/verifier && echo 1 > /logs/verifier/reward.txt"
        " && echo 'exit 0' > /tests/test.sh && echo x > note"
    )
    verdict = court.judge(court.diff(command, public), public, HIDDEN)
    assert verdict.detail == "the script's reward is 0"


SCRIPTS = {
    "no file and exit 0": ("true", Outcome.PASS, "exit 0 of the script, which wrote no reward"),
    "no file and exit 3": ("exit 3", Outcome.FAIL, "exit 3 of the script, which wrote no reward"),
    "half": ("echo 0.5 > /logs/verifier/reward.txt", Outcome.FAIL, "the script's reward is 0.5"),
    "words": ("echo yes > /logs/verifier/reward.txt", Outcome.FAIL, "reward.txt holds no number"),
    "json": (
        """echo '{"reward": 1.0}' > /logs/verifier/reward.json; exit 4""",
        Outcome.PASS,
        "the script's reward is 1",
    ),
    "a link": (
        "ln -s /etc/passwd /logs/verifier/reward.txt",
        Outcome.PASS,
        "exit 0 of the script, which wrote no reward",
    ),
    "out of time": ("sleep 60", Outcome.FAIL, "timed_out"),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_a_script_says_is_what_counts(court: Court, public: PublicTask, name: str) -> None:
    text, outcome, detail = SCRIPTS[name]
    limit_s = 2.0 if name == "out of time" else 20.0
    diff = court.diff(FIX, public)
    verdict = court.judge(diff, public, scripted(text), limit_s)
    assert (verdict.outcome, verdict.detail) == (outcome, detail)


def test_files_of_the_task_come_with_their_bytes_and_environment(
    court: Court, public: PublicTask
) -> None:
    files = {
        "/tests/test.sh": '[ "$(od -An -tx1 /tests/data/a.bin) $WANTED" = " ff 00 5" ]',
        "/tests/data/a.bin": b"\xff\x00".decode("utf-8", "surrogateescape"),
    }
    hidden = replace(HIDDEN, scripts=files, test_env={"WANTED": "5"})
    verdict = court.judge(court.diff(FIX, public), public, hidden)
    assert verdict.outcome is Outcome.PASS, verdict


@pytest.mark.parametrize(
    ("name", "content", "reward"),
    [
        ("reward.txt", b" 1\n", 1.0),
        ("reward.txt", b"nan", None),
        ("reward.txt", b"", None),
        ("reward.txt", b"\xff", None),
        ("reward.json", b"0.25", 0.25),
        ("reward.json", b'{"reward": 0, "other": 1}', 0.0),
        ("reward.json", b'{"style": 1, "tests": 0.5}', 0.5),
        ("reward.json", b'{"style": "good", "tests": 1}', None),
        ("reward.json", b"true", None),
        ("reward.json", b"[1]", None),
        ("reward.json", b"1e999", None),
        ("reward.json", b"[" * 99_999, None),
    ],
)
def test_reward_files_are_read_strictly(name: str, content: bytes, reward: float | None) -> None:
    assert parse_reward(name, content) == reward
