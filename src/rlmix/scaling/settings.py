"""Which keys of the configuration a run takes while it goes on, and how they are put in. Pure.

Everything else is fixed by what was built from it: processes, formats, the loss.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from rlmix.config.schema.scaling import ScalingConfig
from rlmix.config.schema.train import TrainConfig
from rlmix.core.errors import ConfigError

FIXED = ("simulate",)
OF_LOOP = ("loop.sessions_per_step", "loop.min_step_s")
OF_POOLS = ("min_replicas", "max_replicas")


def live_keys() -> tuple[str, ...]:
    """As they are named to people; `NAME` stands for a pool."""
    scaling = [f"scaling.{one.name}" for one in fields(ScalingConfig) if one.name not in FIXED]
    return (*OF_LOOP, *scaling, *(f"pools.NAME.{name}" for name in OF_POOLS))


def check_live(key: str, pools: Mapping[str, object]) -> None:
    """Raises ConfigError when a running run does not take `key`."""
    parts = key.split(".")
    is_of_pool = len(parts) == 3 and parts[0] == "pools" and parts[1] in pools
    named = f"pools.NAME.{parts[2]}" if is_of_pool else key
    if named not in live_keys():
        raise ConfigError(
            f"{key}: a running run does not take it; it takes {', '.join(live_keys())}; for "
            "anything else stop the run and resume it with the new value"
        )


def put_settings(config: TrainConfig, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Change values of a configuration in place; returns what they were.

    Raises:
        ConfigError: a key that is not live.
    """
    for key in settings:
        check_live(key, config.pools)
    before = {}
    for key, value in settings.items():
        owner, name = _place(config, key)
        before[key] = getattr(owner, name)
        setattr(owner, name, value)
    return before


def get_setting(config: TrainConfig, key: str) -> Any:
    owner, name = _place(config, key)
    return getattr(owner, name)


def still_wanted(config: TrainConfig, kept: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Settings of a former attempt that this one takes over: those whose key the configuration
    still has as it was before they were changed; a new value given by hand wins.

    Args:
        kept: key -> {"from": value before, "to": value after}.
    """
    for key, change in kept.items():
        parts = key.split(".")
        is_there = parts[0] != "pools" or parts[1] in config.pools
        if is_there and get_setting(config, key) == change["from"]:
            yield key, change["to"]


def _place(config: TrainConfig, key: str) -> tuple[Any, str]:
    owner: Any = config
    *path, name = key.split(".")
    for part in path:
        owner = owner[part] if isinstance(owner, dict) else getattr(owner, part)
    return owner, name
