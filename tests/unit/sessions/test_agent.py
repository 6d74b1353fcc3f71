"""Every end of a session, with the real renderer, a scripted engine and real sandboxes."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlmix.core.errors import DataError, EngineError, SandboxError
from rlmix.core.task import Commit, HiddenTask, PublicTask
from rlmix.core.trajectory import Outcome, StopReason, Trajectory
from rlmix.engine.client import EngineClient
from rlmix.engine.protocol import EngineRefused, GenerateRequest, Generation
from rlmix.engine.scripted import HashPolicy, ScriptedCall, ScriptedEngine, certain_reply
from rlmix.model.bundle import resolve_model
from rlmix.model.chat import ChatRenderer
from rlmix.sandbox.backend import open_backend
from rlmix.sandbox.namespaces import NamespaceBackend
from rlmix.sandbox.protocol import SandboxBackend, SandboxLimits
from rlmix.sessions.agent import run_session
from rlmix.sessions.spec import SessionSpec
from rlmix.tasks.rule import Verdict
from rlmix.tasks.verdict import judge

LIMITS = SandboxLimits(memory_mib=256, pids=32, disk_mib=8, output_chars=400, command_timeout_s=5.0)
PUBLIC = PublicTask(
    task_id="t",
    split="train",
    issue="total is wrong",
    history=(Commit(message="m", files={"sums.py": "def total(a, b):\n    return a - b\n"}),),
    tags={"kind": "operator"},
)
HIDDEN = HiddenTask(
    task_id="t",
    tests={
        "test_h.py": "import unittest\nfrom sums import total\n\n\nclass T(unittest.TestCase):\n"
        "    def test_adds(self):\n        self.assertEqual(total(2, 3), 5)\n"
    },
    required_tests=("test_h.T.test_adds",),
    reference_diff="",
)
SPEC = SessionSpec(
    session_id="s1",
    group_id="g1",
    task_id="t",
    source="generated",
    split="train",
    source_seed=0,
    seed=7,
    temperature=1.0,
    top_p=0.9,
    top_k=-1,
    record="support",
    max_turns=6,
    max_turn_tokens=64,
    max_context_tokens=400,
    time_limit_s=30.0,
    command_timeout_s=5.0,
    output_chars=400,
)
FIX = "sed -i 's/a - b/a + b/' sums.py"
RENDERER = ChatRenderer(resolve_model("bundled:tiny"))
(END,) = RENDERER.stop_token_ids


def said(text: str, *, ended: bool = True) -> list[int]:
    return [*RENDERER.content_ids(text), *([END] if ended else [])]


class NotingClient(EngineClient):
    """The real client, which also remembers what it was asked."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        return await super().generate(request)


class Lab:
    """A scripted engine behind real HTTP, and one sandbox backend."""

    def __init__(self, runner: asyncio.Runner, backend: NamespaceBackend) -> None:
        self.runner, self.backend = runner, backend
        self.calls: list[ScriptedCall] = []
        self.requests: list[GenerateRequest] = []

    def run(
        self,
        *turns: list[int],
        spec: SessionSpec = SPEC,
        faults: tuple[str, ...] = (),
        backend: SandboxBackend | None = None,
        **options: Any,
    ) -> Trajectory:
        return self.runner.run(
            asyncio.wait_for(self._run(turns, spec, faults, backend or self.backend, options), 60)
        )

    async def _run(
        self,
        turns: tuple[list[int], ...],
        spec: SessionSpec,
        faults: tuple[str, ...],
        backend: SandboxBackend,
        options: dict[str, Any],
    ) -> Trajectory:
        self.calls = []

        def policy(call: ScriptedCall):  # type: ignore[no-untyped-def]
            self.calls.append(call)
            ids = turns[min(call.turn, len(turns) - 1)]
            return certain_reply(ids, finish="stop" if ids[-1] == END else "length")

        engine = ScriptedEngine(policy, weight_version=3)
        await engine.start()
        for fault in faults:
            engine.fail_next(fault)
        client = NotingClient(engine.url, timeout_s=5.0)
        self.requests = client.requests
        try:
            return await run_session(
                spec,
                public=PUBLIC,
                engine=client,
                backend=backend,
                renderer=RENDERER,
                judge=self.judge,
                **options,
            )
        finally:
            await client.close()
            await engine.stop()

    async def judge(self, diff: bytes) -> Verdict:
        return await judge(PUBLIC, HIDDEN, diff, self.backend)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    scratch = tmp_path_factory.mktemp("scratch")
    with asyncio.Runner() as runner:
        try:
            backend = runner.run(open_backend("namespaces", LIMITS, scratch, f"s{os.getpid()}"))
        except SandboxError as error:
            pytest.skip(f"this machine forbids sandboxes: {error}")
        assert isinstance(backend, NamespaceBackend)
        yield Lab(runner, backend)
        assert backend.num_live == 0
        runner.run(backend.close())
    assert list(scratch.iterdir()) == []


