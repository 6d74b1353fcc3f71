"""Two plans side by side: what each fleet costs, and what a token of each pool costs."""

from rlmix.plan.runplan import Comparison, RunPlan


def compare(plan: RunPlan, other: RunPlan, *, experiment: str) -> Comparison:
    """How `plan` stands against the plan of `experiment`."""
    return Comparison(
        experiment=experiment,
        usd_per_hour=other.usd_per_hour,
        pools_usd_per_hour={name: pool.usd_per_hour for name, pool in other.pools.items()},
        tokens_per_s=other.tokens_per_s,
        usd_per_mtok=other.usd_per_mtok,
        saved_frac=1.0 - plan.usd_per_hour / other.usd_per_hour if other.usd_per_hour else 0.0,
        pool_cost_frac={
            name: pool.modelled.usd_per_mtok / other.usd_per_mtok
            for name, pool in plan.pools.items()
            if other.usd_per_mtok and pool.modelled and pool.modelled.usd_per_mtok
        },
    )
