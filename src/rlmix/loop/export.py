"""`rlmix runs export RUN DIR`: the policy of a run, to be loaded elsewhere."""

from pathlib import Path

from rlmix.trainer.export import Exported, export_checkpoint


def export_run(run: Path, *, step: int | None, target: Path) -> Exported:
    """Errors as of `trainer.export.export_checkpoint`."""
    return export_checkpoint(run / "checkpoints", step=step, target=target.absolute())
