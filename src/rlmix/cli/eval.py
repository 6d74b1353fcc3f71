"""`rlmix eval swe-bench-pro`: judge an agent on a benchmark, each attempt once."""

import asyncio
import contextlib
import signal
import tempfile
import time
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rlmix.cli.answer import Answer, answered
from rlmix.cli.options import AsJson, ConfDir, Overrides
from rlmix.core.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from rlmix.config.schema.train import TrainConfig
    from rlmix.evals.attempts import Progress
    from rlmix.evals.run import EvalRequest, EvalResult
    from rlmix.tasks.benchmark import Benchmark

app = typer.Typer(help="Judge a checkpoint, or diffs made elsewhere.", no_args_is_help=True)

AGENT_KEY = "agent="
BOTH = "all+hard"
DEFAULT_AGENT, DEFAULT_DATA = "gold", "mini"
DEFAULT_JOBS = 2
"""Verdicts are pure CPU; agents that wait for a model take `eval.concurrency`."""
MAX_NAMED = 3
LINE_EVERY_S = 30.0
"""Without a terminal progress is a line now and then."""
Show = Annotated[
    Literal["config", "plan"] | None,
    typer.Option("--cfg", metavar="config|plan", help="Print the plan, and exit."),
]


@app.callback()
def _eval() -> None:
    """Keeps `swe-bench-pro` a command of its own name."""


@app.command("swe-bench-pro")
@answered
def swe_bench_pro(
    overrides: Overrides = None,
    cfg: Show = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Attempts at a time.", show_default=False)
    ] = None,
    deadline_s: Annotated[
        float | None, typer.Option("--deadline", min=1, help="Seconds for all of it.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--against", metavar="REPORT", help="Compare with another evaluation's folder."
        ),
    ] = None,
    conf_dir: ConfDir = None,
    as_json: AsJson = False,
) -> Answer:
    """pass@k on SWE-bench Pro: bundled tasks, held-out generated ones, or a public set.

    \b
    rlmix eval swe-bench-pro agent=gold                     references of the bundled tasks: 1.0
    rlmix eval swe-bench-pro agent=empty                    no change: 0.0
    rlmix eval swe-bench-pro agent=policy eval.data=generated eval.checkpoint=RUN
    rlmix eval swe-bench-pro agent=endpoint:http://HOST:PORT/v1
    rlmix eval swe-bench-pro agent=predictions:FILE         diffs made elsewhere
    rlmix eval swe-bench-pro eval.data=swe_bench_pro_v2 eval.path=FOLDER agent=gold
    rlmix eval swe-bench-pro ... --against runs/OTHER       paired comparison

    Asked again under the same run.name, it goes on where it stopped.
    """
    from rlmix.config.compose import load_config
    from rlmix.config.render import config_yaml
    from rlmix.evals.comparison import check_comparable
    from rlmix.evals.facts import read_report
    from rlmix.tasks.benchmark import open_benchmark

    agent, given = _split(list(overrides or []))
    config = load_config("train", given, extra_dir=conf_dir).config
    if cfg == "config":
        text = config_yaml(config)
        return Answer(document={"config": text, "agent": agent}, view=lambda: text)
    _check_agent(agent)
    other = read_report(against) if against is not None else None
    data = config.eval.data or DEFAULT_DATA
    subset = "all" if config.eval.subset == BOTH else config.eval.subset
    benchmark = _open(config, subset=subset)
    if config.eval.subset == BOTH:  # A missing list is told before the work, not after it.
        open_benchmark(data, subset="hard", path=config.eval.path)
    request = _request(config, benchmark, agent, given, jobs=jobs, limit_s=deadline_s)
    _check_answers(request)
    if other is not None:
        check_comparable(other["facts"], request.facts)
    if cfg == "plan":
        return _plan_answer(request)
    return _evaluate(request, other)


def _open(config: "TrainConfig", *, subset: str) -> "Benchmark":
    from rlmix.tasks.benchmark import open_benchmark

    return open_benchmark(
        config.eval.data or DEFAULT_DATA,
        subset=subset,
        path=config.eval.path,
        limit=config.eval.limit,
        seed=config.tasks.seed,
    )


def _request(
    config: "TrainConfig",
    benchmark: "Benchmark",
    agent: str,
    given: list[str],
    *,
    jobs: int | None,
    limit_s: float | None,
) -> "EvalRequest":
    """Everything that is asked, checked."""
    from rlmix.cli.train import plan_of, stage_model
    from rlmix.evals.checkpoints import choose_policy
    from rlmix.evals.facts import facts_of
    from rlmix.evals.run import SESSIONS, EvalRequest
    from rlmix.evals.serving import served_plan

    kind = agent.partition(":")[0]
    policy = plan = None
    if kind == "policy":
        if config.eval.checkpoint is None:
            stage_model(config)
        policy = choose_policy(
            Path(config.run.dir),
            config.eval.checkpoint,
            model_path=config.model.path,
            is_model_given=any(one.startswith(("model.path=", "model=")) for one in given),
        )
        config = replace(config, model=replace(config.model, path=str(policy.folder)))
        plan = served_plan(plan_of(config), config)
    jobs = jobs or (config.eval.concurrency if kind in SESSIONS else DEFAULT_JOBS)
    name = config.run.name or _name(config.eval.data or DEFAULT_DATA, kind)
    return EvalRequest(
        config=config,
        benchmark=benchmark,
        agent=agent,
        folder=Path(config.run.dir) / name,
        facts=facts_of(config, benchmark, agent, jobs=jobs, policy=policy),
        jobs=jobs,
        limit_s=limit_s,
        policy=policy,
        plan=plan,
    )


