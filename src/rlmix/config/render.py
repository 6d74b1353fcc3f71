"""A configuration as YAML text, for `--cfg config` and the run directory."""

from dataclasses import asdict
from typing import Any


def config_yaml(config: Any) -> str:
    """Every value of a configuration dataclass, in the schema's order."""
    import yaml

    return yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True)
