"""One session: token ids in, token ids out, one bash command per turn.

Invariants: ids only grow, and a turn's sampled ids go back to the engine exactly as they came.
Every session ends with one StopReason, checked in the order in which they are listed there. A
fault that the agent cannot have caused makes the session void; everything else is pass or fail.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from rlmix.core.errors import DataError, EngineError, SandboxError
from rlmix.core.task import PublicTask
from rlmix.core.trajectory import Outcome, StopReason, Trajectory, Turn
from rlmix.engine.protocol import (
    EngineRefused,
    GenerateRequest,
    Generation,
    GenerationAborted,
    SamplingParams,
)
from rlmix.sandbox.protocol import (
    EXIT_NOT_RUN,
    CommandResult,
    Sandbox,
    SandboxBackend,
    WorkTreeError,
)
from rlmix.sessions.spec import Engine, Judge, Renderer, SessionSpec
from rlmix.tasks.rule import Verdict

MAX_FORMAT_ERRORS = 3
"""In a row; a policy that stopped writing commands does not find back."""
MIN_TURN_TOKENS = 2
"""The shortest turn that can mean anything: one token and the end token."""
CREATE_ATTEMPTS = 2
TURN_ATTEMPTS = 3
"""An engine may end a running turn to change its weights (`weights.pause=abort`); nothing of it is
kept, so the turn is asked for again. One that ends every try is lost."""
RELEASE_TIMEOUT_S = 5.0


class _Ended(Exception):
    """Carries why the session ended out of its loop."""

    def __init__(self, reason: StopReason, void_reason: str = "") -> None:
        super().__init__(reason, void_reason)
        self.reason = reason
        self.void_reason = void_reason


async def run_session(
    spec: SessionSpec,
    *,
    public: PublicTask,
    engine: Engine,
    backend: SandboxBackend,
    renderer: Renderer,
    judge: Judge,
    is_closing: Callable[[], bool] = lambda: False,
) -> Trajectory:
    """Run a session to its end; no process and no file of it is left when this returns.

    Args:
        is_closing: when this says True, being cancelled ends the session as `cancelled` with what
            it has; otherwise the cancellation goes on to the caller.

    Raises:
        DataError: the prompt alone does not fit the context.
        EngineRefused: the engine calls the request wrong; a fault of ours, not of the session.
    """
    session = _Session(spec, public, engine, backend, renderer)
    try:
        return await session.run(judge)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if not is_closing() or task is None:
            raise
        task.uncancel()
        return session.trajectory(StopReason.CANCELLED, Outcome.VOID, void_reason="cancelled")
    finally:
        await session.clean_up()


class _Session:
    def __init__(
        self,
        spec: SessionSpec,
        public: PublicTask,
        engine: Engine,
        backend: SandboxBackend,
        renderer: Renderer,
    ) -> None:
        self.spec, self.public = spec, public
        self.engine, self.backend, self.renderer = engine, backend, renderer
        self.prompt_ids = tuple(renderer.prompt_ids(public.issue))
        self.ids: list[int] = list(self.prompt_ids)
        self.turns: list[Turn] = []
        self.num_inputs = 0
        """Context tokens that were an input of some turn: all but the one sampled last."""
        self.sandbox: Sandbox | None = None
        self.format_errors = 0
        self.rehomed = 0
        self.model_s = 0.0
        self.asked_engine = False
        self.started_s = time.time()
        self.deadline_s = time.monotonic() + spec.time_limit_s
        if len(self.ids) + MIN_TURN_TOKENS > spec.max_context_tokens:
            raise DataError(
                f"session {spec.session_id}: the prompt of task {spec.task_id} has "
                f"{len(self.ids)} tokens, session.max_context_tokens={spec.max_context_tokens}; "
                "raise it"
            )

    # --- the loop

    async def run(self, judge: Judge) -> Trajectory:
        try:
            while True:
                await self._turn()
        except _Ended as end:
            reason, void_reason = end.reason, end.void_reason
        if reason.is_infrastructure:
            return self.trajectory(reason, Outcome.VOID, void_reason=void_reason)
        if reason is not StopReason.SUBMITTED and not self.spec.grade_unsubmitted:
            return self.trajectory(reason, Outcome.FAIL, detail="not submitted")
        return await self._grade(reason, judge)

    async def _turn(self) -> None:
        started_s = time.monotonic()
        answer = await self._ask_engine()
        model_s = time.monotonic() - started_s
        self.model_s += model_s
        self.ids += answer.output_ids
        self.num_inputs = len(self.ids) - 1
        command = self.renderer.command(answer.output_ids)
        started_s = time.monotonic()
        turn = Turn(
            output_ids=answer.output_ids,
            sampler_logprobs=answer.sampler_logprobs,
            kept=answer.kept,
            kept_exact=answer.kept_exact,
            head=answer.head,
            experts=answer.experts,
            version_spans=answer.version_spans,
            pool=answer.pool,
            replica=answer.replica,
            numerics_key=answer.numerics_key,
            finish_reason=answer.finish_reason,
            cached_tokens=answer.cached_tokens,
            wire_bytes=answer.wire_bytes,
            command=command or "",
            model_s=model_s,
        )
        self.rehomed = max(self.rehomed, answer.rehomed)
        self.turns.append(turn)
        if command is None:
            self.format_errors += 1
            result = CommandResult(
                exit_code=EXIT_NOT_RUN, output=_format_error(answer, self.spec.max_turn_tokens)
            )
        else:
            self.format_errors = 0
            result = await self._run_command(command)
            self.turns[-1] = replace(
                turn, exit_code=result.exit_code, tool_s=time.monotonic() - started_s
            )
        if result.submitted:
            raise _Ended(StopReason.SUBMITTED)
        if result.sandbox_lost:
            # Its edits are gone, and nothing that it says now could be done.
            raise _Ended(StopReason.SANDBOX_ENDED)
        self._observe(answer, result)

    def _observe(self, answer: Generation, result: CommandResult) -> None:
        """Append what the command said, unless that is the end."""
        ended_with_stop = answer.output_ids[-1] in self.renderer.stop_token_ids
        seen = self.renderer.observation_ids(
            result.exit_code, result.output, ended_with_stop=ended_with_stop
        )
        if time.monotonic() >= self.deadline_s:
            raise self._out_of_time(0.0)
        if len(self.turns) >= self.spec.max_turns:
            raise _Ended(StopReason.TURN_LIMIT)
        if len(self.ids) + len(seen) + MIN_TURN_TOKENS > self.spec.max_context_tokens:
            raise _Ended(StopReason.TOKEN_LIMIT)
        if self.format_errors >= MAX_FORMAT_ERRORS:
            raise _Ended(StopReason.FORMAT_ERROR)
        self.turns[-1] = replace(self.turns[-1], observation_ids=tuple(seen))
        self.ids += seen

    async def _ask_engine(self) -> Generation:
        spec, turn = self.spec, len(self.turns)
        request = GenerateRequest(
            session_id=spec.session_id,
            request_id=f"{spec.session_id}.{turn}",
            input_ids=tuple(self.ids),
            sampling=SamplingParams(
                temperature=spec.temperature,
                top_p=spec.top_p,
                top_k=spec.top_k,
                max_new_tokens=min(spec.max_turn_tokens, spec.max_context_tokens - len(self.ids)),
                stop_token_ids=self.renderer.stop_token_ids,
                seed=spec.turn_seed(turn),
            ),
            record=spec.record,
            head_k=min(spec.turn_head_k(turn), self.renderer.vocab_size),
            min_version=spec.min_version,
            group_id=spec.group_id,
            experts_shape=spec.experts_shape,
            experts_start=self.num_inputs,
        )
        self.asked_engine = True
        waiting_since_s = time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, self.deadline_s - waiting_since_s)):
                for _ in range(TURN_ATTEMPTS - 1):
                    try:
                        return await self.engine.generate(request)
                    except GenerationAborted:
                        continue
                return await self.engine.generate(request)
        except TimeoutError:
            raise self._out_of_time(time.monotonic() - waiting_since_s) from None
        except EngineRefused:
            raise
        except EngineError as error:
            raise _Ended(StopReason.ENGINE_LOST, str(error)) from None

    def _out_of_time(self, waited_s: float) -> _Ended:
        """Time ran out: whose fault is that?

        The agent's when its own commands took the larger part of the session; ours when waiting
        for tokens did, and then a 0 would teach the policy about our load. Where what is there at
        the limit is judged, turns that were slow but came count as time; one turn that was waited
        for half of the session is a fault all the same.
        """
        limit_s = self.spec.time_limit_s
        if self.spec.grade_unsubmitted and waited_s <= limit_s / 2:
            return _Ended(StopReason.TIME_LIMIT)
        engine_s = self.model_s + waited_s
        if engine_s > limit_s / 2:
            return _Ended(
                StopReason.ENGINE_LOST,
                f"engine took {engine_s:.1f} s of the session's {limit_s:g} s",
            )
        return _Ended(StopReason.TIME_LIMIT)

    # --- the sandbox

    async def _run_command(self, command: str) -> CommandResult:
        try:
            sandbox = await self._ensure_sandbox()
            left_s = max(0.05, self.deadline_s - time.monotonic())
            result = await sandbox.run(
                command,
                timeout_s=min(self.spec.command_timeout_s, left_s),
                output_chars=self.spec.output_chars,
            )
        except SandboxError as error:
            raise _Ended(StopReason.SANDBOX_LOST, str(error)) from None
        if result.sandbox_lost:
            self.sandbox = None
            await sandbox.destroy()
        return result

    async def _ensure_sandbox(self) -> Sandbox:
        """Made at the first command: a session that waits for its engine holds no process."""
        if self.sandbox is None:
            template = await self.backend.prepare(self.public.repository)
            for attempt in range(CREATE_ATTEMPTS):
                try:
                    self.sandbox = await self.backend.create(template)
                    break
                except SandboxError:
                    if attempt + 1 == CREATE_ATTEMPTS:
                        raise
        assert self.sandbox is not None
        return self.sandbox

    async def _grade(self, reason: StopReason, judge: Judge) -> Trajectory:
        """Take the diff, end the agent's sandbox, and only then judge."""
        diff = b""
        if self.sandbox is not None:
            try:
                diff = await self.sandbox.capture_diff()
            except WorkTreeError as error:
                return self.trajectory(reason, Outcome.FAIL, detail=str(error))
            except SandboxError as error:
                return self.trajectory(
                    StopReason.SANDBOX_LOST, Outcome.VOID, void_reason=str(error)
                )
            sandbox, self.sandbox = self.sandbox, None
            await sandbox.destroy()
        verdict = await judge(diff)
        return self.trajectory(
            reason,
            verdict.outcome,
            detail=verdict.detail,
            void_reason=verdict.void_reason,
            diff_bytes=len(diff),
            facts=_verdict_facts(verdict),
        )

    async def clean_up(self) -> None:
        sandbox, self.sandbox = self.sandbox, None
        try:
            if sandbox is not None:
                await sandbox.destroy()
        finally:
            if self.asked_engine:
                await self._release()

    async def _release(self) -> None:
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                await self.engine.release(self.spec.session_id)
        except (TimeoutError, EngineError):
            pass  # The router forgets the session by age.

    # --- the record

    def trajectory(
        self,
        reason: StopReason,
        outcome: Outcome,
        *,
        detail: str = "",
        void_reason: str = "",
        diff_bytes: int = 0,
        facts: dict[str, str] | None = None,
    ) -> Trajectory:
        spec = self.spec
        return Trajectory(
            session_id=spec.session_id,
            group_id=spec.group_id,
            task_id=spec.task_id,
            prompt_ids=self.prompt_ids,
            turns=tuple(self.turns),
            stop_reason=reason,
            outcome=outcome,
            reward=1.0 if outcome is Outcome.PASS else 0.0,
            void_reason=void_reason,
            verdict_detail=detail,
            diff_bytes=diff_bytes,
            rehomed=self.rehomed,
            started_s=self.started_s,
            finished_s=time.time(),
            tags={**self.public.tags, "split": self.public.split, **(facts or {})},
        )


def _verdict_facts(verdict: Verdict) -> dict[str, str]:
    """What a reader of records asks about a reward, beyond the line that says why."""
    facts = {
        "verdict_tests": str(verdict.num_executed),
        "verdict_exit": "" if verdict.exit_code is None else str(verdict.exit_code),
        "verdict_reverted": " ".join(verdict.reverted[:20]),
        "verdict_weak": "1" if verdict.is_weak else "",
        "verdict_timed_out": "1" if verdict.timed_out else "",
    }
    return {name: said for name, said in facts.items() if said not in ("", "0")}


def _format_error(answer: Generation, max_turn_tokens: int) -> str:
    """A turn cut by its limit is not a malformed one, and is told so."""
    if answer.finish_reason == "length":
        return f"[cut off after {len(answer.output_ids)} tokens; write one shorter command]\n"
    return "[no command found; write one bash command]\n"
