"""The gate in front of one slot's replica: canaries, probes, and what its weights read back as.

Invariant: whoever passes has answered from the version that it says it serves.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rlmix.pools.admission import check_canaries
from rlmix.pools.callbacks import References
from rlmix.pools.probes import WeightLedger
from rlmix.pools.spec import FleetSpec, ReplicaSpec
from rlmix.pools.verifying import PROBE_LIMIT_S

CANARIES_LIMIT_S = 60.0
"""For all canary prompts of a replica that was just started."""

Call = Callable[..., Awaitable[Any]]
"""(method, arguments, limit_s=...) -> what the replica answers."""


class Gate:
    """One for each slot; it asks whatever replica fills the slot now."""

    def __init__(
        self,
        spec: ReplicaSpec,
        fleet: FleetSpec,
        *,
        call: Call,
        references: References | None,
        ledger: WeightLedger,
    ) -> None:
        self._spec = spec
        self._fleet = fleet
        self._call = call
        self._references = references
        self._ledger = ledger

    async def admit(self, version: int, folder: Path) -> float | None:
        """The whole gate for a replica that has served nobody yet.

        Returns:
            Mean absolute difference of the canaries to the trainer, nats; None where nobody could
            say.
        Raises:
            AdmissionRefused, EngineError: it must not serve.
        """
        fleet = self._fleet
        if not fleet.canary_prompts:
            return None
        outputs = await self._call(
            "canary", fleet.canary_prompts, fleet.canary_tokens, limit_s=CANARIES_LIMIT_S
        )
        references = None
        if self._references is not None:
            references = await self._references(version, outputs)
        tolerance_nats = self._spec.canary_tolerance_nats
        mean_abs = check_canaries(
            outputs, references, name=self._spec.name, tolerance_nats=tolerance_nats
        )
        again = folder if fleet.checks_identity else None
        await self.prove(version, again=again, canaries=outputs, tolerance_nats=tolerance_nats)
        return mean_abs

    async def prove(self, version: int, **identity: Any) -> None:
        """The engine's probes; after an update without the identity check."""
        if not self._fleet.canary_prompts:
            return
        prompt, limit_s = self._fleet.canary_prompts[0], PROBE_LIMIT_S + self._spec.update_timeout_s
        proof = await self._call("verify", version, prompt, limit_s=limit_s, **identity)
        self._ledger.note(
            proof, pool=self._spec.pool, name=self._spec.name, is_fresh=bool(identity)
        )
