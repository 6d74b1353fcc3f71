"""Accelerators under any of their names, wherever a configuration names one."""

import re

from rlmix.config.schema.train import TrainConfig
from rlmix.core.accelerators import canonical


def use_known_accelerators(config: TrainConfig) -> None:
    """Replace aliases by keys of `accelerators`, in place. Names that mean none stay as they are,
    for the checks to refuse."""
    known = list(config.accelerators)
    for pool in config.pools.values():
        pool.accelerator = canonical(pool.accelerator, known) or pool.accelerator
    for node in config.inventory.nodes.values():
        node.accelerator = canonical(node.accelerator, known) or node.accelerator
    simulate = config.scaling.simulate
    simulate.against = canonical(simulate.against, known) or simulate.against
    trainer = canonical(simulate.trainer_accelerator, known)
    simulate.trainer_accelerator = trainer or simulate.trainer_accelerator
    config.trainer.device = canonical(config.trainer.device, known) or config.trainer.device


def quoted_accelerator(text: str) -> str:
    """`pools.h100.accelerator=H100!` with the value quoted: Hydra's grammar has no bare `!`."""
    return re.sub(r"^([\w.+-]+\.(?:accelerator|device))=([\w-]+!)$", r"\1='\2'", text)
