"""A session behind the router whose weight view is gone for good."""

import asyncio
from pathlib import Path

from aiohttp import web

from rlmix.core.task import Commit, PublicTask
from rlmix.core.trajectory import Outcome, StopReason
from rlmix.engine.client import EngineClient
from rlmix.engine.scripted import ScriptedEngine, certain_reply
from rlmix.model.bundle import resolve_model
from rlmix.model.chat import ChatRenderer
from rlmix.router.client import RouterAdmin
from rlmix.router.server import Router, RouterSpec
from rlmix.sandbox.backend import open_backend
from rlmix.sandbox.protocol import SandboxLimits
from rlmix.sessions.agent import run_session
from rlmix.sessions.spec import SessionSpec

RENDERER = ChatRenderer(resolve_model("bundled:tiny"))
LIMITS = SandboxLimits(memory_mib=256, pids=32, disk_mib=8, output_chars=400, command_timeout_s=5.0)
PUBLIC = PublicTask(
    task_id="t", split="train", issue="x", tags={}, history=(Commit(message="m", files={"a": ""}),)
)
SPEC = SessionSpec(
    session_id="s1", group_id="g", task_id="t", source="generated", split="train", source_seed=0,
    seed=1, temperature=1.0, top_p=0.9, top_k=-1, record="support", max_turns=6, max_turn_tokens=64,
    max_context_tokens=400, time_limit_s=60.0, command_timeout_s=5.0, output_chars=400,
)  # fmt: skip


def test_its_end_is_void_and_says_that_no_replica_of_the_view_is_left(tmp_path: Path) -> None:
    """Strict views, the FP8 pool in quarantine amid the session, a BF16 pool beside it."""

    async def scenario() -> None:
        spec = RouterSpec(
            policy="shortest_delay", queue_timeout_s=20.0, request_timeout_s=60.0,
            idle_expiry_s=600.0, max_sessions=10, observe_speeds=False, probe_every_s=0.0,
        )  # fmt: skip
        runner = web.AppRunner(Router(spec).app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        admin = RouterAdmin(url, timeout_s=20.0)
        # Turns without a command, so that no sandbox is needed.
        words = RENDERER.content_ids("a")[:1]
        turns = []

        def policy(call):  # type: ignore[no-untyped-def]
            turns.append(call)
            return certain_reply(words, finish="length")

        async def ask(request):  # type: ignore[no-untyped-def]
            """The session's engine; after its first turn the alarm puts its pool in quarantine."""
            if len(turns) == 1:
                await admin.put_replica("f-0", state="quarantined")
            return await generate(request)

        facts = {"numerics_key": "k", "speed": 1.0, "max_running": 8, "version": 0,
                 "state": "ready"}  # fmt: skip
        async with ScriptedEngine(policy) as fp8, ScriptedEngine(policy) as bf16:
            await admin.put_replica("f-0", pool="f", url=fp8.url, view="fp8", **facts)
            client = EngineClient(url, timeout_s=30.0)
            generate, client.generate = client.generate, ask  # type: ignore[method-assign]
            backend = await open_backend("unisolated", LIMITS, tmp_path, "r", allow_unisolated=True)

            async def put_other() -> None:
                while not turns:
                    await asyncio.sleep(0.01)
                await admin.put_replica("b-0", pool="b", url=bf16.url, view="bf16", **facts)

            other = asyncio.create_task(put_other())
            done = await run_session(
                SPEC, public=PUBLIC, engine=client, backend=backend, renderer=RENDERER,
                judge=None,  # type: ignore[arg-type]
            )  # fmt: skip
            await other
            await backend.close()
            await client.close()
        await admin.close()
        await runner.cleanup()
        assert (done.stop_reason, done.outcome) == (StopReason.ENGINE_LOST, Outcome.VOID)
        assert "answered 410" in done.void_reason
        assert "no replica of the session's weight view 'fp8' is left" in done.void_reason
        assert len(done.turns) == 1

    asyncio.run(scenario())
