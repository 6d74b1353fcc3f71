"""Evaluates every N-th version of a run while the run goes on, and remembers the best.

Who fills the queue: the training loop, which offers a version after it was published and goes on
at once. What unblocks it: one task here, which has an eval pool, a router and an evaluator of its
own. Invariants: the training loop never waits for an evaluation; a version that was offered stays
on disk until it was evaluated, however often the run prunes; while an evaluation runs its pool
serves that version only; a failed evaluation is an event and nothing else.
"""

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

from rlmix.core.errors import RlmixError
from rlmix.evals.checkpoints import BEST_FILE, EVALUATIONS, VIEW, weights_digest
from rlmix.evals.saturation import LOOK_EVERY_S, Load, load_of, saturation
from rlmix.observe.jsonl import JsonlWriter, read_jsonl, replace_jsonl, write_atomically
from rlmix.pools.callbacks import OnEvent
from rlmix.pools.spec import ReplicaStatus
from rlmix.weights.store import discard_newer, list_versions, remove_folder, version_dir

ROWS_FILE = "evaluations.jsonl"
STORE = "weights"
CATCH_UP_S = 300.0
EVALUATE = Callable[[str, int, str], Awaitable[dict[str, Any]]]
"""(folder, version, digest of its weights) -> what came of it."""


class ServingPool(Protocol):
    """What is asked of the eval pool's fleet."""

    async def start(self, version: int) -> None: ...

    async def roll_out(self, version: int) -> None: ...

    async def wait_for_version(self, version: int, *, timeout_s: float) -> None: ...

    def status(self) -> list[ReplicaStatus]: ...


