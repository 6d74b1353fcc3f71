"""Sets that lie elsewhere: on the Hugging Face Hub, or in any store that fsspec opens.

Invariant: what is read is pinned. A set of the Hub is named by a commit id, never by a branch that
moves; a copy from a store is made once per address and revision and appears whole or not at all.
"""

import hashlib
import re
import shutil
from pathlib import Path
from typing import Any

from rlmix.core.errors import ConfigError, DataError
from rlmix.tasks.sources.rows import SUFFIXES

HUB = "hf://"
_HUB_NAME = re.compile(r"(?:datasets/)?([\w.-]+/[\w.-]+)(?:/(.+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://")
TIMEOUT_S = 10.0
"""To hear that the Hub answers; files may take longer."""
TEXTS = ("*.sh", "*.py", "*.txt", "*.toml", "*.md", "*.diff", "*.patch", "*Dockerfile", "*SUMS")
"""Beside tables: scripts of SWE-bench Pro, lists of ids, folders of Harbor tasks."""


def is_elsewhere(address: str) -> bool:
    return bool(_URL.match(address))


def fetch(address: str, *, revision: str, cache: Path | None = None) -> Path:
    """A folder of this machine with the set at `address`.

    Args:
        address: `hf://OWNER/NAME[/PATH]`, or a URL that fsspec opens (`s3://`, `gs://`, `file://`).
        revision: commit id on the Hub; of a store any word, which names the copy.
        cache: where copies are kept; None takes the Hub's own place, and `~/.cache/rlmix/sets`.

    Raises:
        ConfigError: no such form of address, or a revision that is not pinned.
        DataError: it is not there, or this machine is offline and has no copy.
    """
    if address.startswith(HUB):
        return _from_hub(address, revision, cache)
    return _from_store(address, revision, cache or Path("~/.cache/rlmix/sets").expanduser())


def _from_hub(address: str, revision: str, cache: Path | None) -> Path:
    match = _HUB_NAME.fullmatch(address.removeprefix(HUB).strip("/"))
    if match is None or ".." in (match[2] or "").split("/"):
        raise ConfigError(f"--path {address}: allowed: hf://OWNER/NAME or hf://OWNER/NAME/PATH")
    if not _COMMIT.fullmatch(revision):
        raise ConfigError(
            f"--revision {revision}: a set of the Hub is read at a pinned commit, because branches "
            "and tags move; give its 40 digits (on the set's page, Files, History)"
        )
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError:
        raise DataError(f"--path {address}: `pip install 'rlmix[hub]'` reads the Hub") from None
    inside = match[2] or ""
    kinds = [f"*{suffix}" for suffix in SUFFIXES] + list(TEXTS)
    try:
        folder = snapshot_download(
            match[1],
            repo_type="dataset",
            revision=revision,
            cache_dir=cache,
            allow_patterns=[f"{inside}/{kind}" for kind in kinds] + [inside] if inside else kinds,
            etag_timeout=TIMEOUT_S,
        )
    except (OSError, ValueError, HfHubHTTPError) as error:
        said = str(error).strip().split("\n")[0]
        raise DataError(
            f"--path {address}: not on this machine at revision {revision[:12]}, and the Hub gave "
            f"nothing ({type(error).__name__}: {said}); go online, or download it elsewhere and "
            "give --path FOLDER"
        ) from None
    found = Path(folder) / inside
    if not found.exists():
        raise DataError(f"--path {address}: revision {revision[:12]} has no {inside}")
    return found


def _from_store(address: str, revision: str, cache: Path) -> Path:
    try:
        import fsspec
    except ImportError:
        raise DataError(f"--path {address}: `pip install 'rlmix[hub]'` reads stores") from None
    digest = hashlib.sha256(f"{address}\0{revision}".encode()).hexdigest()[:24]
    place = cache / digest
    if place.is_dir():
        return place
    part = cache / f"{digest}.incomplete"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        store, root = fsspec.core.url_to_fs(address)
        _copy(store, root, part)
    except (OSError, ValueError, ImportError) as error:
        shutil.rmtree(part, ignore_errors=True)
        said = str(error).strip().split("\n")[0]
        raise DataError(
            f"--path {address}: no copy on this machine, and the store gave nothing "
            f"({type(error).__name__}: {said}); allowed: an address that fsspec can open from here"
        ) from None
    part.rename(place)
    return place


def _copy(store: Any, root: str, target: Path) -> None:
    """Files below `root`, or that one file.

    Raises:
        FileNotFoundError: there is none.
        ValueError: a name in the store leads out of the copy.
    """
    names = [root] if store.isfile(root) else store.find(root)
    if not names:
        raise FileNotFoundError(f"nothing at {root}")
    for name in names:
        inside = Path(name).name if name == root else name[len(root.rstrip("/")) + 1 :]
        if ".." in inside.split("/"):
            raise ValueError(f"{inside!r} leads out of the set")
        (target / inside).parent.mkdir(parents=True, exist_ok=True)
        store.get_file(name, str(target / inside))
