"""Several timed replicas in one process, and the port from which their faults are commanded."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from rlmix.engine.timed.http1 import Connection, Message
from rlmix.engine.timed.replica import ReplicaSpec, TimedReplica
from rlmix.engine.timed.steps import StepTimes

FAULTS = {
    "kill": "cut all connections and refuse new ones, as a dead process does",
    "restart": "come back at the same address, empty, with the first version",
    "hang": "accept and answer nothing",
    "stall": "sample nothing, answer everything else",
    "flap": "be unreachable `times` times, `down_s` each, `up_s` apart; forget nothing",
    "version": "serve weight version `version` from now on",
}


class TimedFleet:
    """Replicas by name and a control port. `GET /fleet` counts; `POST /fleet/NAME` with `{"fault":
    ...}` breaks something and answers how many requests under way that hit."""

    def __init__(self, specs: Sequence[ReplicaSpec]) -> None:
        self.replicas = {spec.name: TimedReplica(spec) for spec in specs}
        self._control: asyncio.Server | None = None
        self._flaps: set[asyncio.Task[None]] = set()
        self.port = 0

    async def start(self) -> None:
        for replica in self.replicas.values():
            await replica.listen()
        loop = asyncio.get_running_loop()
        self._control = await loop.create_server(
            lambda: Connection(self._handle, lambda _: None, lambda _: None), "127.0.0.1", 0
        )
        self.port = self._control.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        for task in self._flaps:
            task.cancel()
        await asyncio.gather(*self._flaps, return_exceptions=True)
        for replica in self.replicas.values():
            replica.cut()
        if self._control is not None:
            self._control.close()

    @property
    def control_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def urls(self) -> dict[str, str]:
        return {name: replica.url for name, replica in self.replicas.items()}

    def describe(self) -> dict[str, Any]:
        return {name: replica.describe() for name, replica in self.replicas.items()}

    async def inject(self, name: str, order: Mapping[str, Any]) -> int:
        """Break a replica; returns the requests under way that were hit.

        Raises:
            ValueError: the replica or the fault is unknown.
        """
        replica = self.replicas.get(name)
        if replica is None:
            raise ValueError(f"replica {name!r} is unknown; known: {', '.join(self.replicas)}")
        fault = order.get("fault")
        if fault == "kill":
            return replica.cut()
        if fault == "restart":
            await replica.restart()
            return 0
        if fault == "hang":
            return replica.hang()
        if fault == "stall":
            return replica.stall()
        if fault == "version":
            return replica.set_version(int(order["version"]))
        if fault == "flap":
            lost = replica.cut()
            task = asyncio.create_task(self._flap(replica, order), name=f"flap {name}")
            self._flaps.add(task)
            task.add_done_callback(self._flaps.discard)
            return lost
        raise ValueError(f"fault {fault!r} is unknown; faults: {', '.join(FAULTS)}")

    async def _flap(self, replica: TimedReplica, order: Mapping[str, Any]) -> None:
        for cycle in range(int(order.get("times", 1))):
            if cycle:
                replica.cut()
            await asyncio.sleep(float(order.get("down_s", 0.3)))
            await replica.listen()
            await asyncio.sleep(float(order.get("up_s", 0.5)))

    def _handle(self, connection: Connection, message: Message) -> None:
        task = asyncio.ensure_future(self._control_call(connection, message))
        self._flaps.add(task)
        task.add_done_callback(self._flaps.discard)

    async def _control_call(self, connection: Connection, message: Message) -> None:
        name = message.path.removeprefix("/fleet").strip("/")
        try:
            if message.method == "GET" and not name:
                connection.reply(200, orjson.dumps(self.describe()))
                return
            hit = await self.inject(name, orjson.loads(message.body or b"{}"))
            connection.reply(200, orjson.dumps({"in_flight": hit}))
        except (ValueError, KeyError) as error:
            connection.reply(400, orjson.dumps({"error": {"message": str(error)}}))


def read_specs(document: Sequence[Mapping[str, Any]]) -> list[ReplicaSpec]:
    """Replicas from JSON: a list of objects with the fields of `ReplicaSpec`.

    Raises:
        TypeError: a field is missing or unknown.
    """
    return [
        ReplicaSpec(**{**entry, "steps": StepTimes.from_dict(entry["steps"])}) for entry in document
    ]


def write_specs(specs: Sequence[ReplicaSpec]) -> list[dict[str, Any]]:
    """The inverse of `read_specs`."""
    return [
        {
            "name": spec.name, "accelerator": spec.accelerator, "steps": spec.steps.to_dict(),
            "max_running": spec.max_running, "kv_tokens": spec.kv_tokens,
            "context_length": spec.context_length, "version": spec.version,
            "time_scale": spec.time_scale,
        }
        for spec in specs
    ]  # fmt: skip