def end_of(trajectory: Trajectory) -> tuple[StopReason, Outcome, float]:
    return trajectory.stop_reason, trajectory.outcome, trajectory.reward


def test_a_session_that_looks_fixes_and_submits_earns_1(lab: Lab) -> None:
    done = lab.run(said("cat sums.py"), said(FIX), said("submit"))
    assert end_of(done) == (StopReason.SUBMITTED, Outcome.PASS, 1.0)
    assert [turn.command for turn in done.turns] == ["cat sums.py", FIX, "submit"]
    assert [turn.exit_code for turn in done.turns] == [0, 0, 0]
    assert done.tags == {"kind": "operator", "split": "train", "verdict_tests": "1"}
    assert done.oldest_version == 3
    assert done.diff_bytes > 0
    assert all(turn.replica or turn.pool or turn.version_spans for turn in done.turns)


def test_ids_only_grow_and_hold_what_was_sampled_and_seen(lab: Lab) -> None:
    done = lab.run(said("cat sums.py"), said("nope"), said("submit"))
    ids = list(done.prompt_ids)
    for call, turn in zip(lab.calls, done.turns, strict=True):
        assert list(call.input_ids) == ids
        ids += [*turn.output_ids, *turn.observation_ids]
    seen = RENDERER.observation_ids(0, "def total(a, b):\n    return a - b\n", ended_with_stop=True)
    assert done.turns[0].observation_ids == tuple(seen)
    assert done.turns[-1].observation_ids == ()
    assert done.num_tokens == len(ids)


def test_a_later_turn_asks_only_for_the_experts_of_what_is_new(lab: Lab) -> None:
    """The token sampled last is the first of the new inputs: it was not an input before."""
    done = lab.run(said("ls"), said("submit"), spec=replace(SPEC, experts_shape=(3, 2)))
    first_end = len(done.prompt_ids) + len(done.turns[0].output_ids)
    assert [request.experts_start for request in lab.requests] == [0, first_end - 1]
    assert all(request.experts_shape == (3, 2) for request in lab.requests)
    lab.run(said("submit"))
    assert lab.requests[0].experts_shape is None


def test_edit_and_submit_in_one_command(lab: Lab) -> None:
    done = lab.run(said(f"{FIX} && submit"))
    assert end_of(done) == (StopReason.SUBMITTED, Outcome.PASS, 1.0)
    assert len(done.turns) == 1


def test_a_submission_without_an_edit_earns_0(lab: Lab) -> None:
    done = lab.run(said("submit"))
    assert end_of(done) == (StopReason.SUBMITTED, Outcome.FAIL, 0.0)
    assert done.verdict_detail == "empty_diff"


def test_a_failed_command_before_submit_does_not_submit(lab: Lab) -> None:
    done = lab.run(said("false && submit"), spec=replace(SPEC, max_turns=2))
    assert end_of(done) == (StopReason.TURN_LIMIT, Outcome.FAIL, 0.0)
    assert [turn.exit_code for turn in done.turns] == [1, 1]


