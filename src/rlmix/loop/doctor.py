"""Looks at this machine, or at every machine of a Ray cluster, and says what is missing."""

import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlmix.config.schema.train import TrainConfig
from rlmix.loop.node_facts import NodeAsk, node_facts
from rlmix.loop.node_findings import Finding, Wanted, judge, unreachable
from rlmix.plan.capabilities import SGLANG_VERSION

NODE_LIMIT_S = 180.0
"""For one machine's whole answer; importing on a cold network file system takes a minute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    findings: tuple[Finding, ...]
    nodes: tuple[dict[str, Any], ...]
    """What each machine said; the first is the one that asked, where there is no cluster."""

    @property
    def can_train(self) -> bool:
        return all(finding.ok for finding in self.findings if finding.is_needed)

    def to_dict(self) -> dict[str, Any]:
        return {
            "can_train": self.can_train,
            "checks": [asdict(finding) for finding in self.findings],
            "nodes": list(self.nodes),
        }


def diagnose(config: TrainConfig) -> Diagnosis:
    """Every machine that a run of this configuration would use.

    Raises:
        LaunchError: `launch.address` names a cluster that does not answer.
    """
    real = [pool for pool in config.pools.values() if pool.engine == "sglang"]
    wanted = Wanted(real_pools=bool(real), sglang_version=SGLANG_VERSION)
    ask = NodeAsk(
        store=str(Path(config.run.dir).resolve()),
        sglang_python=config.sglang.python,
        sandbox=config.sandbox.backend,
    )
    if config.launch.address is None:
        facts = node_facts(ask)
        found = judge(facts, wanted=wanted, asking=facts, is_asking=True)
        return Diagnosis(findings=tuple(found), nodes=(facts,))
    return _of_cluster(config.launch.address, ask, wanted)


def _of_cluster(address: str, ask: NodeAsk, wanted: Wanted) -> Diagnosis:
    from dataclasses import replace

    from rlmix.launch.each_node import ask_each_node

    folder = Path(ask.store)
    folder.mkdir(parents=True, exist_ok=True)
    marker = f".rlmix-doctor-asks-{socket.gethostname()}-{os.getpid()}"
    (folder / marker).touch()
    try:
        asking = node_facts(replace(ask, marker=marker))
        answers = ask_each_node(
            address, node_facts, replace(ask, marker=marker), limit_s=NODE_LIMIT_S
        )
    finally:
        (folder / marker).unlink(missing_ok=True)
    findings: list[Finding] = []
    for answer in answers:
        if answer.error is not None:
            findings.append(unreachable(answer.address, answer.error))
            continue
        findings += judge(
            {**answer.facts, "host": f"{answer.facts['host']} ({answer.address})"},
            wanted=wanted,
            asking=asking,
            is_asking=False,
            skew_s=answer.skew_s,
            skew_error_s=answer.skew_error_s,
            ray_label=answer.ray_label,
        )
    return Diagnosis(
        findings=tuple(findings),
        nodes=tuple(
            {
                "address": answer.address,
                "ray_label": answer.ray_label,
                "error": answer.error,
                "skew_s": answer.skew_s,
                **(answer.facts or {}),
            }
            for answer in answers
        ),
    )
