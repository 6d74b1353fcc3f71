"""The row of `metrics.jsonl` that describes what a step trained on: rewards, pools, endings."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from rlmix.core.sample import TrainSample
from rlmix.core.trajectory import Outcome, StopReason, Trajectory
from rlmix.pools.spec import UpdateReport


def serving_pool(trajectory: Trajectory) -> str:
    """The pool that sampled most of a session's tokens; ties go to the earlier one."""
    tokens: Counter[str] = Counter()
    for turn in trajectory.turns:
        tokens[turn.pool] += len(turn.output_ids)
    return tokens.most_common(1)[0][0] if tokens else ""


def tokens_by_pool(trajectories: Sequence[Trajectory]) -> dict[str, int]:
    tokens: Counter[str] = Counter()
    for trajectory in trajectories:
        for turn in trajectory.turns:
            tokens[turn.pool] += len(turn.output_ids)
    return dict(tokens)


def trained_by_pool(samples: Sequence[TrainSample]) -> tuple[dict[str, int], dict[str, int]]:
    """Pool -> trained trajectories of which it sampled most tokens, and pool -> trained tokens."""
    trajectories: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for sample in samples:
        numbers = np.bincount(sample.pools[sample.mask], minlength=len(sample.pool_names))
        counts = Counter(dict(zip(sample.pool_names, numbers.tolist(), strict=True)))
        tokens.update(counts)
        trajectories.update(name for name, _ in counts.most_common(1))
    return dict(trajectories), dict(tokens)


def prompt_tokens(trajectory: Trajectory) -> int:
    """Tokens sent to engines over all turns: each turn sends the whole context again."""
    total, context = 0, len(trajectory.prompt_ids)
    for turn in trajectory.turns:
        total += context
        context += len(turn.output_ids) + len(turn.observation_ids)
    return total


def trajectory_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Rewards and session facts of one step.

    Args:
        trajectories: every member of the step's groups, voids included.
    Returns:
        `reward/*` over valid sessions (a void is not a reward), `rollout/*` over all or, where
        named so, over the valid ones.
    """
    valid = [t for t in trajectories if t.outcome is not Outcome.VOID]
    by_pool: defaultdict[str, list[float]] = defaultdict(list)
    for trajectory in valid:
        by_pool[serving_pool(trajectory)].append(trajectory.reward)
    metrics: dict[str, float] = {
        "rollout/sessions": float(len(trajectories)),
        "rollout/tokens": float(sum(t.num_sampled_tokens for t in trajectories)),
        "rollout/context_tokens": float(sum(t.num_tokens for t in trajectories)),
        "rollout/rehomed_sessions": float(sum(t.rehomed > 0 for t in trajectories)),
    }
    turns = [turn for t in trajectories for turn in t.turns]
    if sampled := sum(len(turn.output_ids) for turn in turns):
        metrics["rollout/record_bytes_per_token"] = (
            sum(turn.record_bytes for turn in turns) / sampled
        )
        metrics["rollout/wire_bytes_per_token"] = sum(turn.wire_bytes for turn in turns) / sampled
        metrics["rollout/head_turns_frac"] = _mean([float(t.head is not None) for t in turns])
    if not valid:
        return metrics
    metrics["reward/mean"] = _mean([t.reward for t in valid])
    for pool, rewards in sorted(by_pool.items()):
        metrics[f"reward/by_pool/{pool}"] = _mean(rewards)
        metrics[f"rollout/by_pool/{pool}_sessions"] = float(len(rewards))
    metrics["rollout/turns_mean"] = _mean([float(len(t.turns)) for t in valid])
    metrics["rollout/sampled_tokens_mean"] = _mean([float(t.num_sampled_tokens) for t in valid])
    stops = Counter(t.stop_reason for t in valid)
    for reason in StopReason:
        if not reason.is_infrastructure:
            metrics[f"rollout/stop_{reason.value}_frac"] = stops[reason] / len(valid)
    sent = sum(prompt_tokens(t) for t in valid)
    cached = sum(turn.cached_tokens for t in valid for turn in t.turns)
    metrics["rollout/cached_tokens_frac"] = cached / sent if sent else 0.0
    metrics["time/session_mean_s"] = _mean([t.finished_s - t.started_s for t in valid])
    metrics["time/session_model_s"] = _mean([sum(turn.model_s for turn in t.turns) for t in valid])
    metrics["time/session_tool_s"] = _mean([sum(turn.tool_s for turn in t.turns) for t in valid])
    return metrics


def update_metrics(updates: Sequence[UpdateReport]) -> dict[str, float]:
    """How replicas took new weights since the step before; empty when none did."""
    if not updates:
        return {}
    pauses = [update.pause_s for update in updates]
    return {
        "weights/updates": float(len(updates)),
        "weights/pull_bytes": float(sum(update.pull_bytes for update in updates)),
        "weights/pull_max_s": max(update.pull_s for update in updates),
        "weights/pause_mean_s": _mean(pauses),
        "weights/pause_max_s": max(pauses),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
