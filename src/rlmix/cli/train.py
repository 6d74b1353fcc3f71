"""`rlmix train`: compose, check, plan, and hand over to the loop."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rlmix.cli.answer import Answer, answered
from rlmix.cli.options import AsJson, ConfDir, Overrides
from rlmix.core.errors import ConfigError, ExitCode, PlanError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rlmix.config.schema.train import TrainConfig
    from rlmix.plan.model_facts import ModelFacts
    from rlmix.plan.runplan import RunPlan

Show = Annotated[
    Literal["config", "plan"] | None,
    typer.Option(
        "--cfg", metavar="config|plan", help="Print the configuration or the plan, and exit."
    ),
]
Resume = Annotated[
    str | None,
    typer.Option("--resume", metavar="RUN", help="Continue a run from its newest checkpoint."),
]
Detach = Annotated[
    bool, typer.Option("--detach", help="Start the run without this terminal, and come back.")
]

EXIT_CODES = {
    "finished": ExitCode.GOOD,
    "interrupted": ExitCode.INTERRUPTED,
    "failed": ExitCode.CHECK_FAILED,
}


@answered
def train(
    overrides: Overrides = None,
    cfg: Show = None,
    resume: Resume = None,
    detach: Detach = False,
    conf_dir: ConfDir = None,
    as_json: AsJson = False,
) -> Answer:
    """Train a policy on mixed pools.

    Samples on every pool, corrects for the difference, steps, publishes, and repeats. Without
    arguments: a whole run on this machine, with a closing evaluation.

    \b
    rlmix train experiment=tiny                        short, two pools
    rlmix train loop.steps=3 pools.h100.weights=bf16   change values
    rlmix train pools=two algo=grpo                    choose files of conf/
    rlmix train pools.h100.replicas=2 --cfg plan       look before you start
    rlmix train --detach                               leave it running; rlmix runs attach
    """
    from rlmix.config.compose import load_config
    from rlmix.config.render import config_yaml

    given = list(overrides or [])
    if resume is not None:
        given = _overrides_of(resume, given, conf_dir)
    config = load_config("train", given, extra_dir=conf_dir, judge=plan_problems).config
    if cfg == "config":
        return _show_config(config)
    if cfg == "plan":
        from rlmix.cli.plan_view import plan_view

        plan = compared(plan_of(config), config, conf_dir)
        return Answer(document=plan.to_dict(), view=lambda: plan_view(plan))
    refuse_what_cannot_run(config)
    stage_model(config)
    plan = plan_of(config)
    refuse_what_cannot_start(plan, config)
    if detach:
        return _detached(config, overrides or [], resume=resume, conf_dir=conf_dir)
    from rlmix.loop.train import run_training

    summary = run_training(
        plan,
        config,
        overrides=given,
        config_yaml=config_yaml(config),
        resume=resume,
        as_json=as_json,
    )
    document = summary.to_dict()

    def view() -> "RenderableType":
        from rlmix.observe.closing_table import closing_view

        return closing_view(document)

    return Answer(document=document, view=view, code=EXIT_CODES[summary.exit_reason])


def _detached(
    config: "TrainConfig", overrides: list[str], *, resume: str | None, conf_dir: Path | None
) -> Answer:
    from rlmix.cli.detach import start_detached

    document = start_detached(config, overrides, resume=resume, conf_dir=conf_dir)

    def view() -> "RenderableType":
        from rich.text import Text

        run, folder = document["run"], Path(str(document["run_dir"])).parent
        return Text(
            f"run {run} goes on without this terminal (process {document['pid']}), "
            f"in {document['run_dir']}\n"
            f"  rlmix runs attach {run} --dir {folder}\n"
            f"  rlmix runs logs {run} --dir {folder} --follow\n"
            f"  rlmix runs stop {run} --dir {folder}"
        )

    return Answer(document=document, view=view)


def plan_of(config: "TrainConfig") -> "RunPlan":
    """The plan of a checked configuration, for this interpreter and the one that has SGLang.

    Raises:
        ConfigError: `model.path` names no usable model.
        PlanError: sizes of the model cannot be read from its config.json, or something cannot be
            placed or run as asked.
    """
    from dataclasses import replace

    from rlmix.loop.preflight import argument_faults, interpreter
    from rlmix.loop.task_plan import tasks_plan
    from rlmix.plan.build import build_plan
    from rlmix.plan.refusals import refuse

    plan = build_plan(
        config,
        facts=facts_of(config),
        python=sys.executable,
        sglang_python=interpreter(config),
    )
    refuse(argument_faults(plan, config))
    return replace(plan, tasks=tasks_plan(config))


def stage_model(config: "TrainConfig") -> None:
    """A model of the Hub becomes a folder that all machines of the run see.

    Raises:
        DataError: it is not on this machine, and the Hub did not give it.
    """
    from rlmix.model.hub import fetch_model, is_remote

    if is_remote(config.model.path):
        folder = fetch_model(
            config.model.path, revision=config.model.revision, root=Path(config.run.dir).resolve()
        )
        config.model.path = str(folder)


def plan_problems(config: "TrainConfig") -> list[str]:
    """What a plan of this configuration would be refused for, one line each."""
    from rlmix.plan.build import plan_faults

    try:
        return plan_faults(config, facts_of(config))
    except (ConfigError, PlanError) as error:
        return [str(error)]


def facts_of(config: "TrainConfig") -> "ModelFacts":
    """Sizes of the policy: those that ship with rlmix for known model ids, else those of the
    folder's config.json. A plan of real servers needs no other file of the folder."""
    from rlmix.model.bundle import resolve_model
    from rlmix.model.hub import fetch_config, is_remote
    from rlmix.plan.model_facts import BUNDLED, bundled_facts, facts_from_file

    name = config.model.path
    if name in BUNDLED:
        return bundled_facts(name)
    if is_remote(name):
        return facts_from_file(name, fetch_config(name, revision=config.model.revision))
    path = Path(name).expanduser() / "config.json"
    is_planned_only = all(pool.engine != "embedded" for pool in config.pools.values())
    if not (is_planned_only and path.is_file()):
        path = resolve_model(name) / "config.json"
    return facts_from_file(name, path)


