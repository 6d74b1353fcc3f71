"""Models of the Hub: pinned, fetched once into the runs' folder, and offline from there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlmix.config.compose import load_config
from rlmix.core.errors import ConfigError
from rlmix.model.bundle import resolve_model
from rlmix.model.hub import fetch_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FETCH = """
import sys
from pathlib import Path
from rlmix.core.errors import RlmixError
from rlmix.model.hub import fetch_model
try:
    print(fetch_model("hf://some/model", revision=sys.argv[2], root=Path(sys.argv[1])))
except RlmixError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


def fetch_offline(
    root: Path, home: Path, revision: str = COMMIT
) -> "subprocess.CompletedProcess[str]":
    """In a process of its own: the Hub's library reads its environment once."""
    return subprocess.run(
        [sys.executable, "-c", FETCH, str(root), revision],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(home)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def fill_cache(home: Path) -> None:
    """As the Hub's library leaves it: links into blobs."""
    folder = home / "hub" / "models--some--model"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / "blobs" / name).write_bytes(b"{}")
        (snapshot / name).symlink_to(folder / "blobs" / name)


def test_what_was_fetched_before_is_laid_into_the_runs_folder_once(tmp_path: Path) -> None:
    home, root = tmp_path / "home", tmp_path / "runs"
    fill_cache(home)
    done = fetch_offline(root, home)
    assert done.returncode == 0, done.stderr
    folder = root / ".models" / f"some--model--{COMMIT[:12]}"
    assert done.stdout.strip() == str(folder)
    # Whole files: the cache may be on another machine's disk.
    assert not (folder / "config.json").is_symlink()
    assert (folder / "model.safetensors").read_bytes() == b"{}"
    assert not list((root / ".models").glob("*.part"))
    # From now on nobody needs the cache, nor the Hub.
    assert fetch_model("hf://some/model", revision=COMMIT, root=root) == folder
    assert fetch_offline(root, tmp_path / "nothing").returncode == 0


def test_offline_and_not_fetched_is_one_sentence_and_leaves_no_half_folder(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    done = fetch_offline(root, tmp_path / "home")
    assert done.returncode == 1
    assert "DataError: model.path=hf://some/model: not on this machine at revision" in done.stderr
    assert "set model.path=FOLDER" in done.stderr
    assert [path.suffix for path in (root / ".models").iterdir()] == [".lock"]


@pytest.mark.parametrize("revision", [None, "main", COMMIT[:12], COMMIT.upper()])
def test_only_a_commit_pins(tmp_path: Path, revision: str | None) -> None:
    with pytest.raises(ConfigError, match=r"model\.revision="):
        fetch_model("hf://some/model", revision=revision, root=tmp_path)
    with pytest.raises(ConfigError, match=r"model\.revision"):
        load_config("train", ["model.path=hf://some/model", f"model.revision={revision or 'null'}"])


def test_a_folder_has_no_revision_and_other_commands_say_who_fetches(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="which has no revisions"):
        load_config("train", [f"model.revision='{COMMIT}'"])
    with pytest.raises(ConfigError, match="`rlmix train` alone fetches hf://"):
        resolve_model("hf://some/model")
    with pytest.raises(ConfigError, match="hf://OWNER/NAME"):
        fetch_model("hf://../x/y", revision=COMMIT, root=tmp_path)
