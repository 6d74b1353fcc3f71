"""The training loop: take groups, step, publish, record. Short enough to read as pseudo-code.

Generation never waits for it: the rollout keeps sessions in flight on its own, replicas pull new
versions on their own. What this loop waits for is named in `phase`, has a limit, and is measured.

Invariants: the trainer's policy version is the number of steps done; a version is published
before any sample may claim it; a checkpoint names the step, the version, the task order, every
counter and what the alarms remember under one id, so a killed run continues where the newest
complete checkpoint stands.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from safetensors import SafetensorError

from rlmix.batch.groups import build_batch
from rlmix.config.schema.train import TrainConfig
from rlmix.core.errors import DivergedError, EngineError, TrainerError, WeightSyncError
from rlmix.core.sample import TrainSample
from rlmix.core.trajectory import Trajectory
from rlmix.launch.handle import Handle
from rlmix.loop.alarms import AlarmWatch
from rlmix.loop.progress import Progress
from rlmix.loop.rollout import FinishedGroup, Rollout
from rlmix.loop.step_metrics import (
    serving_pool,
    tokens_by_pool,
    trained_by_pool,
    trajectory_metrics,
    update_metrics,
)
from rlmix.loop.stream import TaskStream
from rlmix.observe.run_dir import RunDir
from rlmix.pools.fleet import Fleet
from rlmix.pools.spec import SlotState
from rlmix.scaling.costs import CostMeter
from rlmix.scaling.unit_costs import unit_cost_metrics
from rlmix.trainer.spec import SaveReport, StepResult
from rlmix.weights.publish import PublishReport
from rlmix.weights.store import prune

TRAINER_LIMIT_S = 600.0
"""Longest optimizer step, publication or save that is not taken for a hang."""

DISK_PATIENCE_S = 120.0
DISK_RETRY_S = 2.0
"""For a weights folder without room, once samplers are as far behind as they may be."""

PROMISED_KEYS = (
    "loss/policy",
    "loss/grad_norm",
    "mismatch/k3_kl",
    "mismatch/mean_abs",
    "correction/masked_frac",
    "correction/sc_tail_ratio",
    "correction/ess_frac",
    "staleness/mean_versions",
    "staleness/max_versions",
)

FLEET_LOOK_S = 1.0
"""How often a waiting loop looks whether any replica can still serve."""


class TrainingLoop:
    """Steps until `num_steps` are done or `stop` is asked for."""

    def __init__(
        self,
        *,
        config: TrainConfig,
        run: RunDir,
        trainer: Handle,
        fleet: Fleet,
        rollout: Rollout,
        stream: TaskStream,
        costs: CostMeter,
        progress: Progress,
        alarms: AlarmWatch,
        is_router_lost: Callable[[], bool] = lambda: False,
        on_published: Callable[[int], None] = lambda _: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            check: called about once a second while the loop waits; raises what ended another part.
        """
        self._config = config
        self._run = run
        self._trainer = trainer
        self._fleet = fleet
        self._rollout = rollout
        self._stream = stream
        self._costs = costs
        self._is_router_lost = is_router_lost
        self.on_published = on_published
        """Told of every version that is on disk and ordered; must return at once."""
        self._check = check
        self._waited_s = 0.0
        self._waits_since_s: float | None = None
        self.alarms = alarms
        self._saved_step = self._complete_step = progress.step
        self._stop = asyncio.Event()
        self.progress = progress
        self.phase = "starting"
        self.is_stepping = False
        self.is_done = False
        self.last_metrics: dict[str, float] = {}

    def stop(self) -> None:
        """End after the step that is under way; what it takes is a checkpoint away."""
        self._stop.set()

    @property
    def is_stopping(self) -> bool:
        return self._stop.is_set()

    @property
    def waited_s(self) -> float:
        """For samples, since the start of this attempt, the wait under way included."""
        since_s = self._waits_since_s
        return self._waited_s + (0.0 if since_s is None else time.monotonic() - since_s)

    async def run(self) -> None:
        """Raises what stopped the run, if anything did."""
        loop = self._config.loop
        self.is_stepping = True
        while self.progress.step < loop.steps and not self.is_stopping:
            if not await self._step():
                break
            if reason := await self.alarms.after_step(self.progress.step, self.last_metrics):
                await self.save()
                raise DivergedError(reason)
            if self.progress.step % loop.checkpoint_every == 0:
                await self.save(waits=False)
        await self.save()
        self.is_stepping = False
        self.is_done = True

    async def save(self, *, waits: bool = True) -> None:
        """Write a checkpoint unless this step has one; `waits` until it is complete, else the
        next step goes on meanwhile."""
        if self._saved_step != self.progress.step:
            await self._start_save()
        await self._note_saves(waits=waits)
        if waits and self._complete_step != self.progress.step:
            # It went with the ranks that were writing it.
            await self._start_save()
            await self._note_saves(waits=True)

    async def _start_save(self) -> None:
        self.phase = "saving a checkpoint"
        extra = {
            "progress": self.progress.to_dict(),
            "stream": self._stream.state(),
            "alarms": self.alarms.state(),
        }
        await self._trainer.call(
            "save", self.progress.step, extra, waits=False, timeout_s=TRAINER_LIMIT_S
        )
        self._saved_step = self.progress.step

    async def _note_saves(self, *, waits: bool) -> dict[str, float]:
        """Tell of checkpoints that are complete now; returns the metrics of the last."""
        reports: list[SaveReport] = await self._trainer.call(
            "finish_saves", waits=waits, timeout_s=TRAINER_LIMIT_S
        )
        for report in reports:
            self._complete_step = report.step
            self._run.events.append(
                "checkpoint_saved",
                "as configured",
                path=report.path,
                step=report.step,
                write_s=round(report.write_s, 3),
            )
        return reports[-1].metrics() if reports else {}

    async def _step(self) -> bool:
        """One optimizer step; False when `stop` came before the groups did."""
        started_s = time.monotonic()
        self.phase = "sampling"
        self._waits_since_s = started_s
        groups = await self._take_groups()
        if groups is None:
            return False
        waited_s = time.monotonic() - started_s
        self._waited_s, self._waits_since_s = self._waited_s + waited_s, None
        members = [member for group in groups for member in group.members]
        algo = self._config.algo
        batch = build_batch(
            [group.members for group in groups], scale=algo.scale, baseline=algo.baseline
        )
        batch_s = time.monotonic() - started_s - waited_s
        step = self.progress.step + 1
        self.phase = "training"
        result: StepResult = await self._trainer.call(
            "train_step",
            list(batch.samples),
            step=step,
            version=self.progress.step,
            timeout_s=TRAINER_LIMIT_S,
        )
        if not result.applied:
            self._run.events.append("step_not_applied", result.skip_reason, step=step)
        self.progress.step = step
        metrics = dict(result.metrics) | batch.metrics()
        if step % self._config.weights.publish_every == 0:
            metrics |= await self.publish(step)
        metrics |= await self._note_saves(waits=False)
        metrics |= update_metrics(self._fleet.drain_updates())
        metrics |= trajectory_metrics(members) | self._count(members, batch.samples)
        await self._keep_pace(started_s + waited_s)
        step_s = time.monotonic() - started_s
        metrics |= {
            "time/step_s": step_s,
            "time/wait_s": waited_s,
            "time/batch_s": batch_s,
            "time/trainer_wait_frac": waited_s / step_s,
        }
        self._record(step, metrics, members)
        return True

    async def _keep_pace(self, began_s: float) -> None:
        """Wait until the trainer's part of the step has lasted as long as it should."""
        left_s = began_s + self._config.loop.min_step_s - time.monotonic()
        if left_s > 0:
            self.phase = "keeping the pace of loop.min_step_s"
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._stop.wait()

    async def publish(self, version: int) -> dict[str, float]:
        """Write the trainer's weights as `version` and let every replica fetch it on its own.

        Where the disk refuses it, samplers go on with what they have as long as the staleness
        bound allows, and the next step publishes; beyond that it is tried again and again.

        Raises:
            WeightSyncError: the disk has refused it for `DISK_PATIENCE_S` beyond the bound.
        """
        first_s = time.monotonic()
        while True:
            try:
                metrics = await self._write_version(version)
            except (OSError, SafetensorError) as error:
                behind = version - self.progress.published_version
                self._run.events.append("publish_failed", str(error), step=version, behind=behind)
                if behind <= self._config.loop.max_staleness:
                    return {}
                if time.monotonic() - first_s > DISK_PATIENCE_S:
                    raise WeightSyncError(
                        f"weights: version {version} could not be written for "
                        f"{DISK_PATIENCE_S:g} s, and samplers are {behind} versions behind: "
                        f"{error}; free space in {self._run.weights}, then resume the run"
                    ) from error
                self.phase = "waiting for room in the weights folder"
                await asyncio.sleep(DISK_RETRY_S)
            else:
                await self._fleet.roll_out(version)
                self.on_published(version)
                return metrics

    async def publish_first(self, version: int) -> None:
        """Write the version that the pools boot with: 0, or that of the resumed checkpoint."""
        await self._write_version(version)

    async def publish_last(self) -> int:
        """Make sure that the newest weights are published; returns their version."""
        if self.progress.published_version != self.progress.step:
            await self._write_version(self.progress.step)
        return self.progress.step

    async def _write_version(self, version: int) -> dict[str, float]:
        self.phase = "publishing weights"
        report: PublishReport = await self._trainer.call(
            "publish", version, timeout_s=TRAINER_LIMIT_S
        )
        self.progress.published_version = version
        spared = self._fleet.versions_being_read()
        for view in report.views:
            prune(self._run.weights, view.view, self._config.weights.keep, spared=spared)
        return report.metrics()

    async def _take_groups(self) -> list[FinishedGroup] | None:
        loop = self._config.loop
        take = asyncio.ensure_future(
            self._rollout.take(
                loop.sessions_per_step // loop.group_size, trainer_version=self.progress.step
            )
        )
        stop = asyncio.ensure_future(self._stop.wait())
        lost = asyncio.ensure_future(self._until_no_replica_is_left())
        try:
            await asyncio.wait((take, stop, lost), return_when=asyncio.FIRST_COMPLETED)
            if take.done():
                return take.result()
            if lost.done():
                lost.result()
            return None
        finally:
            for task in (take, stop, lost):
                task.cancel()
            await asyncio.gather(take, stop, lost, return_exceptions=True)

    async def _until_no_replica_is_left(self) -> None:
        while not all(s.state.is_final or s.is_held for s in self._fleet.status()):
            self._check()
            if self._is_router_lost():
                raise EngineError("loop: the router died too often; see logs/router.log")
            await asyncio.sleep(FLEET_LOOK_S)
        reasons = {f"{status.name}: {status.reason}" for status in self._fleet.status()}
        raise EngineError(f"loop: every replica was given up: {'; '.join(sorted(reasons))}")

    def _count(
        self, members: Sequence[Trajectory], samples: Sequence[TrainSample]
    ) -> dict[str, float]:
        """Move the rollout's counts and the cost of the interval into progress and metrics."""
        counts = self._rollout.drain_counts()
        progress = self.progress
        progress.sessions += counts.sessions
        progress.voids += counts.voids
        progress.pool_tokens = dict(
            Counter(progress.pool_tokens) + Counter(tokens_by_pool(members))
        )
        served = Counter(serving_pool(member) for member in members)
        progress.pool_sessions = dict(Counter(progress.pool_sessions) + served)
        cost = self._costs.close_interval(time.monotonic())
        progress.cost_usd += cost.usd
        for pool, usd in cost.by_pool_usd.items():
            progress.pool_cost_usd[pool] = progress.pool_cost_usd.get(pool, 0.0) + usd
        trained, tokens = trained_by_pool(samples)
        replicas = Counter(
            status.pool
            for status in self._fleet.status()
            if status.state in (SlotState.READY, SlotState.UPDATING)
        )
        return {
            "rollout/void_frac": counts.voids / counts.sessions if counts.sessions else 0.0,
            "rollout/retries": float(counts.retries),
            "rollout/stale_groups": float(counts.stale_groups),
            "rollout/void_groups": float(counts.void_groups),
            **{f"rollout/void_{name}": float(n) for name, n in sorted(counts.void_reasons.items())},
            **cost.metrics(),
            **unit_cost_metrics(cost, trajectories=trained, tokens=tokens),
            "cost/total_usd": progress.cost_usd,
            **{f"pools/{pool}/replicas": float(replicas[pool]) for pool in self._config.pools},
        }

    def _record(self, step: int, metrics: dict[str, float], members: list[Trajectory]) -> None:
        reward = metrics.get("reward/mean")
        if reward is None:
            raise TrainerError(f"loop: step {step} has no valid session; see events.jsonl")
        self.progress.rewards.append(reward)
        written = self._run.write_trajectories(step, members)
        if tokens := metrics.get("rollout/tokens"):
            metrics["rollout/disk_bytes_per_token"] = written.stat().st_size / tokens
        # A key that outside scripts rely on is there in every row, null where it does not apply.
        row: dict[str, Any] = {"step": step, **dict.fromkeys(PROMISED_KEYS), **metrics}
        self._run.metrics.append(row)
        self.last_metrics = metrics
