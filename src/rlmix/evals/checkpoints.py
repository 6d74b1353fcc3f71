"""Which policy is judged: a checkpoint of a run, what a run started from, or a model folder.

Invariant: what is chosen is one folder in Hugging Face's form that nothing changes any more, and a
digest of its files stands beside every number about it.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmix.core.errors import ConfigError
from rlmix.loop.resume import EVAL_KEPT
from rlmix.model.bundle import resolve_model
from rlmix.observe.runs import find_run
from rlmix.weights.store import list_versions, version_dir

BEST = "best"
EVALUATIONS = "evaluations"
"""Folder of a run with the evaluations that were made while it trained."""
BEST_FILE = "best.json"
VIEW = "bf16"


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyChoice:
    """A policy to judge."""

    folder: Path
    step: int
    """Optimizer steps behind it; also the version under which it is served."""
    label: str
    """For people: run and step, or the model folder."""
    digest: str
    """SHA-256 over its weight files and config."""


def choose_policy(
    root: Path, checkpoint: str | None, *, model_path: str, is_model_given: bool
) -> PolicyChoice:
    """The policy that was asked for.

    Args:
        root: folder of all runs.
        checkpoint: `RUN`, `RUN:STEP`, `RUN:0` or `RUN:best`; None: the model, where one was given,
            else the newest checkpoint of the newest run.
        model_path: `model.path`.
        is_model_given: it was asked for, and is not just the default.

    Raises:
        ConfigError: there is no such run, checkpoint or model.
    """
    if checkpoint is None and is_model_given:
        folder = resolve_model(model_path)
        return _choice(folder, step=0, label=model_path)
    name, _, part = (checkpoint or "").rpartition(":") if _has_part(checkpoint) else (
        checkpoint or "", "", "",
    )  # fmt: skip
    try:
        run = find_run(root, name or None)
    except ConfigError as error:
        raise ConfigError(
            f"eval.checkpoint={checkpoint or 'null'}: {error}; or set model.path=bundled:tiny"
        ) from None
    folder, step = _folder(run, part, checkpoint or "null")
    return _choice(folder, step=step, label=f"{run.name}:{step}")


def _has_part(checkpoint: str | None) -> bool:
    return bool(re.search(rf":({BEST}|\d+)$", checkpoint or ""))


def _folder(run: Path, part: str, asked: str) -> tuple[Path, int]:
    from rlmix.trainer.checkpoint import newest_complete

    if part == BEST:
        return best_version(run, asked)
    if not part:
        newest = newest_complete(run / "checkpoints")
        if newest is None:
            raise ConfigError(
                f"eval.checkpoint={asked}: {run} has no complete checkpoint yet; wait for one, or "
                f"take what it started from with eval.checkpoint={run.name}:0"
            )
        return newest, _step(newest)
    step = int(part)
    places = [
        run / "checkpoints" / f"step_{step:06d}",
        version_dir(run / EVAL_KEPT, VIEW, step),
        version_dir(run / EVALUATIONS / "weights", VIEW, step),
    ]
    for place in places:
        if (place / "manifest.json").is_file():
            return place, step
    if step == 0:
        return _warm_start(run), 0
    raise ConfigError(f"eval.checkpoint={asked}: {run} holds no step {step}; it holds {_held(run)}")


def best_version(run: Path, asked: str = BEST) -> tuple[Path, int]:
    """The version that did best in the evaluations of a run.

    Raises:
        ConfigError: the run made none.
    """
    file = run / EVALUATIONS / BEST_FILE
    try:
        step = int(json.loads(file.read_text())["step"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"eval.checkpoint={asked}: {run} has made no evaluation; train with "
            f"eval.every_steps=5, or name a step: {_held(run)}"
        ) from None
    return version_dir(run / EVALUATIONS / "weights", VIEW, step), step


def _held(run: Path) -> str:
    from rlmix.trainer.checkpoint import list_checkpoints

    steps = {_step(path) for path in list_checkpoints(run / "checkpoints")}
    for store in (run / EVAL_KEPT, run / EVALUATIONS / "weights"):
        steps |= set(list_versions(store, VIEW))
    return ", ".join(map(str, sorted(steps | {0})))


def _warm_start(run: Path) -> Path:
    """The model folder that the run's configuration names."""
    match = re.search(
        r"^model:\n(?:[ #].*\n)*?  path: (.+)$", (run / "config.yaml").read_text(), re.MULTILINE
    )
    if match is None:
        raise ConfigError(f"{run}/config.yaml names no model.path; set model.path=FOLDER")
    return resolve_model(match[1].strip().strip("'\""))


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def _choice(folder: Path, *, step: int, label: str) -> PolicyChoice:
    return PolicyChoice(folder=folder, step=step, label=label, digest=weights_digest(folder))


def weights_digest(folder: Path) -> str:
    """SHA-256 over config and weight files, by name; optimizer state is no part of a policy."""
    digest = hashlib.sha256()
    for file in [folder / "config.json", *sorted(folder.glob("model*.safetensors"))]:
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def publish_policy(choice: PolicyChoice, store: Path) -> None:
    """Write the policy as a version that replicas can load: BF16, checksummed, immutable.

    Raises:
        DataError, WeightSyncError: its weights cannot be written as BF16.
    """
    from safetensors.torch import load_file

    from rlmix.loop.evaluation import keep_version
    from rlmix.weights.publish import publish_version

    if choice.folder == version_dir(choice.folder.parents[1], VIEW, choice.step):
        keep_version(choice.folder.parents[1], store, choice.step)  # It is one already.
        return
    state: dict[str, Any] = {}
    for file in sorted(choice.folder.glob("model*.safetensors")):
        state |= {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    publish_version(
        state, version=choice.step, store=store, views=[VIEW], model_files=choice.folder
    )