def test_the_turn_limit_earns_0_even_with_the_right_edit(lab: Lab) -> None:
    done = lab.run(said(FIX), spec=replace(SPEC, max_turns=1))
    assert end_of(done) == (StopReason.TURN_LIMIT, Outcome.FAIL, 0.0)
    assert done.verdict_detail == "not submitted"
    assert done.turns[0].observation_ids == ()


def test_an_evaluation_may_grade_what_is_there_at_the_limit(lab: Lab) -> None:
    done = lab.run(said(FIX), spec=replace(SPEC, max_turns=1, grade_unsubmitted=True))
    assert end_of(done) == (StopReason.TURN_LIMIT, Outcome.PASS, 1.0)


def test_the_context_limit_clamps_the_turn_and_ends_the_session(lab: Lab) -> None:
    prompt = len(RENDERER.prompt_ids(PUBLIC.issue))
    spec = replace(SPEC, max_context_tokens=prompt + 20)
    done = lab.run(said("cat sums.py sums.py"), spec=spec)
    assert end_of(done) == (StopReason.TOKEN_LIMIT, Outcome.FAIL, 0.0)
    assert lab.calls[0].sampling["max_new_tokens"] == 20
    assert done.num_tokens <= spec.max_context_tokens


def test_a_prompt_that_leaves_no_room_is_refused(lab: Lab) -> None:
    with pytest.raises(DataError, match=r"session\.max_context_tokens=5; raise it"):
        lab.run(said("submit"), spec=replace(SPEC, max_context_tokens=5))


def test_three_turns_without_a_command_in_a_row_end_the_session(lab: Lab) -> None:
    done = lab.run([END])
    assert end_of(done) == (StopReason.FORMAT_ERROR, Outcome.FAIL, 0.0)
    assert len(done.turns) == 3
    assert done.turns[0].exit_code is None
    seen = RENDERER.observation_ids(
        126, "[no command found; write one bash command]\n", ended_with_stop=True
    )
    assert done.turns[0].observation_ids == tuple(seen)


def test_a_command_in_between_starts_the_count_again(lab: Lab) -> None:
    done = lab.run([END], [END], said("true"), [END], [END], said("submit"))
    assert done.stop_reason is StopReason.SUBMITTED


def test_a_turn_cut_by_its_limit_is_told_so_and_keeps_its_tokens(lab: Lab) -> None:
    cut = said("grep", ended=False)
    done = lab.run(cut, said("submit"))
    assert done.turns[0].output_ids == tuple(cut)
    seen = RENDERER.observation_ids(
        126,
        f"[cut off after {len(cut)} tokens; write one shorter command]\n",
        ended_with_stop=False,
    )
    assert done.turns[0].observation_ids == tuple(seen)


def test_the_time_limit_counts_against_slow_commands(lab: Lab) -> None:
    spec = replace(SPEC, time_limit_s=1.0)
    done = lab.run(said("sleep 20"), spec=spec)
    assert end_of(done) == (StopReason.TIME_LIMIT, Outcome.FAIL, 0.0)
    assert done.finished_s - done.started_s < 10


def test_waiting_for_the_engine_until_the_time_is_up_is_void(lab: Lab) -> None:
    done = lab.run(said("true"), spec=replace(SPEC, time_limit_s=0.5), faults=("hang",))
    assert end_of(done) == (StopReason.ENGINE_LOST, Outcome.VOID, 0.0)
    assert "of the session's 0.5 s" in done.void_reason


def test_where_what_is_there_is_judged_a_turn_that_never_comes_is_void_all_the_same(
    lab: Lab,
) -> None:
    spec = replace(SPEC, time_limit_s=0.5, grade_unsubmitted=True)
    done = lab.run(said("true"), spec=spec, faults=("hang",))
    assert end_of(done) == (StopReason.ENGINE_LOST, Outcome.VOID, 0.0)


@pytest.mark.parametrize("faults", [("cut",), ("abort",) * 3, ("error",), ("wrong_mask",)])
def test_a_fault_of_the_engine_is_void_with_its_reason(lab: Lab, faults: tuple[str, ...]) -> None:
    done = lab.run(said("true"), faults=faults)
    assert end_of(done) == (StopReason.ENGINE_LOST, Outcome.VOID, 0.0)
    assert done.void_reason.startswith("engine: ")
    assert done.turns == ()


