"""`rlmix train`: one run from the checked plan to the closing table.

In order: run directory, processes, policy (warm start or checkpoint), pools, loop, evaluation,
summary, report. Every part is built in its own room; this is where they meet.

Ending: the first Ctrl-C ends the run after the step under way, with a checkpoint; the second one
at once. Either way nothing of the run is left running, and `--resume` continues it.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlmix.config.schema.train import TrainConfig
from rlmix.core.errors import LaunchError, RlmixError
from rlmix.evals.checkpoints import EVALUATIONS
from rlmix.evals.evaluator import NICENESS
from rlmix.loop.alarms import AlarmWatch
from rlmix.loop.evaluation import closing_evaluation, keep_version
from rlmix.loop.fleets import LIVE_EVAL_POOL, eval_fleet, remote_url, training_fleet, views_of
from rlmix.loop.ledger import SessionLedger
from rlmix.loop.live_scaling import LiveScaling, open_groups
from rlmix.loop.progress import Progress
from rlmix.loop.resume import EVAL_KEPT, ResumePoint, choose_point, set_aside
from rlmix.loop.rollout import Rollout
from rlmix.loop.runtime import Runtime
from rlmix.loop.side_evaluation import STORE, SideEvaluation
from rlmix.loop.specs import training_session
from rlmix.loop.stream import TaskStream, Ticket
from rlmix.loop.summary import TrainSummary, build_summary
from rlmix.loop.training import TRAINER_LIMIT_S, TrainingLoop
from rlmix.loop.view import RunView
from rlmix.model.bundle import resolve_model
from rlmix.observe.live_state import state_to_dict
from rlmix.observe.report import write_report
from rlmix.observe.run_dir import RunDir
from rlmix.observe.runs import find_run
from rlmix.observe.stop_request import LOOK_EVERY_S, forget_stop_requests, take_stop_request
from rlmix.plan.runplan import RunPlan
from rlmix.scaling.costs import CostMeter
from rlmix.tasks.source import open_source

LONGEST_EVALUATION_S = 24 * 3600.0
"""Of one version beside the run; a day is a hang, whatever the benchmark."""


def run_training(
    plan: RunPlan,
    config: TrainConfig,
    *,
    overrides: Sequence[str],
    config_yaml: str = "",
    resume: str | None = None,
    as_json: bool = False,
) -> TrainSummary:
    """Run to the end and return what came of it.

    Raises:
        ConfigError: the run exists already, or the one to resume does not.
        RlmixError: the run failed; its directory says how far it came.
    """
    started_s = time.monotonic()
    root = Path(config.run.dir)
    if resume is None:
        run = RunDir.create(
            root,
            config.run.name,
            overrides=overrides,
            config_yaml=config_yaml,
            plan=plan.to_dict(),
        )
    else:
        run = RunDir.open(find_run(root, resume))
        run.rewrite_request(overrides, config_yaml, plan.to_dict())
    with run:
        training = _Training(plan, config, run, is_resumed=resume is not None, as_json=as_json)

        def finish(exit_reason: str) -> TrainSummary:
            summary = training.summarize(exit_reason, wall_s=time.monotonic() - started_s)
            run.write_summary(summary.to_dict())
            write_report(run.path)
            run.close(exit_reason)
            return summary

        try:
            exit_reason = asyncio.run(training.main())
        except (RlmixError, TimeoutError) as error:
            finish("failed")
            hint = f"to go on: rlmix train --resume {run.path}"
            kind = LaunchError if isinstance(error, TimeoutError) else type(error)
            what = str(error) or "a process of the run did not answer in time"
            raise kind(f"{what}\n{hint}; what happened: {run.path}/events.jsonl") from error
        return finish(exit_reason)


class _Training:
    """The parts of one attempt while it runs."""

    def __init__(
        self, plan: RunPlan, config: TrainConfig, run: RunDir, *, is_resumed: bool, as_json: bool
    ) -> None:
        self.plan, self.config, self.run = plan, config, run
        self.is_resumed = is_resumed
        self.model_dir = resolve_model(config.model.path)
        self.view = RunView(plan, config, run, as_json=as_json)
        self.progress = Progress()
        self.evaluation: dict[str, Any] | None = None
        self.loop: TrainingLoop | None = None
        self.scaling = LiveScaling(plan, config, run)
        self.costs = CostMeter(
            {name: pool.usd_per_replica_hour for name, pool in plan.pools.items()},
            is_modelled=plan.is_modelled,
        )

    async def main(self) -> str:
        """Returns `finished` or `interrupted`; raises what made the run fail."""
        task = asyncio.current_task()
        assert task is not None
        interrupts = 0

        def interrupt() -> None:
            nonlocal interrupts
            interrupts += 1
            if interrupts == 1 and self.loop is not None and not self.loop.is_done:
                self.view.note(
                    "interrupted: ending after this step; press Ctrl-C again to stop now"
                )
                self.loop.stop()
            else:
                task.cancel()

        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, interrupt)
        # Before any child is started: they inherit it, and a terminal may go while they run.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        looking = asyncio.create_task(self._look_for_stop(interrupt), name="stop requests")
        try:
            await self._run()
        except asyncio.CancelledError:
            if not interrupts:
                raise
            task.uncancel()
        finally:
            looking.cancel()
        return "interrupted" if interrupts else "finished"

    async def _look_for_stop(self, interrupt: Callable[[], None]) -> None:
        """For `rlmix runs stop` on another machine, whose signals do not reach this process."""
        forget_stop_requests(self.run.path)
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if take_stop_request(self.run.path):
                self.run.events.append("stop_requested", "rlmix runs stop on another machine")
                interrupt()

    async def _run(self) -> None:
        config, run = self.config, self.run
        runtime = Runtime(self.plan, config, run)
        with self.view:
            try:
                await self._train(runtime)
                if self.loop is not None and self.loop.is_stopping:
                    return
                if config.loop.eval_tasks:
                    self.evaluation = await self._evaluate(runtime)
            except RlmixError as error:
                run.events.append("run_failed", str(error))
                raise
            finally:
                self.view.phase = "ending processes"
                await runtime.close()

    async def _train(self, runtime: Runtime) -> None:
        config, run = self.config, self.run
        self.view.phase = "starting processes"
        point = self._resume_point()
        views = views_of(self.plan)
        await runtime.start_processes(self.model_dir, views)
        workers_open = asyncio.ensure_future(runtime.workers.open())
        self.view.phase = "loading the policy"
        loaded = await runtime.trainer.call("load", point.folder, timeout_s=TRAINER_LIMIT_S)
        stream = self._stream(loaded["extra"])
        version = self.progress.step
        run.events.append(
            "policy_loaded",
            point.reason,
            step=version,
            parameters=loaded["parameters"],
            model_class=loaded["model_class"],
        )
        sinks = [
            name for name in ("tensorboard", "wandb", "mlflow") if getattr(config.observe, name)
        ]
        run.open_sinks(sinks, config=asdict(config))
        for info in await workers_open:
            for warning in info.warnings:
                run.events.append("sandbox_warning", warning)
        counts = self.scaling.starting_replicas()
        runtime.cluster.avoid(self.scaling.leaving())
        fleet = runtime.start_fleet(
            training_fleet(self.plan, config, run, model_dir=self.model_dir, counts=counts),
            held_version=lambda: self.progress.step,
        )
        ledger = SessionLedger(run.path, attempt=run.attempt)
        rollout = Rollout(
            stream=stream,
            run_session=self._session_runner(runtime, experts_shape=loaded["experts_shape"]),
            group_size=config.loop.group_size,
            max_open_groups=open_groups(config),
            concurrency=config.session.workers * config.session.concurrency,
            max_staleness=config.loop.max_staleness,
            ledger=ledger,
        )
        runtime.on_close(rollout.stop)
        alarms = AlarmWatch(
            config.alarms,
            pools=fleet,
            on_event=run.events.append,
            tolerances_nats={
                name: pool.canary_tolerance_nats for name, pool in config.pools.items()
            },
            state=loaded["extra"].get("alarms"),
        )
        self.loop = TrainingLoop(
            config=config,
            run=run,
            trainer=runtime.trainer,
            fleet=fleet,
            rollout=rollout,
            stream=stream,
            costs=self.costs,
            progress=self.progress,
            alarms=alarms,
            is_router_lost=lambda: runtime.router_process.is_retired,
            check=self.scaling.raise_failure,
        )
        self.view.attach(self.loop, fleet, rollout, self.scaling)
        runtime.on_close(self.view.start_refreshing())
        self.view.phase = "booting pools"
        self.costs.observe(time.monotonic(), counts)
        await self.loop.publish_first(version)
        if version == 0:
            keep_version(run.weights, run.path / EVAL_KEPT, 0)
        await alarms.hold_again()
        await fleet.start(version)
        rollout.start()
        await self.scaling.start(
            fleet=fleet,
            router=runtime.router,
            rollout=rollout,
            loop=self.loop,
            cluster=runtime.cluster,
            on_held=lambda held: self.costs.observe(time.monotonic(), held),
            show=lambda: state_to_dict(self.view.state()),
        )
        runtime.on_close(self.scaling.stop)
        side = await self._start_side_evaluation(runtime, version)
        await self.loop.run()
        await self.scaling.stop()
        await rollout.stop()
        await fleet.stop()
        self.costs.observe(time.monotonic(), {})
        if side is not None and not self.loop.is_stopping:
            self.view.phase = "finishing evaluations"
            await side.finish()

    async def _start_side_evaluation(self, runtime: Runtime, version: int) -> SideEvaluation | None:
        """Evaluations that run beside the loop, where any are asked for."""
        config, run = self.config, self.run
        if not config.eval.every_steps:
            return None
        assert self.loop is not None
        spec = eval_fleet(
            self.plan, config, run, store=run.path / EVALUATIONS / STORE,
            model_dir=self.model_dir, name=LIVE_EVAL_POOL, niceness=NICENESS,
        )  # fmt: skip
        fleet, evaluator = await runtime.start_evaluator(spec, config)

        async def evaluate(folder: str, version: int, digest: str) -> dict[str, Any]:
            found: dict[str, Any] = await evaluator.call(
                "evaluate", folder, version, digest, timeout_s=LONGEST_EVALUATION_S
            )
            return found

        side = SideEvaluation(
            run.path,
            every_steps=config.eval.every_steps,
            store=run.weights,
            keep=keep_version,
            fleet=fleet,
            evaluate=evaluate,
            on_event=run.events.append,
            places=sum(replica.max_running for replica in spec.replicas),
        )
        runtime.on_close(side.stop)
        self.loop.on_published = side.offer
        side.offer(version)
        side.start()
        return side

    async def _evaluate(self, runtime: Runtime) -> dict[str, Any]:
        kept = self.run.path / EVAL_KEPT
        assert self.loop is not None
        version = await self.loop.publish_last()
        keep_version(self.run.weights, kept, version)

        def on_progress(arm: str, done: int) -> None:
            self.view.count(f"evaluating the {arm.replace('_', ' ')} policy", done)

        return await closing_evaluation(
            self.config,
            run=self.run,
            runtime=runtime,
            fleet_spec=eval_fleet(
                self.plan, self.config, self.run, store=kept, model_dir=self.model_dir
            ),
            trained_version=version,
            on_progress=on_progress,
        )

    def _resume_point(self) -> ResumePoint:
        if not self.is_resumed:
            return ResumePoint(folder=self.model_dir, step=0, reason="fresh start")
        point = choose_point(self.run, self.model_dir)
        set_aside_ = set_aside(self.run, point, remote_url=remote_url(self.config, self.run))
        self.run.events.append("resume_point", point.reason, **set_aside_)
        return point

    def _stream(self, saved: dict[str, Any]) -> TaskStream:
        """The task order, and the progress that belongs to it, from the checkpoint's state."""
        tasks = self.config.tasks
        source = open_source(
            tasks.source, split="train", seed=tasks.seed, limit=tasks.limit, path=tasks.path
        )
        stream = TaskStream(source.task_ids(), seed=self.config.run.seed)
        if saved:
            self.progress = Progress.from_dict(saved["progress"])
            stream.restore(saved["stream"])
        return stream

    def _session_runner(self, runtime: Runtime, *, experts_shape: tuple[int, int] | None) -> Any:
        async def run_session(ticket: Ticket, member: int, attempt: int) -> Any:
            return await runtime.workers.run(
                training_session(
                    self.config,
                    ticket,
                    member,
                    attempt=attempt,
                    run_id=self.run.run_id,
                    experts_shape=experts_shape,
                )
            )

        return run_session

    def summarize(self, exit_reason: str, *, wall_s: float) -> TrainSummary:
        return build_summary(
            plan=self.plan,
            run=self.run,
            progress=self.progress,
            evaluation=self.evaluation,
            alarms=self.loop.alarms if self.loop else None,
            last_metrics=self.loop.last_metrics if self.loop else {},
            exit_reason=exit_reason,
            wall_s=wall_s,
        )
