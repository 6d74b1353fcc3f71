"""`rlmix tasks pull`: the images of a run's tasks, on every machine, before the run."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlmix.cli.answer import Answer, answered
from rlmix.cli.options import AsJson, ConfDir, Overrides
from rlmix.core.errors import ExitCode

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rlmix.loop.image_pull import Pulled

Jobs = Annotated[
    int, typer.Option("--jobs", min=1, max=64, help="Pulls at a time on each machine.")
]
Timeout = Annotated[float, typer.Option("--timeout", min=1, help="Seconds of one pull.")]


@answered
def pull(
    overrides: Overrides = None,
    jobs: Jobs = 4,
    timeout_s: Timeout = 1800.0,
    conf_dir: ConfDir = None,
    as_json: AsJson = False,
) -> Answer:
    """Pull the images that a run's tasks need, on every machine of its cluster.

    Takes the keys of `rlmix train`; what an engine has already is not pulled again.

    \b
    rlmix tasks pull sandbox.backend=docker tasks.source=r2e tasks.path=SET
    rlmix tasks pull sandbox.backend=podman tasks.source=r2e tasks.path=SET launch=ray
    """
    from rlmix.config.compose import load_config
    from rlmix.loop.image_pull import PullAsk, pull_everywhere, wanted_images

    config = load_config("train", list(overrides or []), extra_dir=conf_dir).config
    images = wanted_images(config)
    ask = PullAsk(engine=config.sandbox.backend, images=images, jobs=jobs, limit_s=timeout_s)
    with progress("pulled", None if config.launch.address else len(images)) as step:
        found = pull_everywhere(config, ask, on_done=step)
    return Answer(
        document={
            "engine": ask.engine,
            "images": list(images),
            "machines": [
                {**asdict(one), "failed": [{"image": i, "why": w} for i, w in one.failed]}
                for one in found
            ],
        },
        view=lambda: _view(found, len(images)),
        code=ExitCode.GOOD if all(one.is_good for one in found) else ExitCode.CHECK_FAILED,
    )


def _view(found: "list[Pulled]", num_images: int) -> "RenderableType":
    from rich.text import Text

    lines = []
    for one in found:
        if one.error is not None:
            lines.append(f"no {one.machine}: {one.error}")
        elif not one.has_engine:
            lines.append(f"no {one.machine}: the engine is not on its PATH; install it there")
        else:
            good = len(one.pulled) + len(one.there)
            lines.append(
                f"{'ok' if one.is_good else 'no'} {one.machine}: {good} of {num_images} images, "
                f"{len(one.pulled)} of them pulled now"
            )
        lines += [f"   {image}: {why}" for image, why in one.failed]
    return Text("\n".join(lines))


class progress:
    """A bar on stderr while tasks are worked on, with the name of the last one begun."""

    def __init__(self, verb: str, total: int | None = None) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._bar = Progress(console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(verb, total=total)
        self._verb = verb

    def __enter__(self) -> Any:
        self._bar.start()
        return self._step

    def _step(self, task_id: str) -> None:
        self._bar.update(self._task, advance=1, description=f"{self._verb} {task_id}")

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