def test_a_turn_that_the_engine_ended_early_is_asked_for_again(lab: Lab) -> None:
    """As by an update with weights.pause=abort."""
    done = lab.run(said("submit"), faults=("abort", "abort"))
    assert done.stop_reason is StopReason.SUBMITTED
    assert len(done.turns) == 1
    assert len({request.input_ids for request in lab.requests}) == 1
    assert len(lab.requests) == 3


def test_a_request_that_the_engine_calls_wrong_is_our_fault_and_raised(lab: Lab) -> None:
    with pytest.raises(EngineRefused):
        lab.run(said("true"), faults=("refuse",))


class OneBadSandbox:
    """The lab's backend, but creating fails a number of times first."""

    def __init__(self, backend: NamespaceBackend, failures: int) -> None:
        self._backend, self.failures = backend, failures
        self.name, self.is_isolated, self.warnings = "flaky", True, ()

    async def prepare(self, history: tuple[Commit, ...]) -> Any:
        return await self._backend.prepare(history)

    async def create(self, template: Any) -> Any:
        if self.failures:
            self.failures -= 1
            raise SandboxError("sandbox: no room")
        return await self._backend.create(template)

    async def close(self) -> None: ...


def test_a_sandbox_that_fails_once_is_made_again_and_twice_is_void(lab: Lab) -> None:
    once = lab.run(said("submit"), backend=OneBadSandbox(lab.backend, 1))
    assert once.stop_reason is StopReason.SUBMITTED
    twice = lab.run(said("submit"), backend=OneBadSandbox(lab.backend, 2))
    assert end_of(twice) == (StopReason.SANDBOX_LOST, Outcome.VOID, 0.0)
    assert twice.void_reason == "sandbox: no room"


def kill_with(lab: Lab, find: Callable[[int], int]) -> Trajectory:
    """Run a session whose first command sleeps, and kill one process of its sandbox meanwhile."""

    async def scenario() -> Trajectory:
        turns = (said(FIX), said("sleep 9"), said("submit"))
        session = asyncio.create_task(lab._run(turns, SPEC, (), lab.backend, {}))
        while len(lab.calls) < 2:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)
        (sandbox,) = lab.backend._sandboxes
        os.kill(find(sandbox.pid), signal.SIGKILL)
        return await session

    lab.calls = []
    return lab.runner.run(asyncio.wait_for(scenario(), 60))


def test_an_agent_that_ends_its_sandbox_ends_its_session_and_gets_no_void(lab: Lab) -> None:
    done = kill_with(lab, lambda pid: pid)
    assert end_of(done) == (StopReason.SANDBOX_ENDED, Outcome.FAIL, 0.0)
    assert [turn.exit_code for turn in done.turns] == [0, 137]
    assert done.verdict_detail == "not submitted"


def test_a_sandbox_killed_from_outside_is_void(lab: Lab) -> None:
    def monitor(pid: int) -> int:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])

    done = kill_with(lab, monitor)
    assert end_of(done) == (StopReason.SANDBOX_LOST, Outcome.VOID, 0.0)


@pytest.mark.parametrize("is_closing", [True, False])
def test_a_cancelled_session_is_void_when_closing_and_cancelled_otherwise(
    lab: Lab, is_closing: bool
) -> None:
    async def scenario() -> Trajectory:
        options = {"is_closing": lambda: is_closing}
        turns = (said("echo x"), said("sleep 9"))
        session = asyncio.create_task(lab._run(turns, SPEC, (), lab.backend, options))
        while len(lab.calls) < 2:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)
        session.cancel()
        return await session

    lab.calls = []
    if is_closing:
        done = lab.runner.run(asyncio.wait_for(scenario(), 60))
        assert end_of(done) == (StopReason.CANCELLED, Outcome.VOID, 0.0)
        assert done.turns[0].command == "echo x"
    else:
        with pytest.raises(asyncio.CancelledError):
            lab.runner.run(scenario())
    assert lab.backend.num_live == 0


