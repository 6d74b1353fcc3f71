"""Evaluates one version after another beside a training run: an actor with sandboxes of its own.

Nothing here touches the trainer, its pools or its workers; the process steps back for them (nice).
Invariant: all tokens of an evaluation come from the version it is about, else it is an error.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlmix.config.schema.train import TrainConfig
from rlmix.core.errors import EngineError

NICENESS = 10
"""Of everything that evaluates while a trainer shares the cores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatorSpec:
    """What the evaluator is told once."""

    config: TrainConfig
    router_url: str
    router_token: str = field(repr=False)
    model_dir: str
    run_id: str
    scratch_dir: str


class Evaluator:
    """Meant as an asynchronous actor; `evaluate` one version at a time."""

    def __init__(self, spec: EvaluatorSpec, *, niceness: int = NICENESS) -> None:
        os.nice(niceness)
        self._spec = spec

    async def evaluate(self, folder: str, version: int, digest: str) -> dict[str, Any]:
        """Judge `version`, which the pool serves, into `folder`; goes on where it stopped.

        Raises:
            EngineError: tokens came from another version.
            RlmixError: the benchmark, the sandboxes or the ledger cannot be used.
        """
        from rlmix.engine.client import EngineClient
        from rlmix.evals.checkpoints import PolicyChoice
        from rlmix.evals.facts import facts_of, sampling_of
        from rlmix.evals.policy import PolicyAgent
        from rlmix.evals.run import EvalRequest, judge_all
        from rlmix.model.chat import ChatRenderer
        from rlmix.tasks.benchmark import GENERATED, open_benchmark

        spec, config = self._spec, self._spec.config
        asked = config.eval
        benchmark = open_benchmark(
            asked.data or GENERATED,
            subset="all" if asked.subset == "all+hard" else asked.subset,
            path=asked.path,
            limit=asked.limit,
            seed=config.tasks.seed,
        )
        choice = PolicyChoice(
            folder=Path(spec.model_dir), step=version, label=f"step {version}", digest=digest
        )
        engine = EngineClient(
            spec.router_url, token=spec.router_token, timeout_s=config.router.request_timeout_s
        )
        agent = PolicyAgent(
            engine=engine,
            renderer=ChatRenderer(spec.model_dir),
            sampling=sampling_of(config),
            min_version=version,
        )
        request = EvalRequest(
            config=config,
            benchmark=benchmark,
            agent="policy",
            folder=Path(folder),
            facts=facts_of(config, benchmark, "policy", jobs=asked.concurrency, policy=choice),
            jobs=asked.concurrency,
            policy=choice,
            sandbox_owner=spec.run_id,
        )
        try:
            result = await judge_all(
                request, Path(spec.scratch_dir), agent, lambda: {"engine": "the run's eval pool"}
            )
        finally:
            await engine.close()
        if wrong := agent.versions - {version}:
            raise EngineError(
                f"evals: version {version} was evaluated and tokens came from {sorted(wrong)}"
            )
        return kept_keys(result.report)


def kept_keys(report: Mapping[str, Any]) -> dict[str, Any]:
    """What the run's list of evaluations says of one; the rest is in its folder."""
    names = (
        "pass_at_1", "ci95", "pass_at_k", "ci95_k", "k", "n", "tasks", "void", "attempts",
        "timed_out", "empty",
    )  # fmt: skip
    found = {name: report[name] for name in names}
    return found | {"benchmark": report["facts"]["benchmark"]}
