"""One evaluation from the checked request to its reports.

In order: the ledger (which refuses another question), the sandbox backend, the agent with whatever
serves it, the attempts, the reports. Invariant: everything that was started has ended when this
returns, and what is in the ledger stays.
"""

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlmix.config.schema.train import TrainConfig
from rlmix.core.errors import ConfigError
from rlmix.evals.agents import Agent, open_agent
from rlmix.evals.attempts import Attempts, Progress
from rlmix.evals.checkpoints import PolicyChoice, publish_policy
from rlmix.evals.endpoint import EndpointAgent
from rlmix.evals.facts import question_of, sampling_of
from rlmix.evals.ledger import Ledger
from rlmix.evals.policy import PolicyAgent
from rlmix.evals.score import Score, score
from rlmix.evals.score_report import write_score_report
from rlmix.evals.serving import Serving
from rlmix.observe.jsonl import write_atomically
from rlmix.observe.run_dir import RunDir
from rlmix.plan.runplan import RunPlan
from rlmix.sandbox.backend import open_backend
from rlmix.sandbox.protocol import SandboxLimits
from rlmix.sandbox.reap import reap
from rlmix.tasks.benchmark import GENERATED, Benchmark

MEMORY_MIB, DISK_MIB, PIDS = 4096, 2048, 512
COMMAND_S = 300.0
LEASE_MARGIN_S = 300.0
"""The sandbox ends itself so long after the agent's time, whoever else still lives."""
SERVING, WEIGHTS = "serving", "weights"
MODEL_FILE = "endpoint_model.txt"
SANDBOXES_FILE = "sandboxes.json"
"""Where the sandboxes of the process at work are; there afterwards only if it was killed."""
SCRATCH_PREFIX = "rlmix-eval-"
SESSIONS = ("policy", "endpoint")
"""Kinds of agents that sample, so that many of them can wait at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalRequest:
    """A checked request."""

    config: TrainConfig
    benchmark: Benchmark
    agent: str
    folder: Path
    facts: Mapping[str, Any]
    jobs: int
    limit_s: float | None = None
    policy: PolicyChoice | None = None
    plan: RunPlan | None = None
    """Of the pool that serves `agent=policy`."""
    on_progress: Callable[[Progress], None] = field(default=lambda _: None)
    sandbox_owner: str = ""
    """Whose sandboxes they are, for whoever cleans up after a kill; empty: this process's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalResult:
    """What came of it."""

    is_whole: bool
    score: Score
    report: Mapping[str, Any]
    stuck: tuple[tuple[str, float], ...]
    """(task, seconds) of what was in work at the deadline, the longest first."""


def limits_of(config: TrainConfig, benchmark: Benchmark) -> SandboxLimits:
    """Generated tasks get what training gives them, benchmarks what public tasks need."""
    sandbox = config.sandbox
    least = (0, 0, 0) if benchmark.name.startswith(GENERATED) else (MEMORY_MIB, DISK_MIB, PIDS)
    longest_s = max((max(task.agent_s, task.verify_s) for task in benchmark.tasks), default=0.0)
    return SandboxLimits(
        memory_mib=max(least[0], sandbox.memory_mib),
        disk_mib=max(least[1], sandbox.disk_mib),
        pids=max(least[2], sandbox.pids),
        output_chars=sandbox.output_chars,
        command_timeout_s=COMMAND_S,
        cpus=sandbox.cpus,
        lease_s=longest_s + LEASE_MARGIN_S,
    )


async def evaluate(request: EvalRequest, scratch: Path) -> EvalResult:
    """Make what is missing and write the reports.

    Raises:
        ConfigError: the folder holds another question, or a task has no repository here.
        RlmixError: something could not be started, or a task cannot be judged.
    """
    config, benchmark = request.config, request.benchmark
    refuse_unrunnable(benchmark)
    started_s = time.monotonic()
    async with contextlib.AsyncExitStack() as exit_stack:
        with contextlib.closing(Ledger(request.folder, question_of(request.facts))) as ledger:
            is_missing = len(ledger.attempts) < len(benchmark.tasks) * config.eval.n
        agent, engine_facts = await _agent(request, exit_stack, is_missing=is_missing)
        if request.limit_s is not None:  # Starting engines takes its part of all the time.
            left_s = max(0.0, request.limit_s - (time.monotonic() - started_s))
            request = replace(request, limit_s=left_s)
        result = await judge_all(request, scratch, agent, engine_facts)
    if result.is_whole:  # The digest names the policy; its copy is of no further use.
        shutil.rmtree(request.folder / WEIGHTS, ignore_errors=True)
    return result


