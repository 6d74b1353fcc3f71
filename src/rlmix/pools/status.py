"""What a slot says of itself: to views, `scale pools`, the scaler, the router. Reads only."""

from typing import TYPE_CHECKING, Any

from rlmix.pools.spec import Leaving, ReplicaStatus

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
        machine=None if slot.handle is None else slot.handle.machine,
        waits_for_machine=slot.handle is not None and not slot.handle.is_placed,
    )


def record_of(slot: "Slot") -> dict[str, Any] | None:
    """What the router must hold about it now; None when it must not serve."""
    is_out = slot.is_held or slot.leaving is Leaving.EMPTIED
    if not slot.is_serving or slot.info is None or is_out:
        return None
    return {
        "pool": slot.spec.pool,
        "url": slot.info.url,
        "numerics_key": slot.info.numerics_key,
        "view": slot.spec.view,
        "speed": slot.spec.speed,
        "max_running": slot.spec.max_running,
        "version": slot.version,
        # Updating is short, and requests wait for its end in the engine: to take all
        # replicas out of rotation for it would only make a herd afterwards.
        "state": "draining" if slot.is_leaving else "ready",
        "cache_salt": slot.cache_salt,
        # A server that is not the run's own has a key of its own, which the router finds there.
        **({"token_env": slot.spec.token_env} if slot.spec.url and slot.spec.token_env else {}),
    }
