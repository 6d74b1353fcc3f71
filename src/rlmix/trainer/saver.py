"""Checkpoints beside the training: a copy in main memory now, files while the next step runs.

One owner, one save at a time: a second one waits for the first. Invariant: what is written is the
state at the call, whatever the trainer does meanwhile; a save that failed is an error at the next
call, never a checkpoint.
"""

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rlmix.core.errors import TrainerError
from rlmix.trainer.checkpoint import prune_checkpoints, save_checkpoint
from rlmix.trainer.spec import SaveReport
from rlmix.weights.files import HeldFiles
from rlmix.weights.writers import ALONE, Writers

SAVE_LIMIT_S = 1800.0
"""Longest that a save may take before waiting for it is given up."""


class Saver:
    """Every rank of a trainer has one, made at the same point."""

    def __init__(self, folder: Path, *, keep: int, writers: Writers = ALONE) -> None:
        """
        Args:
            keep: newest complete checkpoints that stay.
            writers: with a group that nobody else uses: it is used by a thread of its own.
        """
        self._folder = folder
        self._keep = keep
        self._writers = writers
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._finished: list[SaveReport] = []

    def start(
        self,
        *,
        step: int,
        version: int,
        model_state: HeldFiles,
        model_files: Path,
        optimizer_state: Mapping[str, Tensor],
        random_state: Tensor,
        extra: Mapping[str, Any],
    ) -> Path:
        """Copy everything and write it in the background; arguments as of `save_checkpoint`.

        Returns:
            Where the checkpoint will be.
        Raises:
            TrainerError: the save before this one failed or does not end.
        """
        started_s = time.perf_counter()
        self.wait()
        held = {name: snapshot(tensor) for name, tensor in optimizer_state.items()}
        held_random = random_state.clone()
        blocked_s = time.perf_counter() - started_s

        def write() -> Path:
            return save_checkpoint(
                self._folder,
                step=step,
                version=version,
                model_state=model_state,
                model_files=model_files,
                optimizer_state=held,
                random_state=held_random,
                extra=extra,
                writers=self._writers,
            )

        self._thread = threading.Thread(
            target=self._run, args=(write, step, blocked_s), name="checkpoint", daemon=True
        )
        self._thread.start()
        return self._folder / f"step_{step:06d}"

    def _run(self, write: Callable[[], Path], step: int, blocked_s: float) -> None:
        started_s = time.perf_counter()
        try:
            path = write()
            if self._writers.rank == 0:
                prune_checkpoints(self._folder, self._keep)
                num_bytes = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
                self._finished.append(
                    SaveReport(
                        path=str(path),
                        step=step,
                        num_bytes=num_bytes,
                        blocked_s=blocked_s,
                        write_s=time.perf_counter() - started_s,
                    )
                )
        except BaseException as error:
            self._error = error

    def wait(self) -> None:
        """Until nothing is being written.

        Raises:
            TrainerError: the save failed, or did not end within `SAVE_LIMIT_S`.
        """
        if self._thread is not None:
            self._thread.join(SAVE_LIMIT_S)
            if self._thread.is_alive():
                raise TrainerError(
                    f"trainer: a checkpoint is not written after {SAVE_LIMIT_S:g} s; look at the "
                    f"disk of {self._folder}"
                )
            self._thread = None
        self._raise_failure()

    def finished(self) -> list[SaveReport]:
        """What was finished since the last call; does not wait.

        Raises:
            TrainerError: a save failed.
        """
        self._raise_failure()
        done, self._finished = self._finished, []
        return done

    def _raise_failure(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise TrainerError(
                f"trainer: a checkpoint could not be written to {self._folder}: {error}; the one "
                "before it is complete"
            ) from error


def snapshot(tensor: Tensor) -> Tensor:
    """A copy in main memory that nothing else changes; a DTensor stays one, on the CPU."""
    copied = tensor.detach().to("cpu")
    return copied.clone() if copied.device == tensor.device else copied
