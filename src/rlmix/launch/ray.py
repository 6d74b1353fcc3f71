"""Ray: the only file that imports it. A cluster for one run, or one that was joined; actors whose
output has a home, on machines that have what they ask for.

What the living actors ask for is told to Ray's own autoscaler as a standing request, so that it
brings machines and keeps them; killing an actor takes its part back.

Invariant: a cluster that `start` made is gone after `stop`, and also after the driver was
interrupted or killed: Ray's daemons die with the driver (it asks the kernel for that), the rest
is ended by the reaper. Nothing of a run is shared with another: own temporary folder, own
namespace, own access token. Of a cluster that was joined only the run's actors end.
"""

import asyncio
import logging
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlmix.core.errors import LaunchError, PlacementError
from rlmix.core.machine import Machine
from rlmix.launch.actor import Host, node_address
from rlmix.launch.handle import Needs
from rlmix.launch.needs import NODE_LABEL, NodeSeen, bundle_of, labels_without, not_placed
from rlmix.launch.process import log_tail
from rlmix.launch.reach import unreachable
from rlmix.launch.reaper import TAG_VARIABLE, Reaper

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 256 << 20
"""Shared memory for arguments and results above 100 KB, as they are in flight; used only as
needed. A training batch is a few MB."""

_RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # The plan names device ids; Ray must not rewrite CUDA_VISIBLE_DEVICES behind it.
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray runs actors at nice 15 by default; here they are the run, not a background job.
    "RAY_worker_niceness": "0",
    # Its node must register within this; the default of 60 s is too short where many processes
    # share two cores, and a failed start costs the run.
    "RAY_raylet_start_wait_time_s": "240",
    # The same for its first process; the default is 30 s to listen and 20 s to answer.
    "RAY_gcs_server_port_wait_time_s": "240",
    # Ray writes what its node agent notices (a worker died) to the driver's stdout, even with
    # log_to_driver=False; our stdout belongs to `--json`. This drops every such line.
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".*",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
}


_OWN_ENVIRONMENT = {
    # Ray refuses strangers only in this mode; said explicitly it is also quiet about it. A cluster
    # that is joined has its own mode and token, which its users have in their environment.
    "RAY_AUTH_MODE": "token",
}


def _prepare_environment(*, is_joined: bool) -> None:
    """Ray reads its environment once, when it is imported; call before that, keep it after.

    Raises:
        LaunchError: a Ray of the run's own would ask for a token that this process cannot show.
    """
    is_known = os.environ.get("RAY_AUTH_MODE") == _OWN_ENVIRONMENT["RAY_AUTH_MODE"]
    if not is_joined and "ray" in sys.modules and not is_known:
        raise LaunchError(
            "launch: ray was imported in this process before rlmix could set its access token, so "
            "a Ray of the run's own would refuse this process; start runs from a process that has "
            "not imported ray, or set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN before importing it"
        )
    os.environ.update(_RAY_ENVIRONMENT)
    if not is_joined:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        os.environ.update(_OWN_ENVIRONMENT)


