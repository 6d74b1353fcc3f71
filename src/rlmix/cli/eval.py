"""`rlmix eval swe-bench-pro`: judge an agent on a benchmark, each attempt once."""

import asyncio
import contextlib
import hashlib
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rlmix.cli.answer import Answer, answered
from rlmix.cli.options import AsJson, ConfDir, Overrides
from rlmix.core.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rlmix.config.schema.train import TrainConfig
    from rlmix.evals.attempts import Attempts, Progress
    from rlmix.evals.score import Score
    from rlmix.tasks.benchmark import Benchmark

app = typer.Typer(help="Judge a checkpoint, or diffs made elsewhere.", no_args_is_help=True)

AGENT_KEY = "agent="
BOTH = "all+hard"
DEFAULT_AGENT, DEFAULT_DATA = "gold", "mini"
MEMORY_MIB, DISK_MIB, PIDS = 4096, 2048, 512
COMMAND_S = 300.0
MAX_NAMED = 3
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
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Attempts at a time.")] = 2,
    deadline_s: Annotated[
        float | None, typer.Option("--deadline", min=1, help="Seconds for all of it.")
    ] = None,
    conf_dir: ConfDir = None,
    as_json: AsJson = False,
) -> Answer:
    """pass@k on SWE-bench Pro: bundled tasks, or a prepared set.

    \b
    rlmix eval swe-bench-pro agent=gold                     references of the bundled tasks: 1.0
    rlmix eval swe-bench-pro agent=empty                    no change: 0.0
    rlmix eval swe-bench-pro agent=predictions:FILE         diffs made elsewhere
    rlmix eval swe-bench-pro eval.data=swe_bench_pro_v2 eval.path=FOLDER agent=gold

    Asked again under the same run.name, it goes on where it stopped.
    """
    from rlmix.config.compose import load_config
    from rlmix.config.render import config_yaml
    from rlmix.evals.agents import open_agent
    from rlmix.tasks.benchmark import open_benchmark

    agent_text, given = _split(list(overrides or []))
    config = load_config("train", given, extra_dir=conf_dir).config
    if cfg == "config":
        text = config_yaml(config)
        return Answer(document={"config": text, "agent": agent_text}, view=lambda: text)
    agent = open_agent(agent_text)
    data = config.eval.data or DEFAULT_DATA
    whole = BOTH if config.eval.subset == BOTH else ""
    subset = "all" if whole else config.eval.subset
    benchmark = open_benchmark(data, subset=subset, path=config.eval.path)
    if whole:  # A missing list is told before the work, not after it.
        open_benchmark(data, subset="hard", path=config.eval.path)
    _check_ids(agent_text, agent.task_ids, benchmark)
    k, n = config.eval.k, config.eval.n
    facts = facts_of(config, benchmark, agent_text, jobs=jobs)
    if cfg == "plan":
        plan = _plan(benchmark, facts, n=n, jobs=jobs)
        return Answer(document=plan, view=lambda: _plan_view(plan))
    folder = Path(config.run.dir) / (config.run.name or _name(data, agent_text))
    with tempfile.TemporaryDirectory(prefix="rlmix-eval-") as scratch:
        is_whole, result, found = asyncio.run(
            _evaluate(
                config,
                benchmark,
                agent,
                folder,
                Path(scratch),
                facts,
                jobs=jobs,
                limit_s=deadline_s,
            )
        )
    document = {**found, "folder": str(folder), "is_whole": is_whole}
    if whole:
        document["hard"] = _hard(config, data, folder)
    if not is_whole:
        document["missing"] = len(benchmark.tasks) * n - result.num_attempts
    return Answer(
        document=document,
        view=lambda: _view(result, folder, k=k, is_whole=is_whole),
        code=ExitCode.GOOD if is_whole else ExitCode.CHECK_FAILED,
    )


def _hard(config: "TrainConfig", data: str, folder: Path) -> dict[str, Any]:
    """The same attempts, scored on the hard tasks alone."""
    from rlmix.evals.ledger import read_attempts
    from rlmix.evals.score import document, score
    from rlmix.tasks.benchmark import open_benchmark

    hard = open_benchmark(data, subset="hard", path=config.eval.path)
    attempts = read_attempts(folder)
    return document(score(hard.tasks, attempts, k=config.eval.k, n=config.eval.n))


def _check_ids(agent: str, answered: frozenset[str] | None, benchmark: "Benchmark") -> None:
    """A file that answers no task at all was made for another benchmark."""
    known = [task.public.task_id for task in benchmark.tasks]
    if answered is not None and answered.isdisjoint(known):
        raise ConfigError(
            f"agent={agent}: none of its {len(answered)} task ids is in {benchmark.name}; one of "
            f"those there is {known[0]!r}"
        )


def _split(given: list[str]) -> tuple[str, list[str]]:
    """(agent, the other overrides)."""
    agents = [one.removeprefix(AGENT_KEY) for one in given if one.startswith(AGENT_KEY)]
    rest = [one for one in given if not one.startswith(AGENT_KEY)]
    if len(agents) > 1:
        raise ConfigError(f"agent is given {len(agents)} times; give it once")
    return (agents[0] if agents else DEFAULT_AGENT), rest


def _name(data: str, agent: str) -> str:
    kind = agent.partition(":")[0]
    return f"eval-{data}-{kind}-{time.strftime('%Y%m%d-%H%M%S')}"


