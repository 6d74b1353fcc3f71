"""`docs/config.md` shows every key with its comment and default."""

import importlib.util
from pathlib import Path

from rlmix.config.places import conf_dir

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "config.md"


def test_the_page_is_what_the_script_writes() -> None:
    spec = importlib.util.spec_from_file_location("ref", ROOT / "scripts/config_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = PAGE.read_text()
    assert module.page(text) == text, "run scripts/config_reference.py"


def test_the_page_names_every_file_that_can_be_chosen() -> None:
    text = PAGE.read_text()
    for path in conf_dir().glob("*/*.yaml"):
        assert f"`{path.parent.name}`" in text, path
        if path.parent.name in ("algo", "pools", "pool", "accelerators", "experiment"):
            assert f"`{path.stem}`" in text, path
