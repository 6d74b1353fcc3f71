"""Everything that a number depends on, so that two numbers can be told apart or compared."""

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rlmix.config.schema.train import TrainConfig
from rlmix.evals.agents import file_digest
from rlmix.evals.checkpoints import PolicyChoice
from rlmix.evals.policy import Sampling
from rlmix.model.chat import BASH_TOOL
from rlmix.tasks.benchmark import Benchmark

ASKED = (
    "benchmark", "checksum", "task_ids_sha256", "agent", "agent_file_sha256", "k", "n",
    "policy_sha256", "prompt_sha256", "sampling", "agent_limit_s",
)  # fmt: skip
"""What makes a question: attempts of another one are never mixed in."""
COMPARABLE = (
    "benchmark", "checksum", "task_ids_sha256", "agent_limit_s", "prompt_sha256", "n",
)  # fmt: skip
"""What two evaluations must share so that their difference is one of their agents."""
PACKAGES = ("rlmix", "torch", "numpy", "ray")


def sampling_of(config: TrainConfig) -> Sampling:
    algo, session, sandbox = config.algo, config.session, config.sandbox
    return Sampling(
        temperature=algo.temperature,
        top_p=algo.top_p,
        top_k=algo.top_k,
        max_turns=session.max_turns,
        max_turn_tokens=session.max_turn_tokens,
        max_context_tokens=session.max_context_tokens,
        command_timeout_s=sandbox.command_timeout_s,
        output_chars=sandbox.output_chars,
        seed=config.run.seed,
    )


def facts_of(
    config: TrainConfig,
    benchmark: Benchmark,
    agent: str,
    *,
    jobs: int,
    policy: PolicyChoice | None = None,
) -> dict[str, Any]:
    """The facts that are known before the first attempt; all JSON values."""
    tasks = benchmark.tasks
    ids = sorted(task.public.task_id for task in tasks)
    images = sorted({task.image for task in tasks if task.image})
    samples = agent.partition(":")[0] in ("policy", "endpoint")
    facts: dict[str, Any] = {
        "benchmark": benchmark.name,
        "revision": benchmark.revision,
        "checksum": benchmark.checksum,
        "subset_sha256": benchmark.subset_sha256 or "all tasks",
        "tasks": len(tasks),
        "task_ids_sha256": _sha256("\n".join(ids)),
        "excluded_tasks": list(benchmark.excluded),
        "images": len(images),
        "image_digests_sha256": _sha256("\n".join(images)) if images else "no images",
        "images_without_digest": sum("@sha256:" not in image for image in images),
        "agent": agent,
        "agent_file_sha256": file_digest(agent),
        "policy": policy.label if policy else "none",
        "policy_sha256": policy.digest if policy else "",
        "prompt_sha256": prompt_digest(benchmark, policy),
        "sampling": asdict(sampling_of(config)) if samples else "none",
        "k": config.eval.k,
        "n": config.eval.n,
        "agent_limit_s": _range([task.agent_s for task in tasks]),
        "verdict_limit_s": _range([task.verify_s for task in tasks]),
        "sandbox": config.sandbox.backend,
        "network": "none for the agent and the tests",
        "verdict": "on a pristine copy in a fresh sandbox; only the diff crosses over",
        "at_the_limit": "what the work tree holds is judged",
        "attempts_at_a_time": jobs,
        "cpus": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }
    return facts | {f"version_{name}": _version(name) for name in PACKAGES}


def shown_ids(benchmark: Benchmark) -> list[str]:
    return [task.public.task_id for task in benchmark.tasks]


def question_of(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: facts[name] for name in ASKED}


def prompt_digest(benchmark: Benchmark, policy: PolicyChoice | None) -> str:
    """SHA-256 over what a model is told: every task's text, the tool, and the chat template."""
    digest = hashlib.sha256(json.dumps(BASH_TOOL, sort_keys=True).encode())
    for task in sorted(benchmark.tasks, key=lambda task: task.public.task_id):
        digest.update(task.public.issue.encode("utf-8", "surrogatepass"))
    if policy is not None:
        template = policy.folder / "chat_template.jinja"
        digest.update(template.read_bytes() if template.is_file() else b"")
    return digest.hexdigest()


def _range(seconds: list[float]) -> str:
    low, high = min(seconds, default=0.0), max(seconds, default=0.0)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def read_report(place: str) -> dict[str, Any]:
    """The report of another evaluation: its folder, or its report.json.

    Raises:
        ConfigError: there is none.
    """
    from rlmix.core.errors import ConfigError

    path = Path(place).expanduser()
    file = path / "report.json" if path.is_dir() else path
    try:
        document = json.loads(file.read_text())
        assert isinstance(document["task_scores"], list)
        assert isinstance(document["facts"], dict)
    except (OSError, ValueError, KeyError, TypeError, AssertionError):
        raise ConfigError(
            f"--against {place}: no report of an evaluation; give the folder of one, or its "
            "report.json"
        ) from None
    return dict(document)
