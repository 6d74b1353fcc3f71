"""What a slot says of itself, for the live view, `scale pools` and the scaler. Reads only."""

from typing import TYPE_CHECKING

from rlmix.pools.spec import ReplicaStatus

if TYPE_CHECKING:
    from rlmix.pools.slot import Slot


def status_of(slot: "Slot", *, since_s: float) -> ReplicaStatus:
    """Args:
    since_s: how long it has been in its state.
    """
    load = slot.load if slot.is_serving else None
    return ReplicaStatus(
        name=slot.spec.name,
        pool=slot.spec.pool,
        state=slot.state,
        reason=slot.reason,
        incarnation=slot.incarnation,
        version=slot.version,
        url=None if slot.info is None else slot.info.url,
        pid=None if slot.info is None else slot.info.pid,
        running=0 if load is None else load.running,
        queued=0 if load is None else load.queued,
        tokens_per_s=0.0 if load is None else load.tokens_per_s,
        kv_used_frac=0.0 if load is None else load.kv_used_frac,
        restarts=slot.restarts,
        since_s=since_s,
        is_held=slot.is_held,
        is_leaving=slot.is_leaving,
        is_routed=slot.routed_version is not None,
        has_served=slot.has_served,
        bring_up=slot.bring_up,
        boot_s=slot.boot_s,
    )
