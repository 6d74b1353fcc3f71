"""Scaling of one attempt: where it starts, the scaler, the policy's loop, the control endpoint.

Invariant: operations and settings of the former attempt are taken over before anything starts, and
everything that changes pools goes through the one scaler.
"""

import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

from rlmix.config.schema.train import TrainConfig
from rlmix.core.addresses import bind_address
from rlmix.core.errors import ConfigError
from rlmix.loop.autoscale import Autoscaler, TrainerSeen
from rlmix.loop.control import ControlServer
from rlmix.loop.departures import Cluster, Departures
from rlmix.loop.fleets import further_replica
from rlmix.loop.rollout import Rollout
from rlmix.loop.scale_document import operation_line, scale_document
from rlmix.loop.scaler import PoolFacts, Scaler
from rlmix.loop.training import TrainingLoop
from rlmix.observe.run_dir import RunDir
from rlmix.plan.runplan import RunPlan
from rlmix.pools.fleet import Fleet
from rlmix.router.client import RouterAdmin
from rlmix.scaling.control import CONTROL_FILE
from rlmix.scaling.history import read_state, restart, write_state
from rlmix.scaling.modelled import fleet_limits
from rlmix.scaling.operation import Operation
from rlmix.scaling.policy import FleetLimits
from rlmix.scaling.settings import get_setting, put_settings, still_wanted

OPEN_STEPS = 2
"""Steps' worth of groups that may be open: one being trained on or waiting, one being sampled.
More would only make samples older, since sampling is what takes long."""


def open_groups(config: TrainConfig) -> int:
    """Groups that may be open at a time. Without staleness whatever is sampled ahead is thrown
    away."""
    open_steps = min(OPEN_STEPS, 1 + config.loop.max_staleness)
    return open_steps * config.loop.sessions_per_step // config.loop.group_size


