"""The limits that `rlmix diff-logprobs` goes by, once for all tests."""

from functools import cache

from rlmix.config.compose import load_config
from rlmix.diff.findings import Thresholds


@cache
def limits() -> Thresholds:
    diff = load_config("train", []).config.diff
    return Thresholds(**{name: getattr(diff, name) for name in Thresholds.__dataclass_fields__})
