"""What the trainer holds and costs. Computed, never measured."""

from rlmix.config.schema.train import TrainConfig
from rlmix.plan.memory import GIB
from rlmix.plan.model_facts import ModelFacts
from rlmix.plan.placement import Placement, mean_price
from rlmix.plan.runplan import TrainerPlan
from rlmix.plan.trainer_memory import (
    TrainerMemory,
    most_that_fit,
    trained_tokens_per_s,
    trainer_memory,
)

BYTES_PER_PARAM = {"adamw": 2 + 4 + 4 + 8, "sgd": 2 + 4 + 4}
"""BF16 weights, float32 master and gradient, two float32 moments."""


def plan_trainer(
    config: TrainConfig, facts: ModelFacts, *, views: tuple[str, ...], placement: Placement
) -> TrainerPlan:
    """Ranks, memory and price of the trainer."""
    trainer = config.trainer
    states = facts.params * BYTES_PER_PARAM[trainer.optimizer]
    tokens = trainer.micro_batch_tokens

    def memory(micro_batch: int) -> TrainerMemory:
        return trainer_memory(
            facts,
            tokens=micro_batch,
            # All of them, which no session has: a tool's tokens are read and not learned.
            policy_tokens=micro_batch,
            ranks=trainer.ranks,
            optimizer=trainer.optimizer,
            recomputes=trainer.recompute,
            offloads=trainer.offload,
        )

    held = memory(tokens)
    most_tokens, tokens_per_s = None, None
    gpus, price = 0, 0.0
    if trainer.device != "cpu":
        gpus = trainer.ranks
        listed = config.accelerators[trainer.device].usd_per_hour
        price = mean_price(placement.trainer, placement.usd_per_hour, listed) or 0.0
        chip = config.accelerators[trainer.device]
        most_tokens = most_that_fit(memory, chip.memory_gb * 1e9)
        tokens_per_s = trained_tokens_per_s(
            facts,
            tflops=chip.bf16_tflops * trainer.ranks,
            session_tokens=min(tokens, config.session.max_context_tokens),
            recomputes=trainer.recompute,
        )
    return TrainerPlan(
        ranks=trainer.ranks,
        device=trainer.device,
        compute="bf16, float32 master weights",
        optimizer=trainer.optimizer,
        lr=trainer.lr,
        micro_batch_tokens=trainer.micro_batch_tokens,
        threads=trainer.threads,
        views=views,
        gpus=gpus,
        memory_gib=states / GIB,
        rank_gib=held.total_bytes / GIB,
        rank_parts_gib={part: size / GIB for part, size in held.parts().items()},
        most_tokens=most_tokens,
        tokens_per_s=tokens_per_s,
        nodes=placement.trainer,
        usd_per_hour=gpus * price,
    )


def trainer_faults(config: TrainConfig, plan: TrainerPlan, placement: Placement) -> list[str]:
    """Why the trainer cannot hold its share, with what can."""
    if plan.device == "cpu":
        return []
    chip = config.accelerators[plan.device]
    faults = []
    if mean_price(placement.trainer, placement.usd_per_hour, chip.usd_per_hour) is None:
        where = f"accelerators.{plan.device}.usd_per_hour"
        faults.append(f"{where}: no public price is known; set {where}=PRICE")
    if plan.rank_gib * GIB > chip.memory_gb * 1e9:
        parts = plan.rank_parts_gib
        share = sum(parts[part] for part in ("weights", "master", "gradient", "optimizer"))
        more = "; raise trainer.ranks" if share > plan.rank_gib / 2 else ""
        faults.append(
            f"trainer.ranks: got {plan.ranks} on {plan.device}: {share:.0f} GiB of "
            f"weights and optimizer and {plan.rank_gib - share:.0f} GiB of activations for "
            f"trainer.micro_batch_tokens={plan.micro_batch_tokens} are more than "
            f"{chip.memory_gb:g} GB; lower the tokens (and session.max_context_tokens){more}"
        )
    return faults