def _plan_answer(request: "EvalRequest") -> Answer:
    from rlmix.cli.eval_view import plan_view
    from rlmix.evals.forecast import forecast
    from rlmix.loop.fleets import evaluating_pool

    plan = forecast(
        request.benchmark,
        request.facts,
        n=request.config.eval.n,
        jobs=request.jobs,
        pool=evaluating_pool(request.plan) if request.plan else None,
        replicas=sum(pool.replicas for pool in request.plan.pools.values()) if request.plan else 0,
    )
    return Answer(document=plan, view=lambda: plan_view(plan))


def _evaluate(request: "EvalRequest", other: dict[str, Any] | None) -> Answer:
    from rlmix.cli.eval_view import score_view
    from rlmix.cli.train import refuse_what_cannot_start
    from rlmix.evals.comparison import compare_reports
    from rlmix.evals.run import SCRATCH_PREFIX, evaluate
    from rlmix.evals.score_report import add_comparison
    from rlmix.evals.serving import served_config

    if request.plan is not None:
        refuse_what_cannot_start(request.plan, served_config(request.config))
    with tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX) as scratch, _progress() as watch:
        work = evaluate(replace(request, on_progress=watch), Path(scratch))
        result = asyncio.run(_stoppable(work))
    folder = request.folder
    document = {**result.report, "folder": str(folder), "is_whole": result.is_whole}
    if other is not None:
        document["against"] = compare_reports(other, result.report)
        add_comparison(folder, result.score, result.report, document["against"])
    if request.config.eval.subset == BOTH:
        document["hard"] = _hard(request)
    if not result.is_whole:
        needed = len(request.benchmark.tasks) * request.config.eval.n
        document["missing"] = needed - result.score.num_attempts
        document["stuck"] = [{"task_id": name, "s": round(s, 1)} for name, s in result.stuck]
    return Answer(
        document=document,
        view=lambda: score_view(result.score, document),
        code=ExitCode.GOOD if result.is_whole else ExitCode.CHECK_FAILED,
    )


async def _stoppable(work: Coroutine[Any, Any, "EvalResult"]) -> "EvalResult":
    """SIGTERM ends it as Ctrl-C does: a scheduler that asks politely finds nothing left."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    is_asked = False

    def stop() -> None:
        nonlocal is_asked
        is_asked = True
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, stop)
    try:
        return await task
    except asyncio.CancelledError:
        if is_asked:
            raise KeyboardInterrupt from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def _hard(request: "EvalRequest") -> dict[str, Any]:
    """The same attempts, scored on the hard tasks alone."""
    from rlmix.evals.ledger import read_attempts
    from rlmix.evals.score import document, score

    config = request.config
    hard = _open(config, subset="hard")
    attempts = read_attempts(request.folder)
    return document(score(hard.tasks, attempts, k=config.eval.k, n=config.eval.n))


def _check_agent(agent: str) -> None:
    """An agent that is none is told before a benchmark is read."""
    from rlmix.evals.agents import check_agent

    check_agent(agent)


def _check_answers(request: "EvalRequest") -> None:
    """A file that answers no task at all was made for another benchmark; one with fewer diffs of
    every task than attempts are asked for would fail the attempts that it lacks."""
    from rlmix.evals.agents import PredictionsAgent, open_agent
    from rlmix.evals.run import SESSIONS

    if request.agent.partition(":")[0] in SESSIONS:
        return
    opened = open_agent(request.agent)
    answered, n = opened.task_ids, request.config.eval.n
    known = [task.public.task_id for task in request.benchmark.tasks]
    if answered is not None and answered.isdisjoint(known):
        raise ConfigError(
            f"agent={request.agent}: none of its {len(answered)} task ids is in "
            f"{request.benchmark.name}; one of those there is {known[0]!r}"
        )
    if isinstance(opened, PredictionsAgent) and (most := opened.most_of(known)) < n:
        raise ConfigError(
            f"agent={request.agent}: holds at most {most} diff(s) of a task and eval.n={n}; those "
            f"missing would count as failed, so set eval.n={most} and eval.k={most} or less"
        )


def _split(given: list[str]) -> tuple[str, list[str]]:
    """(agent, the other overrides)."""
    agents = [one.removeprefix(AGENT_KEY) for one in given if one.startswith(AGENT_KEY)]
    rest = [one for one in given if not one.startswith(AGENT_KEY)]
    if len(agents) > 1:
        raise ConfigError(f"agent is given {len(agents)} times; give it once")
    return (agents[0] if agents else DEFAULT_AGENT), rest


def _name(data: str, kind: str) -> str:
    return f"eval-{data}-{kind}-{time.strftime('%Y%m%d-%H%M%S')}"


@contextlib.contextmanager
def _progress() -> Iterator[Any]:
    """A bar on stderr with the names of the attempts that run longest; without a terminal a line
    every half minute."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    told_s = time.monotonic()

    def line(state: "Progress") -> None:
        nonlocal told_s
        if state.running and time.monotonic() - told_s >= LINE_EVERY_S:
            told_s = time.monotonic()
            console.print(f"{state.done} of {state.needed} attempts; {_named(state)}", style="")

    if not console.is_terminal:
        yield line
        return
    with Bar(console=console, transient=True) as bar:
        row = bar.add_task("attempts", total=None)

        def watch(state: "Progress") -> None:
            text = f"attempts {_named(state)}"
            bar.update(row, completed=state.done, total=state.needed, description=text)

        yield watch


def _named(state: "Progress") -> str:
    names = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in state.running[:MAX_NAMED])
    more = len(state.running) - MAX_NAMED
    return f"{names}{f' and {more} more' if more > 0 else ''}"