def facts_of(
    config: "TrainConfig", benchmark: "Benchmark", agent: str, *, jobs: int
) -> dict[str, Any]:
    """Everything that a number depends on."""
    from importlib.metadata import version

    from rlmix.evals.agents import file_digest

    ids = [task.public.task_id for task in benchmark.tasks]
    return {
        "benchmark": benchmark.name,
        "revision": benchmark.revision,
        "checksum": benchmark.checksum,
        "tasks": len(benchmark.tasks),
        "excluded_tasks": benchmark.num_excluded,
        "task_ids": hashlib.sha256("\n".join(sorted(ids)).encode()).hexdigest(),
        "agent": agent,
        "agent_file": file_digest(agent),
        "k": config.eval.k,
        "n": config.eval.n,
        "sandbox": config.sandbox.backend,
        "network": "none for the agent and the tests",
        "verdict": "in a fresh sandbox; only the diff crosses over",
        "jobs": jobs,
        "cpus": len(os.sched_getaffinity(0)),
        "rlmix": version("rlmix"),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


async def _evaluate(
    config: "TrainConfig",
    benchmark: "Benchmark",
    agent: Any,
    folder: Path,
    scratch: Path,
    facts: dict[str, Any],
    *,
    jobs: int,
    limit_s: float | None,
) -> "tuple[bool, Score, dict[str, Any]]":
    from rlmix.evals.attempts import Attempts
    from rlmix.evals.ledger import Ledger
    from rlmix.evals.score import score
    from rlmix.evals.score_report import write_score_report
    from rlmix.sandbox.backend import open_backend
    from rlmix.sandbox.protocol import SandboxLimits

    asked = ("benchmark", "checksum", "task_ids", "agent", "agent_file", "k", "n")
    limits = SandboxLimits(
        memory_mib=max(MEMORY_MIB, config.sandbox.memory_mib),
        pids=PIDS,
        disk_mib=DISK_MIB,
        output_chars=config.sandbox.output_chars,
        command_timeout_s=COMMAND_S,
    )
    backend = await open_backend(
        config.sandbox.backend,
        limits,
        scratch,
        f"eval{os.getpid()}",
        allow_unisolated=config.sandbox.allow_unisolated,
    )
    facts = {**facts, "sandbox": backend.name}
    ledger = None
    try:
        ledger = Ledger(folder, {name: facts[name] for name in asked})
        with _progress() as watch:
            attempts = Attempts(
                benchmark=benchmark,
                agent=agent,
                backend=backend,
                ledger=ledger,
                per_task=config.eval.n,
                jobs=jobs,
                on_progress=watch,
            )
            is_whole = await _make(attempts, limit_s)
        result = score(benchmark.tasks, ledger.attempts.values(), k=config.eval.k, n=config.eval.n)
        is_reference = benchmark.name.startswith("swe_bench_pro_v2")
        found = write_score_report(
            ledger, result, {**facts, "is_whole": is_whole}, is_reference_data=is_reference
        )
        return is_whole, result, found
    finally:
        if ledger is not None:
            ledger.close()
        await backend.close()


async def _make(attempts: "Attempts", limit_s: float | None) -> bool:
    return await attempts.make(limit_s)


@contextlib.contextmanager
def _progress() -> Iterator[Any]:
    """A bar on stderr, with the names of the attempts that run longest."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        row = bar.add_task("attempts", total=None)

        def watch(state: "Progress") -> None:
            names = ", ".join(state.running[:MAX_NAMED])
            more = len(state.running) - MAX_NAMED
            text = f"attempts {names}{f' and {more} more' if more > 0 else ''}"
            bar.update(row, completed=state.done, total=state.needed, description=text)

        yield watch


def _plan(benchmark: "Benchmark", facts: dict[str, Any], *, n: int, jobs: int) -> dict[str, Any]:
    """What an evaluation would do at most, before it starts."""
    from rlmix.tasks.benchmark import repositories

    agent_s = sum(task.agent_s for task in benchmark.tasks) * n
    verify_s = sum(task.verify_s for task in benchmark.tasks) * n
    return {
        **facts,
        "attempts": len(benchmark.tasks) * n,
        "at_most_h": round((agent_s + verify_s) / jobs / 3600, 2),
        "repositories": repositories(benchmark.tasks),
        "images": "none: repositories are bundled or prepared",
        "cost_usd": 0.0,
    }


def _plan_view(plan: dict[str, Any]) -> "RenderableType":
    from rich.table import Table

    table = Table("what", "value", title="evaluation")
    for name, value in plan.items():
        shown = f"{len(value)} repositories" if isinstance(value, dict) else str(value)
        table.add_row(name, shown)
    return table


def _view(result: "Score", folder: Path, *, k: int, is_whole: bool) -> "RenderableType":
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table("", "value", "95 % over tasks", "tasks", "void as failed")
    rows = (
        ("pass@1", result.pass_at_1, result.pass_at_1_void_failed),
        (f"pass@{k}", result.pass_at_k, result.pass_at_k_void_failed),
    )
    for name, one, other in rows:
        interval = f"{one.low:.3f} to {one.high:.3f}"
        table.add_row(name, f"{one.value:.3f}", interval, str(one.num_tasks), f"{other.value:.3f}")
    lines = [Text(f"{folder / 'report.md'}")]
    if not is_whole:
        lines.insert(0, Text("stopped at the deadline; run it again to go on", style="yellow"))
    if result.num_void:
        lines.insert(0, Text(f"{result.num_void} attempts are void", style="yellow"))
    return Group(table, *lines)
