"""What can be planned and not yet be run, each answered with one sentence.

`--cfg plan` shows such a configuration whole; starting it is refused before anything starts. An
entry leaves this file together with the change that makes it run.
"""

from collections.abc import Iterator

from rlmix.config import names
from rlmix.config.problems import Problem
from rlmix.config.schema.train import TrainConfig


def cannot_run_yet(config: TrainConfig) -> Iterator[Problem]:
    """Every choice of a sound configuration that only a plan can serve."""
    if config.tasks.source in names.PREPARED_SOURCES and config.tasks.path is None:
        source = config.tasks.source
        yield Problem(
            where="tasks.path=null",
            what=f"tasks.source={source} is trained on from a prepared folder; make one with "
            f"`rlmix tasks prepare {source} --path DATA --images DIR --out FOLDER`, check it with "
            f"`rlmix tasks check {source} --path FOLDER`, and set tasks.path=FOLDER",
        )
