"""Pulls the images that a run's tasks need, on this machine or on every machine of a Ray cluster.

A machine has what its engine says it has; only the rest is pulled, a few at a time. Invariant: an
image that cannot be pulled is one line and keeps no other one from being pulled.
"""

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmix.config.schema.train import TrainConfig
from rlmix.core.errors import ConfigError
from rlmix.loop.task_plan import tasks_plan
from rlmix.plan.tasks import ENGINES

LOOK_S = 60.0
"""For an engine's answer whether it has an image."""
MARGIN_S = 120.0
"""For a machine's own start, on top of its pulls."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PullAsk:
    """What every machine is asked."""

    engine: str
    images: tuple[str, ...]
    jobs: int
    """Pulls at a time."""
    limit_s: float
    """For one pull."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulled:
    """What became of it on one machine."""

    machine: str
    has_engine: bool = False
    pulled: tuple[str, ...] = ()
    there: tuple[str, ...] = ()
    """That the engine had before."""
    failed: tuple[tuple[str, str], ...] = ()
    """(image, why)."""
    error: str | None = None
    """Why the machine did not answer."""

    @property
    def is_good(self) -> bool:
        return self.has_engine and not self.failed and self.error is None


def wanted_images(config: TrainConfig) -> tuple[str, ...]:
    """Of the tasks, and of sandboxes for tasks without one.

    Raises:
        ConfigError: the sandboxes use no images of an engine, or no image is named.
    """
    backend = config.sandbox.backend
    if backend not in ENGINES:
        raise ConfigError(
            f"tasks pull: sandbox.backend={backend} uses no images of a container engine, so there "
            f"is nothing to pull; allowed: {', '.join(ENGINES)}"
        )
    plan = tasks_plan(config)
    named = {*(() if plan is None else plan.images), config.sandbox.image or ""} - {""}
    if not named:
        raise ConfigError(
            f"tasks pull: no image is named: tasks.source={config.tasks.source} has none and "
            "sandbox.image is not set; give tasks.source and tasks.path of a prepared set, or "
            "sandbox.image"
        )
    return tuple(sorted(named))


def pull_everywhere(
    config: TrainConfig, ask: PullAsk, *, on_done: Callable[[str], None]
) -> list[Pulled]:
    """One answer for each machine that a run of this configuration would use.

    Args:
        on_done: told of each image here, or of each machine of a cluster.
    Raises:
        ConfigError: no machine has the engine.
        LaunchError: `launch.address` names a cluster that does not answer.
    """
    if config.launch.address is None:
        answers = [pull_here(ask, on_done=on_done)]
    else:
        answers = _of_cluster(config.launch.address, ask, on_done)
    if not any(answer.has_engine or answer.error for answer in answers):
        where = "this machine" if config.launch.address is None else f"all {len(answers)} machines"
        raise ConfigError(
            f"tasks pull: no `{ask.engine}` on PATH of {where}; install it, or take another "
            f"sandbox.backend ({', '.join(ENGINES)})"
        )
    return answers


def _of_cluster(address: str, ask: PullAsk, on_done: Callable[[str], None]) -> list[Pulled]:
    from rlmix.launch.each_node import ask_each_node

    rounds = -(-len(ask.images) // ask.jobs)
    answers = ask_each_node(
        address,
        pull_here,
        ask,
        limit_s=rounds * (ask.limit_s + LOOK_S) + MARGIN_S,
        on_answer=on_done,
    )
    return [
        Pulled(machine=answer.address, error=answer.error)
        if answer.error is not None
        else answer.facts
        for answer in answers
    ]


def pull_here(ask: PullAsk, *, on_done: Callable[[str], None] = lambda image: None) -> Pulled:
    """Blocks until every image is there or was given up."""
    machine = socket.gethostname()
    program = shutil.which(ask.engine)
    if program is None:
        return Pulled(machine=machine)
    pulled: list[str] = []
    there: list[str] = []
    failed: list[tuple[str, str]] = []
    with ThreadPoolExecutor(max_workers=ask.jobs, thread_name_prefix="pull") as pool:
        waiting = {
            pool.submit(_pull, ask.engine, program, image, ask.limit_s): image
            for image in ask.images
        }
        for one in as_completed(waiting):
            image, (was_there, why) = waiting[one], one.result()
            if why:
                failed.append((image, why))
            else:
                (there if was_there else pulled).append(image)
            on_done(image)
    return Pulled(
        machine=machine,
        has_engine=True,
        pulled=tuple(sorted(pulled)),
        there=tuple(sorted(there)),
        failed=tuple(sorted(failed)),
    )


def _pull(engine: str, program: str, image: str, limit_s: float) -> tuple[bool, str]:
    """(it was there, why it could not be pulled)."""
    if engine == "apptainer":
        return _pull_into_cache(program, image, limit_s)
    if not _run([program, "image", "inspect", image], LOOK_S):
        return True, ""
    return False, _run([program, "pull", "--quiet", image], limit_s)


def _pull_into_cache(program: str, image: str, limit_s: float) -> tuple[bool, str]:
    """Apptainer has a cache for what lies elsewhere, and files by their path."""
    if "://" not in image:
        is_there = Path(image).exists()
        return is_there, "" if is_there else "there is no such file; write docker://NAME to pull it"
    with tempfile.TemporaryDirectory(prefix="rlmix-pull-") as folder:
        return False, _run([program, "pull", "--force", f"{folder}/image.sif", image], limit_s)


def _run(command: list[str], limit_s: float) -> str:
    """Empty when it went well, else one line that says why not."""
    environment: dict[str, Any] = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=limit_s, check=False, env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"not done after {limit_s:g} s; raise --timeout"
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    if done.returncode == 0:
        return ""
    lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {done.returncode}"