async def judge_all(
    request: EvalRequest, scratch: Path, agent: Agent, engine_facts: "EngineFacts"
) -> EvalResult:
    """Make what is missing with an agent that is ready, and write the reports.

    Raises:
        ConfigError: the folder holds another question.
        RlmixError: there is no sandbox, or a task cannot be judged.
    """
    config, benchmark = request.config, request.benchmark
    async with contextlib.AsyncExitStack() as exit_stack:
        ledger = Ledger(request.folder, question_of(request.facts))
        exit_stack.callback(ledger.close)
        owner = request.sandbox_owner
        if not owner:
            owner = f"eval{os.getpid()}_{secrets.token_hex(3)}"  # Process ids come back.
            exit_stack.callback(_note_sandboxes(request.folder, scratch, owner))
        backend = await open_backend(
            config.sandbox.backend,
            limits_of(config, benchmark),
            scratch,
            owner,
            image=config.sandbox.image,
            has_images=config.eval.data not in ("mini", "generated"),
            servers=tuple(config.sandbox.servers),
            allow_weak=_allows_weak(config, benchmark),
            allow_unisolated=config.sandbox.allow_unisolated,
        )
        exit_stack.push_async_callback(backend.close)
        facts = {**request.facts, "sandbox": backend.name, "warnings": list(backend.warnings)}
        attempts = Attempts(
            benchmark=benchmark,
            agent=agent,
            backend=backend,
            ledger=ledger,
            per_task=config.eval.n,
            jobs=request.jobs,
            on_progress=request.on_progress,
        )
        is_whole = await attempts.make(request.limit_s)
        facts |= {"engine": engine_facts(), "is_whole": is_whole}
        result = await asyncio.to_thread(
            score, benchmark.tasks, ledger.attempts.values(), k=config.eval.k, n=config.eval.n
        )
        report = await asyncio.to_thread(
            write_score_report, ledger, result, facts, probes=attempts.probes
        )
        stuck = tuple(sorted(attempts.stuck, key=lambda one: -one[1]))
        return EvalResult(is_whole=is_whole, score=result, report=report, stuck=stuck)


def _note_sandboxes(folder: Path, scratch: Path, owner: str) -> Callable[[], None]:
    """Remove what a killed process left of its sandboxes, and note where ours are; returns what
    takes the note back. Call it with the folder's lock, so that whoever wrote the note is dead."""
    file = folder / SANDBOXES_FILE
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        before = json.loads(file.read_text())
        place = Path(before["folder"])
        if place.is_dir() and place.name.startswith(SCRATCH_PREFIX):
            reap(str(before["owner"]), place)
            shutil.rmtree(place, ignore_errors=True)
    document = {"folder": str(scratch.resolve()), "owner": owner}
    write_atomically(file, json.dumps(document).encode())
    return lambda: file.unlink(missing_ok=True)


def refuse_unrunnable(benchmark: Benchmark) -> None:
    """A release can be planned with; its tasks are judged where their repositories are.

    Raises:
        ConfigError: some have none.
    """
    bare = [task.public.task_id for task in benchmark.tasks if not task.has_repository]
    if bare:
        raise ConfigError(
            f"eval.path: {len(bare)} of {len(benchmark.tasks)} tasks of {benchmark.name} have no "
            f"repository there, e.g. {bare[0]!r}; `--cfg plan` lists the images to pull, and "
            "`rlmix tasks prepare` makes a set of them that can be judged"
        )


def _allows_weak(config: TrainConfig, benchmark: Benchmark) -> bool:
    is_bundled = benchmark.name.split("/")[0] in (GENERATED, "mini")
    return is_bundled if config.sandbox.allow_weak is None else config.sandbox.allow_weak


EngineFacts = Callable[[], Mapping[str, Any]]


async def _agent(
    request: EvalRequest, exit_stack: contextlib.AsyncExitStack, *, is_missing: bool
) -> tuple[Agent, EngineFacts]:
    """The agent, and what will be said of the engines behind it."""
    kind, _, place = request.agent.partition(":")
    if kind not in SESSIONS:
        return open_agent(request.agent), lambda: {"engine": "none"}
    if not is_missing:  # Asked again: nothing is served only to be told the same.
        before = _engine_before(request.folder)
        return open_agent("empty"), lambda: before
    if kind == "endpoint":
        agent = EndpointAgent(
            place,
            model=request.config.eval.endpoint_model,
            sampling=sampling_of(request.config),
        )
        exit_stack.push_async_callback(agent.close)
        await agent.open()
        _same_model(request.folder, agent.model)
        return agent, agent.facts
    serving, policy = await _serve(request, exit_stack)
    return policy, serving.engine_facts


def _same_model(folder: Path, model: str) -> None:
    """An endpoint may serve another model on another day, under the same URL.

    Raises:
        ConfigError: attempts in the folder were made with another one.
    """
    file = folder / MODEL_FILE
    before = file.read_text() if file.is_file() else None
    if before is not None and before != model:
        raise ConfigError(
            f"{folder} holds attempts of the endpoint's model {before!r}, and {model!r} would "
            "answer now; give this evaluation another name with run.name, or set "
            f"eval.endpoint_model={before}"
        )
    write_atomically(file, model.encode())


async def _serve(
    request: EvalRequest, exit_stack: contextlib.AsyncExitStack
) -> tuple[Serving, PolicyAgent]:
    from rlmix.engine.client import EngineClient
    from rlmix.model.chat import ChatRenderer

    config, choice, plan = request.config, request.policy, request.plan
    assert choice is not None
    assert plan is not None
    store = request.folder / WEIGHTS
    await asyncio.to_thread(publish_policy, choice, store)
    root = request.folder / SERVING
    number = len(list(root.iterdir())) if root.is_dir() else 0
    run = RunDir.create(root, f"attempt-{number:03d}", plan=plan.to_dict())
    exit_stack.callback(run.close, "finished")
    serving = Serving(plan, config, run, store=store, model_dir=choice.folder)
    await exit_stack.enter_async_context(serving)
    await serving.start(choice.step)
    engine = EngineClient(
        serving.url, token=serving.token, timeout_s=config.router.request_timeout_s
    )
    exit_stack.push_async_callback(engine.close)
    agent = PolicyAgent(
        engine=engine, renderer=ChatRenderer(choice.folder), sampling=sampling_of(config)
    )
    return serving, agent


def _engine_before(folder: Path) -> Mapping[str, Any]:
    try:
        found = json.loads((folder / "report.json").read_text())["facts"]["engine"]
    except (OSError, ValueError, LookupError, TypeError):
        return {"engine": "not recorded"}
    return dict(found)
