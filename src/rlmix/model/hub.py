"""Models of the Hub at a pinned commit: fetched once, then laid where all machines of a run look.

`hf://OWNER/NAME` with `model.revision` becomes a plain folder below `run.dir`, which a cluster's
machines share. Invariant: the folder is complete or not there, and a commit's folder never changes;
offline (`HF_HUB_OFFLINE=1`) only what was fetched before is used.
"""

import fcntl
import re
import shutil
from pathlib import Path

from rlmix.core.errors import ConfigError, DataError

HUB = "hf://"
FOLDER = ".models"
PATTERNS = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")
"""Weights, settings, tokenizer, template: no code, no pickled weights."""
TIMEOUT_S = 20.0
_NAME = re.compile(r"[\w.-]+/[\w.-]+")
COMMIT = re.compile(r"[0-9a-f]{40}")


def is_remote(path: str) -> bool:
    return path.startswith(HUB)


def fetch_model(address: str, *, revision: str | None, root: Path) -> Path:
    """The model's folder below `root`, fetched if it is not there yet.

    Args:
        address: `hf://OWNER/NAME`.
        revision: a commit, 40 hexadecimal digits.
        root: `run.dir`.
    Raises:
        ConfigError: no such form of address, or no commit.
        DataError: it is not on this machine, and the Hub did not give it.
    """
    name, commit = _checked(address, revision)
    folder = root / FOLDER / f"{name.replace('/', '--')}--{commit[:12]}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # Another run may be fetching it.
        if folder.is_dir():
            return folder
        found = _from_hub(address, name, commit, PATTERNS)
        part = folder.with_name(f".{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(found, part, ignore=shutil.ignore_patterns(".*"))
        part.rename(folder)
    return folder


def fetch_config(address: str, *, revision: str | None) -> Path:
    """The model's config.json alone, in the Hub's own cache: enough for a plan.

    Raises: as `fetch_model`.
    """
    name, commit = _checked(address, revision)
    return _from_hub(address, name, commit, ("config.json",)) / "config.json"


def _checked(address: str, revision: str | None) -> tuple[str, str]:
    name = address.removeprefix(HUB)
    if _NAME.fullmatch(name) is None:
        raise ConfigError(f"model.path={address}: allowed: hf://OWNER/NAME")
    if revision is None or COMMIT.fullmatch(revision) is None:
        raise ConfigError(
            f"model.revision={revision}: a model of the Hub is taken at a pinned commit, because "
            "branches and tags move; give its 40 digits (on the model's page, Files, History)"
        )
    return name, revision


def _from_hub(address: str, name: str, commit: str, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        folder = snapshot_download(
            name, revision=commit, allow_patterns=list(patterns), etag_timeout=TIMEOUT_S
        )
    except (OSError, ValueError, HfHubHTTPError) as error:
        said = str(error).strip().split("\n")[0]
        raise DataError(
            f"model.path={address}: not on this machine at revision {commit[:12]}, and the Hub "
            f"gave nothing ({type(error).__name__}: {said}); go online once, or download it "
            "elsewhere and set model.path=FOLDER"
        ) from None
    return Path(folder)
