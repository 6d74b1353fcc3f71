"""Where YAML lies. Imports nothing heavy, so that every command can ask."""

from pathlib import Path

from rlmix.core.errors import ConfigError


def conf_dir() -> Path:
    """The YAML that ships with rlmix: inside the installed package, else the checkout's.

    Raises:
        ConfigError: it is in neither place.
    """
    package = Path(__file__).resolve().parents[1]
    places = (package / "conf", package.parents[1] / "conf")
    for folder in places:
        if (folder / "train.yaml").is_file():
            return folder
    raise ConfigError(
        f"conf: no train.yaml in {' or '.join(map(str, places))}; install rlmix again"
    )


def default_runs_dir() -> Path:
    """`run.dir` as the shipped YAML has it, without composing."""
    import yaml

    values = yaml.safe_load((conf_dir() / "train.yaml").read_text())
    return Path(values["run"]["dir"])
