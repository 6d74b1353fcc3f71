"""`rlmix train`: compose, check, plan, and hand over to the loop."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rlmix.cli.answer import Answer, answered
from rlmix.cli.options import AsJson, ConfDir, Overrides
from rlmix.core.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rlmix.config.schema.train import TrainConfig
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
    """
    from rlmix.config.compose import load_config
    from rlmix.config.render import config_yaml

    given = list(overrides or [])
    if resume is not None:
        given = _overrides_of(resume, given, conf_dir)
    config = load_config("train", given, extra_dir=conf_dir).config
    if cfg == "config":
        return _show_config(config)
    plan = plan_of(config)
    if cfg == "plan":
        from rlmix.cli.plan_view import plan_view

        return Answer(document=plan.to_dict(), view=lambda: plan_view(plan))
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


def plan_of(config: "TrainConfig") -> "RunPlan":
    """The plan of a checked configuration, for this interpreter.

    Raises:
        ConfigError: `model.path` names no usable model folder.
        PlanError: sizes of the model cannot be read from its config.json.
    """
    import json

    from rlmix.model.bundle import resolve_model
    from rlmix.plan.build import build_plan
    from rlmix.plan.model_shape import shape_from_config

    path = resolve_model(config.model.path) / "config.json"
    shape = shape_from_config(config.model.path, json.loads(path.read_text()))
    return build_plan(config, shape=shape, python=sys.executable)


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
