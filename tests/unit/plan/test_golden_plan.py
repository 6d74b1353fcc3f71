"""The plans of the default run and of every experiment, compared with stored ones.

`scripts/update_goldens.py` writes them anew after a change that is meant.
"""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def golden_texts() -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("goldens", ROOT / "scripts/update_goldens.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    texts: dict[str, str] = module.golden_texts()
    return texts


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return golden_texts()


def test_every_plan_is_the_stored_one(texts: dict[str, str]) -> None:
    folder = Path(__file__).parent / "goldens"
    stored = {path.name: path.read_text() for path in folder.glob("*.json")}
    assert sorted(stored) == sorted(texts)
    for name, text in texts.items():
        assert json.loads(text) == json.loads(stored[name]), name