class ActorHandle:
    """The driver's end of one actor. Satisfies `rlmix.launch.handle.Handle`."""

    def __init__(
        self,
        actor: Any,
        *,
        name: str,
        log_path: Path,
        place: Callable[[], str] | None = None,
        place_limit_s: float | None = None,
        on_kill: Callable[[str], None] = lambda name: None,
    ) -> None:
        """
        Args:
            place: the sentence for a machine that was not found.
            place_limit_s: longest wait for a machine; None: as long as the call may take.
            on_kill: told the name.
        """
        self._actor = actor
        self._place = place
        self._place_limit_s = place_limit_s
        self._on_kill = on_kill
        self.name = name
        self.log_path = log_path
        self.machine: Machine | None = None

    @property
    def is_placed(self) -> bool:
        """See `Handle.is_placed`. A Ray of the run's own has the one machine."""
        return self._place_limit_s is None

    async def placed(self) -> None:
        """See `Handle.placed`. The time of a later call counts from here."""
        from ray.exceptions import RayError

        if self._place_limit_s is None:
            return
        waiter = asyncio.wrap_future(self._actor.here.remote().future())
        try:
            async with asyncio.timeout(self._place_limit_s):
                self.machine = await asyncio.shield(waiter)
        except TimeoutError:
            assert self._place is not None
            sentence = await asyncio.to_thread(self._place)
            raise PlacementError(sentence) from None
        except RayError as error:
            raise LaunchError(
                f"launch: actor {self.name} did not start ({_first_line(error)}); log "
                f"{self.log_path}:\n{log_tail(self.log_path)}"
            ) from None
        finally:
            waiter.add_done_callback(_forget)
        self._place_limit_s = None

    async def call(
        self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> Any:
        """See `Handle.call`. Exceptions carry the remote traceback as a note."""
        import ray
        from ray.exceptions import RayActorError, RayError, RayTaskError

        await self.placed()
        ref = self._actor.call.remote(method, args, kwargs)
        waiter = asyncio.wrap_future(ref.future())
        try:
            async with asyncio.timeout(timeout_s):
                # Shielded: cancelling Ray's own future from here breaks its callback.
                return await asyncio.shield(waiter)
        except (asyncio.CancelledError, TimeoutError):
            waiter.add_done_callback(_forget)
            ray.cancel(ref)
            raise
        except RayTaskError as error:
            cause = error.cause
            if not isinstance(cause, BaseException):
                raise LaunchError(f"launch: {method} of {self.name} failed: {error}") from None
            if isinstance(cause, LaunchError | TimeoutError | asyncio.CancelledError):
                raise cause from None
            trace = re.sub(r"\x1b\[\d+m", "", str(error))
            cause.add_note(f"raised by {method} of actor {self.name}:\n{trace}")
            raise cause from None
        except RayActorError as error:
            raise LaunchError(
                f"launch: actor {self.name} is gone ({_first_line(error)}); log {self.log_path}:\n"
                f"{log_tail(self.log_path)}"
            ) from None
        except RayError as error:
            raise LaunchError(
                f"launch: Ray lost {method} of {self.name}: {_first_line(error)}"
            ) from None

    def kill(self) -> None:
        """End the actor's process; the kernel ends the children that it started."""
        import ray

        self._on_kill(self.name)
        ray.kill(self._actor, no_restart=True)


def _forget(future: "asyncio.Future[Any]") -> None:
    if not future.cancelled():
        future.exception()


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


class RayCluster:
    """A local Ray of one run, or a cluster that was there before it."""

    def __init__(
        self, *, tag: str, log_dir: Path, temp_dir: Path | None, on_lost: Sequence[str] = ()
    ) -> None:
        self._reaper = None if temp_dir is None else Reaper.start(tag, temp_dir, on_lost)
        self._asked: dict[str, tuple[dict[str, float], dict[str, str]]] = {}
        """Living actor -> what it holds or waits for, and the labels of its node."""
        self._is_open = True
        self._place_limit_s: float | None = None
        self._avoided: frozenset[str] = frozenset()
        self.tag = tag
        self.log_dir = log_dir
        self.temp_dir = temp_dir

    @classmethod
    def start(
        cls,
        run_id: str,
        *,
        num_cpus: int,
        log_dir: Path,
        namespace: str | None = None,
        object_store_bytes: int = OBJECT_STORE_BYTES,
        on_lost: Sequence[str] = (),
    ) -> "RayCluster":
        """Start Ray for this run; takes 3 to 7 s on two cores.

        Args:
            num_cpus: logical: what actors may ask for in all, not what the machine has.
            log_dir: where every actor's output goes, one `<name>.log` each.
            namespace: of the actors' names; the run id when not given.
            on_lost: command that removes what else the run has, run when this process was killed.
        Raises:
            LaunchError: Ray did not start, or is already running in this process.
        """
        _prepare_environment(is_joined=False)
        import ray

        if ray.is_initialized():
            raise LaunchError("launch: Ray already runs in this process; stop it first")
        log_dir.mkdir(parents=True, exist_ok=True)
        # Short and not under the run folder: a Unix socket's path has room for 107 characters
        # and Ray adds about 70.
        temp_dir = Path(tempfile.mkdtemp(prefix="rlmix-"))
        tag = f"{run_id}-{temp_dir.name}"
        cluster = cls(tag=tag, log_dir=log_dir, temp_dir=temp_dir, on_lost=on_lost)
        os.environ[TAG_VARIABLE] = tag
        terminate = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(
                num_cpus=num_cpus,
                include_dashboard=False,
                log_to_driver=False,
                object_store_memory=object_store_bytes,
                namespace=namespace or run_id,
                logging_level=logging.ERROR,
                configure_logging=False,
                _temp_dir=str(temp_dir),
                _node_ip_address="127.0.0.1",
            )
        except Exception as error:
            cluster.stop()
            raise LaunchError(
                f"launch: Ray did not start: {_first_line(error)}; its logs are in "
                f"{log_dir / 'ray'}"
            ) from error
        finally:
            # Ray replaces it by one that exits without the run's own clean end.
            if terminate is not None and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, terminate)
        return cluster

    @classmethod
    def join(
        cls, address: str, run_id: str, *, log_dir: Path, place_limit_s: float
    ) -> "RayCluster":
        """Use a cluster that runs already; this process is on one of its nodes.

        Args:
            address: as `ray.init` takes it: `auto`, or `HOST:PORT` of its head.
            log_dir: as in `start`; a folder that all nodes see under this path.
            place_limit_s: longest wait for a machine, of every actor.
        Raises:
            LaunchError: no cluster answers there.
        """
        if why := unreachable(address, os.environ):
            raise LaunchError(why)
        _prepare_environment(is_joined=True)
        import ray

        log_dir.mkdir(parents=True, exist_ok=True)
        terminate = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(
                address=address,
                log_to_driver=False,
                namespace=run_id,
                logging_level=logging.ERROR,
                configure_logging=False,
            )
        except Exception as error:
            raise LaunchError(
                f"launch.address: no Ray answers at {address}: {_first_line(error)}; start one "
                "there, or set launch.address=null for a Ray of the run's own"
            ) from error
        finally:
            if terminate is not None and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, terminate)
        cluster = cls(tag=run_id, log_dir=log_dir, temp_dir=None)
        cluster._place_limit_s = place_limit_s
        return cluster

    @property
    def is_joined(self) -> bool:
        return self.temp_dir is None

    @property
    def node_address(self) -> str:
        """Of this machine, as the others of the cluster reach it."""
        return node_address()

    @property
    def own_machine(self) -> str:
        """Id of the machine that this process is on."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def machines(self) -> list[Machine]:
        """Those of the cluster that are alive."""
        import ray

        return [
            Machine(
                id=node["NodeID"],
                address=node["NodeManagerAddress"],
                host=node["NodeManagerHostname"],
            )
            for node in ray.nodes()
            if node["Alive"]
        ]

    def avoid(self, machine_ids: Collection[str]) -> None:
        """From now on no actor is put on these machines; those that are there stay. The whole list
        each time."""
        self._avoided = frozenset(machine_ids)
        self._tell_autoscaler()

    def spawn(
        self,
        cls: Callable[..., object],
        *,
        name: str,
        num_cpus: float = 1.0,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        max_concurrency: int = 1000,
        env: Mapping[str, str] | None = None,
        needs: Needs | None = None,
        log_name: str | None = None,
    ) -> ActorHandle:
        """Make an actor that owns `cls(*args, **kwargs)`; returns at once.

        The object is made on the first call, and what its constructor raises is raised by every
        call. `cls` is a plain class, or a function that makes the object; neither knows of Ray.

        Args:
            name: unique among the living actors of the run.
            num_cpus: logical CPUs that the actor takes from the cluster's.
            max_concurrency: calls that may be under way at a time.
            env: set in the actor before `cls`'s module is imported.
            needs: what the node must have; None: any will do.
            log_name: output is appended to `<log_name>.log`; the actor's name when not given. A
                replacement has a new name and its predecessor's log.
        """
        import ray
        from ray import cloudpickle

        log_path = self.log_dir / f"{log_name or name}.log"
        payload = cloudpickle.dumps((cls, tuple(args), dict(kwargs or {})))
        labels = {} if needs is None else dict(needs.labels)
        actor = (
            ray.remote(Host)
            .options(
                name=name,
                num_cpus=num_cpus,
                max_concurrency=max_concurrency,
                max_restarts=0,
                num_gpus=needs.gpus if needs is not None and needs.gpus else None,
                resources=dict(needs.resources) if needs is not None else None,
                label_selector=labels_without(labels, self._avoided) or None,
            )
            .remote(payload, str(log_path.absolute()), dict(env or {}))
        )
        limit_s = self._place_limit_s

        def place() -> str:
            nodes = [n for n in seen_nodes() if n.labels.get(NODE_LABEL) not in self._avoided]
            return not_placed(name, needs, nodes, num_cpus=num_cpus, limit_s=limit_s or 0.0)

        self._asked[name] = (bundle_of(needs, num_cpus=num_cpus), labels)
        self._tell_autoscaler()
        return ActorHandle(
            actor,
            name=name,
            log_path=log_path,
            place=place,
            place_limit_s=limit_s,
            on_kill=self._forget_actor,
        )

    def _forget_actor(self, name: str) -> None:
        if self._asked.pop(name, None) is not None:
            self._tell_autoscaler()

    def _tell_autoscaler(self) -> None:
        """The whole request each time: it stands until the next one. A Ray of the run's own has
        nobody to tell."""
        if not self.is_joined or not self._is_open:
            return
        from ray.autoscaler.sdk import request_resources

        request_resources(
            bundles=[bundle for bundle, _ in self._asked.values()],
            bundle_label_selectors=[
                labels_without(labels, self._avoided) for _, labels in self._asked.values()
            ],
        )

    def stop(self) -> int:
        """End Ray, every actor and what they started; blocks for about 2 s. Idempotent.

        Returns how many processes had to be killed because Ray had not ended them; of a cluster
        that was joined only the run's actors end, with this connection.
        """
        import ray

        if self.is_joined and self._is_open:
            self._asked.clear()
            self._tell_autoscaler()
            self._is_open = False
            ray.shutdown()
        if self._reaper is None:
            return 0
        reaper, self._reaper = self._reaper, None
        ray.shutdown()
        self._keep_ray_logs()
        killed = reaper.finish()
        os.environ.pop(TAG_VARIABLE, None)
        if killed:
            log.warning("launch: killed %d processes that Ray had left behind", killed)
        return killed

    def _keep_ray_logs(self) -> None:
        """What Ray itself said, for `rlmix runs logs`; Ray's folder goes away."""
        assert self.temp_dir is not None
        source = self.temp_dir / "session_latest" / "logs"
        for path in source.glob("*") if source.is_dir() else ():
            kept = path.name.startswith(("gcs_server", "raylet"))
            if kept and path.is_file() and path.stat().st_size:
                (self.log_dir / "ray").mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, self.log_dir / "ray" / path.name)


def seen_nodes() -> list[NodeSeen]:
    """The live nodes of the cluster that this process is connected to."""
    import ray
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    return [
        NodeSeen(
            total=node["Resources"],
            free=free.get(node["NodeID"], {}),
            labels=node.get("Labels") or {},
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
