"""The reference experiments, planned without files or network."""

import copy
import functools

from rlmix.config.compose import load_config
from rlmix.config.schema.train import TrainConfig
from rlmix.plan.build import build_plan
from rlmix.plan.model_facts import REFERENCE, bundled_facts
from rlmix.plan.runplan import RunPlan


@functools.cache
def _composed(overrides: tuple[str, ...]) -> TrainConfig:
    return load_config("train", overrides).config


def configured(*overrides: str, experiment: str = "qwen36_mixed") -> TrainConfig:
    """A configuration of one's own, free to change."""
    return copy.deepcopy(_composed((f"experiment={experiment}", *overrides)))


@functools.cache
def planned(*overrides: str, experiment: str = "qwen36_mixed") -> RunPlan:
    config = configured(*overrides, experiment=experiment)
    return build_plan(config, facts=bundled_facts(REFERENCE), python="python")
