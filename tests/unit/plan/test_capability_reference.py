"""`docs/accelerators.md` shows every accelerator and every row of the matrix."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_page_is_what_the_script_writes() -> None:
    path = ROOT / "scripts/capability_reference.py"
    spec = importlib.util.spec_from_file_location("capability_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = (ROOT / "docs/accelerators.md").read_text()
    assert module.page(text) == text, "run scripts/capability_reference.py"
