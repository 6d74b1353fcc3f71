"""A task worker end to end: real tasks, real sandboxes, a scripted engine over HTTP."""

import asyncio
import os
import pickle
from pathlib import Path

import pytest

from rlmix.core.errors import SandboxError
from rlmix.core.trajectory import Outcome, StopReason
from rlmix.engine.scripted import ScriptedCall, ScriptedEngine, certain_reply
from rlmix.model.bundle import resolve_model
from rlmix.model.chat import ChatRenderer
from rlmix.sandbox.protocol import SandboxLimits
from rlmix.sessions.spec import SessionSpec
from rlmix.sessions.worker import TaskWorker, WorkerSpec
from rlmix.tasks.source import open_source

MODEL = resolve_model("bundled:tiny")


def worker_spec(url: str, scratch: Path) -> WorkerSpec:
    return WorkerSpec(
        run_id=f"w{os.getpid()}",
        router_url=url,
        router_token="secret-token",
        engine_timeout_s=10.0,
        model_dir=str(MODEL),
        sandbox_backend="namespaces",
        sandbox_limits=SandboxLimits(
            memory_mib=256, pids=32, disk_mib=8, output_chars=400, command_timeout_s=5.0
        ),
        scratch_dir=str(scratch),
        allow_unisolated=False,
        num_verdicts=2,
        verdict_timeout_s=10.0,
    )


def session_spec(task_id: str, session_id: str) -> SessionSpec:
    return SessionSpec(
        session_id=session_id,
        group_id="g",
        task_id=task_id,
        source="generated",
        split="train",
        source_seed=0,
        seed=1,
        temperature=1.0,
        top_p=0.95,
        top_k=-1,
        record="support",
        max_turns=3,
        max_turn_tokens=200,
        max_context_tokens=1000,
        time_limit_s=30.0,
        command_timeout_s=5.0,
        output_chars=400,
    )


def test_specs_travel_between_processes_and_hide_the_token(tmp_path: Path) -> None:
    worker, session = worker_spec("http://127.0.0.1:1", tmp_path), session_spec("t", "s")
    assert pickle.loads(pickle.dumps((worker, session))) == (worker, session)
    assert "secret-token" not in repr(worker)


def test_a_worker_runs_many_sessions_and_close_ends_the_rest(tmp_path: Path) -> None:
    renderer = ChatRenderer(MODEL)
    (end,) = renderer.stop_token_ids
    source = open_source("generated", split="train", seed=0)
    task_ids = source.task_ids()[:6]

    def policy(call: ScriptedCall):  # type: ignore[no-untyped-def]
        """Odd sessions apply the reference fix; even ones submit nothing; the last one hangs."""
        number = int(call.session_id)
        if number == 99:
            text = "sleep 30"
        elif number % 2 == 0:
            text = "submit"
        else:
            old, new = fixes[number]
            text = f"sed -i 's/^{old}$/{new}/' *.py && submit"
        return certain_reply([*renderer.content_ids(text), end])

    fixes = {}
    for number, task_id in enumerate(task_ids):
        lines = source.hidden(task_id).reference_diff.splitlines()
        removed = [line[1:] for line in lines if line.startswith("-") and line[:3] != "---"]
        added = [line[1:] for line in lines if line.startswith("+") and line[:3] != "+++"]
        escaped = "".join(f"\\{char}" if char in "*[].^$/\\" else char for char in removed[0])
        fixes[number] = (escaped, added[0].replace("/", "\\/").replace("&", "\\&"))

    async def scenario() -> None:
        engine = ScriptedEngine(policy, weight_version=5)
        await engine.start()
        worker = TaskWorker(worker_spec(engine.url, tmp_path))
        try:
            info = await worker.open()
        except SandboxError as error:
            pytest.skip(f"this machine forbids sandboxes: {error}")
        assert (info.sandbox_backend, info.is_isolated) == ("namespaces", True)
        done = await asyncio.gather(
            *(
                worker.run(session_spec(task_id, str(number)))
                for number, task_id in enumerate(task_ids)
            )
        )
        for number, trajectory in enumerate(done):
            assert trajectory.task_id == task_ids[number]
            assert trajectory.stop_reason is StopReason.SUBMITTED
            if number % 2 == 0:
                assert trajectory.outcome is Outcome.FAIL
            elif trajectory.tags["num_edits"] == "1":
                assert trajectory.outcome is Outcome.PASS, trajectory.verdict_detail
        assert any(trajectory.outcome is Outcome.PASS for trajectory in done)
        hanging = asyncio.create_task(worker.run(session_spec(task_ids[0], "99")))
        await asyncio.sleep(0.5)
        await worker.close()
        assert (await hanging).stop_reason is StopReason.CANCELLED
        await engine.stop()

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert list(tmp_path.iterdir()) == []
