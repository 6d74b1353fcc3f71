"""A policy as an agent: sessions as in training, whose diffs are judged like everybody's.

Invariant: seeds follow from task and attempt alone, so an evaluation that is asked again samples
the same on the same numbers, and two policies are compared on the same seeds.
"""

import itertools
import zlib
from dataclasses import dataclass

from rlmix.core.errors import DataError
from rlmix.core.trajectory import Outcome, Trajectory
from rlmix.evals.agents import Answer
from rlmix.sandbox.protocol import SandboxBackend
from rlmix.sessions.agent import run_session
from rlmix.sessions.spec import Engine, Renderer, SessionSpec
from rlmix.tasks.benchmark import BenchTask
from rlmix.tasks.rule import Verdict

PROMPT_TOO_LONG = "prompt_too_long"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How sessions of an evaluation sample, and what bounds them beside the task's own time."""

    temperature: float
    top_p: float
    top_k: int
    max_turns: int
    max_turn_tokens: int
    max_context_tokens: int
    command_timeout_s: float
    output_chars: int
    seed: int


class PolicyAgent:
    """Works on tasks through an engine; what is there at a limit is judged all the same."""

    name = "policy"
    task_ids = None
    works_in_sandbox = True

    def __init__(
        self,
        *,
        engine: Engine,
        renderer: Renderer,
        sampling: Sampling,
        min_version: int | None = None,
    ) -> None:
        """
        Args:
            min_version: oldest weight version that may answer; None takes any.
        """
        self._engine, self._renderer, self._sampling = engine, renderer, sampling
        self._min_version = min_version
        self.versions: set[int] = set()
        """Weight versions that tokens came from."""
        self._sessions = itertools.count()

    async def answer(self, task: BenchTask, number: int, backend: SandboxBackend) -> Answer:
        found = b""

        async def keep(diff: bytes) -> Verdict:
            nonlocal found
            found = diff
            return Verdict(outcome=Outcome.FAIL, detail="judged apart, in a fresh sandbox")

        try:
            done = await run_session(
                self._spec(task, number),
                public=task.public,
                engine=self._engine,
                backend=backend,
                renderer=self._renderer,
                judge=keep,
            )
        except DataError as error:  # The prompt does not fit: this policy cannot work on it.
            return Answer(diff=b"", stop_reason=PROMPT_TOO_LONG, fault=str(error))
        self.versions |= {span.version for turn in done.turns for span in turn.version_spans}
        return answer_of(done, found)

    def _spec(self, task: BenchTask, number: int) -> SessionSpec:
        sampling, task_id = self._sampling, task.public.task_id
        return SessionSpec(
            session_id=f"eval.{next(self._sessions)}.{zlib.crc32(task_id.encode()):08x}.{number}",
            group_id=f"eval.{zlib.crc32(task_id.encode()):08x}",
            task_id=task_id,
            source="benchmark",
            split="eval",
            source_seed=0,
            seed=zlib.crc32(f"{sampling.seed}/eval/{task_id}/{number}".encode()),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            record="none",
            max_turns=sampling.max_turns,
            max_turn_tokens=sampling.max_turn_tokens,
            max_context_tokens=sampling.max_context_tokens,
            time_limit_s=task.agent_s,
            command_timeout_s=min(sampling.command_timeout_s, task.agent_s),
            output_chars=sampling.output_chars,
            min_version=self._min_version,
            grade_unsubmitted=True,
        )


def answer_of(done: Trajectory, diff: bytes) -> Answer:
    """What a session leaves of an attempt."""
    fault = ""
    if done.outcome is Outcome.FAIL and not done.diff_bytes and not diff:
        # Ended without a diff that could be judged: its sandbox or its tree was lost by itself.
        fault = "" if done.verdict_detail.startswith("judged") else done.verdict_detail
    return Answer(
        diff=diff,
        stop_reason=done.stop_reason.value,
        num_tokens=done.num_sampled_tokens,
        num_turns=len(done.turns),
        model_s=round(sum(turn.model_s for turn in done.turns), 3),
        fault=fault,
        void_reason=done.void_reason if done.outcome is Outcome.VOID else "",
    )
