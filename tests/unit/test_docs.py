"""The documents agree with the tree: links lead somewhere, no page is lost, rooms are complete."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def links_of(page: Path) -> list[str]:
    return [link for link in LINK.findall(page.read_text()) if "://" not in link]


def test_every_link_leads_to_a_file() -> None:
    dead = [
        f"{page.name}: {link}"
        for page in PAGES
        for link in links_of(page)
        if not (page.parent / link).exists()
    ]
    assert dead == []


def test_the_map_links_every_page() -> None:
    linked = set(links_of(ROOT / "docs" / "index.md"))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - linked - {"index.md"} == set()


def test_the_map_has_one_row_for_every_room() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE)
    source = ROOT / "src" / "rlmix"
    rooms = {path.name for path in source.iterdir() if (path / "__init__.py").is_file()}
    assert sorted(rows) == sorted(rooms)


def test_scripts_and_tests_that_pages_name_exist() -> None:
    named = re.compile(r"`(?:python )?((?:scripts|tests/unit|tests/e2e|conf|src)/[\w./-]+)`")
    missing = [
        f"{page.name}: {path}"
        for page in PAGES
        for path in named.findall(page.read_text())
        # `conf/pools/NAME.yaml`: a file that the reader makes.
        if "NAME" not in path and not (ROOT / path).exists()
    ]
    assert missing == []
