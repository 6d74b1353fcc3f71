"""Where a resumed run continues: one decision, made once, written down, and passed on.

Invariant: metrics, trajectories and published versions above the chosen checkpoint's step are set
aside before anything runs, so no step is counted twice and no version has two contents.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmix.observe.run_dir import RunDir

EVAL_KEPT = "evaluation"
"""Folder of the run with the versions that the closing evaluation compares."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumePoint:
    """What the trainer loads, and how far the run was."""

    folder: Path
    """Checkpoint folder, or the model folder when the run died before its first checkpoint."""
    step: int
    reason: str


def choose_point(run: RunDir, model_folder: Path) -> ResumePoint:
    """The newest complete checkpoint; damaged and unfinished ones are passed over."""
    from rlmix.trainer.checkpoint import newest_complete

    newest = newest_complete(run.checkpoints)
    if newest is None:
        return ResumePoint(folder=model_folder, step=0, reason="no complete checkpoint")
    step = int(newest.name.removeprefix("step_"))
    return ResumePoint(folder=newest, step=step, reason=f"newest complete checkpoint {newest.name}")


def set_aside(run: RunDir, point: ResumePoint, *, remote_url: str = "") -> dict[str, Any]:
    """Remove what lies beyond `point`, in the remote store too; returns what was removed, for the
    event log."""
    from rlmix.loop.side_evaluation import discard_evaluations
    from rlmix.weights.store import discard_newer

    dropped = run.truncate_after(point.step)
    versions = discard_newer(run.weights, point.step)
    discard_newer(run.path / EVAL_KEPT, point.step)
    discard_evaluations(run.path, point.step)
    if remote_url:
        from rlmix.weights.remote import RemoteStore

        RemoteStore(remote_url).discard_newer(point.step)
    return {"dropped_steps": dropped, "dropped_versions": versions}