class LiveScaling:
    """Made before the pools, started once they serve."""

    def __init__(self, plan: RunPlan, config: TrainConfig, run: RunDir) -> None:
        self._plan, self._config, self._run = plan, config, run
        # Of an attempt that was killed; nobody answers there, or somebody else does.
        (run.path / CONTROL_FILE).unlink(missing_ok=True)
        configured = {name: pool.replicas for name, pool in plan.pools.items()}
        kept = read_state(run.path)
        self._restart = restart(kept, configured)
        put_settings(config, dict(still_wanted(config, kept.settings)))
        self._scaler: Scaler | None = None
        self._autoscaler: Autoscaler | None = None
        self._control: ControlServer | None = None
        self._departures: Departures | None = None
        self._rollout: Rollout | None = None

    def starting_replicas(self) -> dict[str, int]:
        """Pool -> replicas that this attempt starts with."""
        if self._restart.operation_id:
            self._run.events.append(
                "scale_restarted",
                self._restart.reason,
                operation=self._restart.operation_id,
                replicas=dict(self._restart.replicas),
                targets=dict(self._restart.again),
            )
        write_state(self._run.path, self._restart.to_keep())
        return dict(self._restart.replicas)

    def leaving(self) -> Collection[str]:
        """Ids of the machines that a former attempt was told of."""
        return self._restart.state.leaving

    async def start(
        self,
        *,
        fleet: Fleet,
        router: RouterAdmin,
        rollout: Rollout,
        loop: TrainingLoop,
        cluster: Cluster,
        on_held: Callable[[Mapping[str, int]], None],
        show: Callable[[], Mapping[str, Any]],
    ) -> None:
        """Args:
        show: what the live view shows, for `rlmix runs attach`.
        """
        plan, config, run = self._plan, self._config, self._run
        self._rollout = rollout
        scaler = self._scaler = Scaler(
            fleet=fleet,
            router=router,
            pools={
                name: PoolFacts(
                    accelerator=pool.accelerator,
                    gpus=pool.tp,
                    usd_per_hour=pool.usd_per_replica_hour,
                    view=pool.weights,
                )
                for name, pool in plan.pools.items()
            },
            limits=self._limits,
            drain_s=lambda: config.scaling.drain_s,
            keeps_view=config.router.view == "strict",
            new_replica=lambda pool, index: further_replica(plan, config, run, pool, index),
            state=self._restart.state,
            save=lambda state: write_state(run.path, state),
            on_event=run.events.append,
            on_held=on_held,
        )
        departures = self._departures = Departures(
            cluster=cluster,
            scaler=scaler,
            fleet=fleet,
            drain_s=lambda: config.scaling.drain_s,
            on_event=run.events.append,
        )
        self._autoscaler = Autoscaler(
            config=config,
            plan=plan,
            scaler=scaler,
            fleet=fleet,
            rollout=rollout,
            trainer=lambda: TrainerSeen(
                is_stepping=loop.is_stepping, waited_s=loop.waited_s, metrics=loop.last_metrics
            ),
            on_event=run.events.append,
        )
        self._control = ControlServer(
            run.path,
            bind=bind_address(config.net.bind, os.environ),
            describe=lambda: self._describe(fleet, loop),
            show=show,
            ask=self._ask,
            find=scaler.operation,
            cancel=lambda name, reason: scaler.cancel(name, reason=reason),
            change=self._change,
            leave=lambda name, within_s, why: departures.leave(name, within_s=within_s, reason=why),
            stay=lambda name, why: departures.stay(name, reason=why),
        )
        scaler.start()
        if self._restart.again:
            await self._continue(scaler)
        self._autoscaler.start()
        await self._control.start()

    async def stop(self) -> None:
        """In the reverse order; a second call does nothing."""
        control, self._control = self._control, None
        autoscaler, self._autoscaler = self._autoscaler, None
        scaler, self._scaler = self._scaler, None
        if control is not None:
            await control.stop()
        if autoscaler is not None:
            await autoscaler.stop()
        if scaler is not None:
            await scaler.stop()

    def raise_failure(self) -> None:
        """A bug in a task here ends the run."""
        for part in (self._scaler, self._autoscaler):
            if part is not None:
                part.raise_failure()

    def operation_line(self) -> str:
        return "" if self._scaler is None else operation_line(self._scaler.state)

    async def _continue(self, scaler: Scaler) -> None:
        asked = self._restart
        try:
            await scaler.request(asked.again, operation_id=asked.operation_id, reason=asked.reason)
        except ConfigError as error:
            write_state(self._run.path, scaler.state)  # It is not tried a third time.
            self._run.events.append(
                "scale_refused", str(error), operation=asked.operation_id, targets=dict(asked.again)
            )

    async def _ask(self, targets: Mapping[str, int], name: str, reason: str) -> Operation:
        assert self._scaler is not None
        return await self._scaler.request(targets, operation_id=name, reason=reason)

    def _limits(self) -> FleetLimits:
        return fleet_limits(self._config, self._plan)

    def _change(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Put settings in, tell who has a copy, and keep them for the next attempt."""
        assert self._scaler is not None
        config = self._config
        before = put_settings(config, settings)
        if self._rollout is not None:
            self._rollout.open_more(open_groups(config))
        kept = self._scaler.state.settings
        changes = {
            key: {"from": kept[key]["from"] if key in kept else was, "to": get_setting(config, key)}
            for key, was in before.items()
        }
        self._scaler.change_settings(changes)
        said = ", ".join(f"{key}: {before[key]} > {value}" for key, value in settings.items())
        self._run.events.append("settings_changed", said, settings=dict(settings))
        return settings

    def _describe(self, fleet: Fleet, loop: TrainingLoop) -> dict[str, Any]:
        scaler, autoscaler = self._scaler, self._autoscaler
        assert scaler is not None
        return scale_document(
            run=self._run.name,
            phase=loop.phase,
            step=loop.progress.step,
            plan=self._plan,
            statuses=fleet.status(),
            targets=scaler.targets(),
            state=scaler.state,
            is_auto=self._config.scaling.auto,
            policy={} if autoscaler is None else autoscaler.status,
            machines=() if self._departures is None else self._departures.machines(),
        )
