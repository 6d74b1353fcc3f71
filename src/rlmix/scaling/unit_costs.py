"""A step's cost over what it trained: by trajectory and by 1,000 tokens, in all and by pool.

Whatever was paid for is in it: replicas that boot, idle, drain, or stand in quarantine while their
machine is held, and sessions that were dropped or void. Pure arithmetic.
"""

from collections.abc import Mapping

from rlmix.scaling.costs import StepCost, unit_costs


def unit_cost_metrics(
    cost: StepCost, *, trajectories: Mapping[str, int], tokens: Mapping[str, int]
) -> dict[str, float]:
    """Under the names of `metrics.jsonl`; what cannot be said (nothing trained) is left out.

    Worked: pool a held for 0.40 USD trained 80 trajectories of 100 tokens, pool b for 0.20 USD 20
    of 200: 0.60 / 100 = 0.006 USD each and 0.60 / 12 = 0.05 for 1,000 tokens in all; 0.40 / 8 =
    0.05 in a, 0.20 / 4 = 0.05 in b.

    Args:
        trajectories: pool -> trained trajectories of which it sampled most.
        tokens: pool -> trained tokens that it sampled.
    """
    whole = unit_costs(
        cost.usd, trajectories=sum(trajectories.values()), trained_tokens=sum(tokens.values())
    )
    metrics = whole.metrics()
    for pool, usd in cost.by_pool_usd.items():
        own = unit_costs(
            usd, trajectories=trajectories.get(pool, 0), trained_tokens=tokens.get(pool, 0)
        )
        if own.trajectory_usd is not None:
            metrics[f"cost/trajectory_by_pool/{pool}_usd"] = own.trajectory_usd
        if own.per_1k_tokens_usd is not None:
            metrics[f"cost/per_1k_tokens_by_pool/{pool}_usd"] = own.per_1k_tokens_usd
    return metrics