def compared(plan: "RunPlan", config: "TrainConfig", conf_dir: Path | None) -> "RunPlan":
    """The plan with that of `plan.against` beside it: the same run on the other experiment's pools.
    Where this run's accelerators are emulated its model is a stand-in, so the other experiment
    keeps its own and takes this run's prices.

    Raises:
        ConfigError, PlanError: the other experiment is not there, or cannot be planned.
    """
    from dataclasses import replace

    from rlmix.config.compose import load_config
    from rlmix.plan.comparison import compare

    experiment = config.plan.against
    if experiment is None:
        return plan
    other = load_config("train", [f"experiment={experiment}"], extra_dir=conf_dir).config
    other.accelerators |= config.accelerators
    if not plan.is_modelled:
        other = replace(
            config,
            accelerators=other.accelerators,
            pools=other.pools,
            inventory=other.inventory,
            plan=other.plan,
        )
    try:
        beside = plan_of(other)
    except PlanError as error:
        raise PlanError(
            f"plan.against={experiment} cannot be planned for this run; choose another experiment, "
            f"or plan.against=null: {error}"
        ) from error
    return replace(plan, against=compare(plan, beside, experiment=experiment))


def refuse_what_cannot_run(config: "TrainConfig") -> None:
    """Everything of a configuration that this version can plan but not start.

    Raises:
        ConfigError: there is any.
    """
    from rlmix.config.not_yet import cannot_run_yet
    from rlmix.config.problems import as_error

    if problems := list(cannot_run_yet(config)):
        raise as_error(problems)


def refuse_what_cannot_start(plan: "RunPlan", config: "TrainConfig") -> None:
    """What this machine lacks for the plan.

    Raises:
        PlanError: it lacks anything.
    """
    from rlmix.loop.preflight import start_faults
    from rlmix.plan.refusals import refuse

    faults = start_faults(plan, config)
    if plan.tasks is not None and plan.tasks.train:  # That there is none is among the faults.
        faults += [f"tasks: {one}" for one in plan.tasks.refusals]
    refuse(faults)


def _overrides_of(resume: str, given: list[str], conf_dir: Path | None) -> list[str]:
    """The arguments of the run that is continued, and after them those of this command."""
    from rlmix.config.compose import load_config
    from rlmix.observe.runs import find_run

    if named := [text for text in given if text.startswith("run.name=")]:
        raise ConfigError(
            f"{named[0]}: --resume continues the run under its own name; leave it out"
        )
    root = Path(load_config("train", given, extra_dir=conf_dir).config.run.dir)
    lines = (find_run(root, resume) / "overrides.txt").read_text().splitlines()
    return [line for line in lines if line.strip()] + given


def _show_config(config: "TrainConfig") -> Answer:
    from dataclasses import asdict

    from rlmix.config.render import config_yaml

    def view() -> "RenderableType":
        from rich.text import Text

        return Text(config_yaml(config).rstrip())

    return Answer(document=asdict(config), view=view)