class SideEvaluation:
    """One task; `offer` from the training loop, `finish` or `stop` at its end."""

    def __init__(
        self,
        run_path: Path,
        *,
        every_steps: int,
        store: Path,
        keep: Callable[[Path, Path, int], None],
        fleet: ServingPool,
        evaluate: EVALUATE,
        on_event: OnEvent,
        places: int,
    ) -> None:
        """
        Args:
            places: requests that the eval pool works on at a time.
            store: the run's published versions.
            keep: copies a version from one store to another without reading its weights.
        """
        self.folder = run_path / EVALUATIONS
        self.folder.mkdir(exist_ok=True)
        self._store, self._kept = store, self.folder / STORE
        self._every_steps = every_steps
        self._keep = keep
        self._fleet = fleet
        self._evaluate = evaluate
        self._on_event = on_event
        self._places = places
        self._is_serving = False
        self._offered: list[int] = []
        self._changed = asyncio.Event()
        self._is_last_offered = False
        self._writer = JsonlWriter(self.folder / ROWS_FILE)
        self._done = {int(row["step"]) for row in read_rows(run_path)}
        self._task: asyncio.Task[None] | None = None
        self.running: int | None = None
        """Version under evaluation now."""

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="side evaluation")

    def offer(self, version: int, *, is_last: bool = False) -> None:
        """A version was published. Evaluated when it is due; returns at once."""
        is_due = version % self._every_steps == 0 or is_last
        if not is_due or version in self._done or version in self._offered:
            return
        self._keep(self._store, self._kept, version)
        self._offered.append(version)
        self._changed.set()

    async def finish(self) -> None:
        """Let what was offered be evaluated; raises what a bug of ours raised."""
        self._is_last_offered = True
        self._changed.set()
        if self._task is not None:
            await self._task
        self._writer.close()

    async def stop(self) -> None:
        """End now; what is in the ledger of an evaluation is taken up by a resumed run."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._writer.close()

    async def _run(self) -> None:
        while True:
            while not self._offered:
                if self._is_last_offered:
                    return
                self._changed.clear()
                await self._changed.wait()
            version = self._choose()
            self.running = version
            try:
                await self._one(version)
            except (RlmixError, TimeoutError) as error:
                said = str(error) or "it took too long"
                self._on_event("evaluation_failed", said.split("\n")[0], step=version)
            finally:
                self.running = None
            self._prune()

    def _choose(self) -> int:
        """The newest; older ones that waited behind a slow evaluation are passed over, not piled
        up, and counted. The first version is the curve's origin and never passed over."""
        if 0 in self._offered:
            self._offered.remove(0)
            return 0
        *passed_over, version = sorted(self._offered)
        self._offered.clear()
        for step in passed_over:
            self._on_event(
                "evaluation_skipped", "the one before took longer than the steps", step=step
            )
        return version

    async def _one(self, version: int) -> None:
        started_s = time.time()
        if self._is_serving:
            await self._fleet.roll_out(version)
        else:
            await self._fleet.start(version)
            self._is_serving = True
        await self._fleet.wait_for_version(version, timeout_s=CATCH_UP_S)
        place = version_dir(self._kept, VIEW, version)
        digest = await asyncio.to_thread(weights_digest, place)
        self._on_event("evaluation_started", "as configured", step=version)
        looks: list[Load] = []
        looking = asyncio.create_task(self._look(looks), name="eval load")
        try:
            found = await self._evaluate(str(self.folder / f"step_{version:06d}"), version, digest)
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
        row = {
            "step": version,
            **found,
            "policy_sha256": digest,
            "saturation": saturation(looks, places=self._places),
            "is_unchanged": await asyncio.to_thread(weights_digest, place) == digest,
            "started_s": round(started_s, 3),
            "wall_s": round(time.time() - started_s, 3),
        }
        self._writer.append(row)
        self._done.add(version)
        best = best_of([*read_rows(self.folder.parent)])
        if best is not None:
            write_best(self.folder, best)
        low, high = found["ci95"]
        said = f"pass@1 {found['pass_at_1']:.3f} ({low:.3f} to {high:.3f})"
        self._on_event("evaluation_done", said, step=version, wall_s=row["wall_s"])

    async def _look(self, looks: list[Load]) -> None:
        while True:
            looks.append(load_of(self._fleet.status()))
            await asyncio.sleep(LOOK_EVERY_S)

    def _prune(self) -> None:
        """Versions that nobody needs: neither the first, the best nor one that waits."""
        best = best_of([*read_rows(self.folder.parent)])
        wanted = {0, *self._offered, *([] if best is None else [int(best["step"])])}
        # The newest is what a replica that is replaced boots from.
        versions = list_versions(self._kept, VIEW)
        for version in versions[:-1]:
            if version not in wanted:
                remove_folder(version_dir(self._kept, VIEW, version))


def read_rows(run_path: Path) -> list[dict[str, Any]]:
    """Evaluations of a run, one per step, in the order in which they were made."""
    rows = read_jsonl(run_path / EVALUATIONS / ROWS_FILE)
    return list({int(row["step"]): row for row in rows}.values())


def best_of(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The evaluation with the highest pass@1, the earliest of equals; None for none with a value.

    Its own score is biased upwards, being the largest of several; judge it anew to quote it.
    """
    valid = [row for row in rows if row["pass_at_1"] is not None]
    valid = [row for row in valid if row["pass_at_1"] == row["pass_at_1"]]
    return max(valid, key=lambda row: (row["pass_at_1"], -row["step"]), default=None)


def discard_evaluations(run_path: Path, step: int) -> None:
    """Forget evaluations after `step`: a resumed run makes those steps again, with new weights."""
    folder = run_path / EVALUATIONS
    if not folder.is_dir():
        return
    discard_newer(folder / STORE, step)
    replace_jsonl(folder / ROWS_FILE, [row for row in read_rows(run_path) if row["step"] <= step])
    for path in folder.glob("step_*"):
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)
    best = best_of(read_rows(run_path))
    if best is None:
        (folder / BEST_FILE).unlink(missing_ok=True)
    else:
        write_best(folder, best)


def write_best(folder: Path, row: dict[str, Any]) -> None:
    import orjson

    write_atomically(folder / BEST_FILE, orjson.dumps(row, option=orjson.OPT_INDENT_2))
