"""Sets in stores: the Hub's own layout of copies on disk, and a `file://` store. No network."""

import json
from pathlib import Path

import huggingface_hub.constants
import pytest
from typer.testing import CliRunner

from rlmix.cli.app import app
from rlmix.core.errors import ConfigError, DataError
from rlmix.tasks.sources.hub import fetch, is_elsewhere
from rlmix.tasks.sources.read import read_set
from tests.unit.tasks.sources import rows

COMMIT = "639865fd3374" + "0" * 28


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def hub_copy(cache: Path, files: dict[str, bytes]) -> None:
    """`owner/set` at COMMIT as the Hub's client keeps it: contents by hash, links by name."""
    home = cache / "datasets--owner--set"
    for number, (name, content) in enumerate(files.items()):
        blob = home / "blobs" / f"{number:040x}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link = home / "snapshots" / COMMIT / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    (home / "refs").mkdir()
    (home / "refs/main").write_text(COMMIT)


def line(row: dict[str, object]) -> bytes:
    return json.dumps(row).encode() + b"\n"


def test_a_set_of_the_hub_is_read_at_its_pinned_commit(tmp_path: Path) -> None:
    cache = tmp_path / ".cache" / "hub"  # Folders above the set may be hidden ones.
    hub_copy(cache, {"data/train.jsonl": line(rows.SWE_GYM), "README.md": b"card"})
    folder = fetch("hf://owner/set", revision=COMMIT, cache=cache)
    (task,) = read_set("swe_gym", folder, revision=COMMIT).tasks
    assert task.public.revision == COMMIT
    part = fetch("hf://datasets/owner/set/data", revision=COMMIT, cache=cache)
    assert len(read_set("swe_gym", part).tasks) == 1


def test_offline_and_without_a_copy_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        fetch("hf://owner/other", revision=COMMIT, cache=tmp_path)
    said = str(caught.value)
    assert said.startswith(
        "--path hf://owner/other: not on this machine at revision 639865fd3374, and the Hub gave "
        "nothing ("
    )
    assert said.endswith("; go online, or download it elsewhere and give --path FOLDER")
    assert "\n" not in said


@pytest.mark.parametrize("revision", ["main", "v1.0", "local", COMMIT[:12]])
def test_what_moves_is_no_revision(tmp_path: Path, revision: str) -> None:
    with pytest.raises(ConfigError, match="is read at a pinned commit, because branches and tags"):
        fetch("hf://owner/set", revision=revision, cache=tmp_path)


@pytest.mark.parametrize("address", ["hf://owner", "hf://", "hf://a/b/../../c", "hf://a b/c"])
def test_an_odd_address_of_the_hub_is_refused(tmp_path: Path, address: str) -> None:
    with pytest.raises(ConfigError, match="allowed: hf://OWNER/NAME"):
        fetch(address, revision=COMMIT, cache=tmp_path)


def test_a_store_is_copied_once_and_whole(tmp_path: Path) -> None:
    store = tmp_path / "store/set"
    (store / "data").mkdir(parents=True)
    (store / "data/train.jsonl").write_bytes(line(rows.SWE_GYM))
    address = f"file://{store}"
    assert is_elsewhere(address)
    assert not is_elsewhere(str(store))
    first = fetch(address, revision="r1", cache=tmp_path / "cache")
    assert len(read_set("swe_gym", first).tasks) == 1
    (store / "data/train.jsonl").write_bytes(line({"instance_id": "changed"}))
    assert fetch(address, revision="r1", cache=tmp_path / "cache") == first
    assert len(read_set("swe_gym", first).tasks) == 1
    other = fetch(address, revision="r2", cache=tmp_path / "cache")
    assert read_set("swe_gym", other).tasks == ()
    (one,) = fetch(f"{address}/data/train.jsonl", revision="r", cache=tmp_path / "c").iterdir()
    assert one.name == "train.jsonl"


@pytest.mark.parametrize("address", ["file:///nowhere/at/all", "nonsense://bucket/x"])
def test_a_store_without_the_set_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, address: str
) -> None:
    with pytest.raises(DataError, match="and the store gave nothing"):
        fetch(address, revision="r", cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_command_takes_an_address(tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    args = ["tasks", "prepare", "swe_gym", "--path", "hf://owner/never", "--images", str(images)]
    done = CliRunner().invoke(app, [*args, "--out", str(tmp_path / "out"), "--revision", COMMIT])
    assert done.exit_code == 2
    assert "not on this machine at revision 639865fd3374" in done.output