def test_turn_seeds_repeat_for_a_spec_and_differ_between_turns_and_sessions() -> None:
    assert SPEC.turn_seed(0) == SPEC.turn_seed(0)
    other = replace(SPEC, seed=8)
    assert len({SPEC.turn_seed(0), SPEC.turn_seed(1), other.turn_seed(0), other.turn_seed(1)}) == 4
    assert 0 <= SPEC.turn_seed(5) < 1 << 31


class RecordingEngine:
    """Answers from a policy without HTTP and remembers which sessions were released."""

    def __init__(self) -> None:
        self.released: list[str] = []

    async def generate(self, request: GenerateRequest) -> Generation:
        raise EngineError("engine: gone")

    async def release(self, session_id: str) -> None:
        self.released.append(session_id)


def test_the_router_is_told_when_a_session_is_over(lab: Lab) -> None:
    engine = RecordingEngine()
    done = lab.runner.run(
        run_session(
            SPEC,
            public=PUBLIC,
            engine=engine,
            backend=lab.backend,
            renderer=RENDERER,
            judge=lab.judge,
        )
    )
    assert done.stop_reason is StopReason.ENGINE_LOST
    assert engine.released == ["s1"]


def test_random_tokens_of_a_model_without_weights_end_somewhere_with_aligned_records(
    lab: Lab,
) -> None:
    watched = replace(SPEC, max_turns=3, alarm_head_k=9999, alarm_head_frac=0.5)
    heads = []

    async def scenario() -> list[Trajectory]:
        engine = ScriptedEngine(HashPolicy(vocab_size=RENDERER.vocab_size), weight_version=1)
        await engine.start()
        client = EngineClient(engine.url, timeout_s=20.0)
        try:
            return await asyncio.gather(
                *(
                    run_session(
                        replace(watched, session_id=f"r{seed}", seed=seed),
                        public=PUBLIC,
                        engine=client,
                        backend=lab.backend,
                        renderer=RENDERER,
                        judge=lab.judge,
                    )
                    for seed in range(6)
                )
            )
        finally:
            await client.close()
            await engine.stop()

    for done in lab.runner.run(asyncio.wait_for(scenario(), 60)):
        assert done.outcome is not Outcome.VOID, done.void_reason
        assert done.num_tokens <= SPEC.max_context_tokens
        for number, turn in enumerate(done.turns):
            assert len(turn.output_ids) == len(turn.sampler_logprobs)
            assert turn.kept is not None
            wants_head = replace(watched, session_id=done.session_id).turn_head_k(number) > 0
            assert (turn.head is not None) == wants_head
            if turn.head is not None:
                assert turn.head.sizes.tolist() == [RENDERER.vocab_size] * len(turn.output_ids)
            heads.append(wants_head)
            assert (turn.kept.find(np.array(turn.output_ids))[1] == 1).all()
    assert 0 < sum(heads) < len(heads)


def test_the_turns_that_watch_the_tail_are_the_asked_share_and_the_same_every_time() -> None:
    watched = replace(SPEC, alarm_head_k=128, alarm_head_frac=0.01)
    asked = [
        replace(watched, session_id=f"run.g{group:06d}.{member}").turn_head_k(turn)
        for group in range(500)
        for member in range(8)
        for turn in range(5)
    ]
    # 20,000 turns: 200 expected, standard deviation 14.
    assert 150 <= sum(k == 128 for k in asked) <= 250
    assert set(asked) == {0, 128}
    assert all(replace(watched, alarm_head_frac=1.0).turn_head_k(turn) for turn in range(9))
    for off in ({"alarm_head_frac": 0.0}, {"alarm_head_k": 0}, {"temperature": 0.0}):
        changed = replace(watched, **{"alarm_head_frac": 1.0, **off})
        assert not any(changed.turn_head_k(turn) for turn in range(9))
    head = replace(watched, record="head", top_p=1.0, head_k=64)
    assert head.turn_head_k(3) == 64
