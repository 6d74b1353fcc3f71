"""Which room may import which, how long a file may be, and names that say nothing.

Imports inside functions count as well: they are dependencies all the same. Imports for type
checkers only (`if TYPE_CHECKING:`) do not run and are left out.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "rlmix"
TESTS = Path(__file__).parents[1]
SCRIPTS = Path(__file__).parents[2] / "scripts"
MAX_LINES = 500
BANNED_NAMES = {"util", "utils", "helper", "helpers", "common", "misc"}

LOOP = (
    "core algos numerics config.schema config.render plan observe tasks sandbox model engine "
    "router sessions pools batch weights trainer launch scaling loop evals"
)
ALLOWED: dict[str, str] = {
    "core": "",
    "algos": "core",
    "numerics": "core",
    "config": "core",
    "plan": "core config.schema numerics.view_spec",
    "observe": "core",
    "sandbox": "core observe",
    "tasks": "core sandbox",
    "model": "core",
    "engine": "core numerics observe model",
    "router": "core observe engine.protocol engine.arguments model.bundle",
    "sessions": "core engine sandbox tasks model",
    "pools": "core observe plan engine router.client launch.process launch.handle weights.store "
    "weights.push weights.remote weights.staging",
    "batch": "core algos",
    "weights": "core observe numerics",
    "trainer": "core algos numerics batch weights observe model",
    "launch": "core plan observe",
    "scaling": "core config.schema observe plan router.states router.step_model router.strategies",
    "diff": "core algos numerics batch config.schema observe tasks model engine trainer weights",
    "loop": LOOP,
    "evals": LOOP,
    "studies": "core algos numerics observe",
    "cli": "core config plan observe model sandbox tasks scaling loop evals diff",
}
"""Room -> what it may import, besides itself: rooms, or single modules of a room."""

HEAVY: dict[str, tuple[str, ...]] = {
    "torch": (
        "algos",
        "numerics",
        "engine",
        "batch",
        "weights",
        "trainer",
        "model",
        "diff",
        "studies",
    ),
    "transformers": ("model", "trainer", "diff"),
    "ray": ("launch/ray.py", "launch/actor.py", "launch/each_node.py"),
    "hydra": ("config/compose.py",),
    "omegaconf": ("config/compose.py",),
    "sglang": ("engine",),
}
"""Package -> rooms or files that may import it."""


@dataclass(frozen=True, slots=True)
class Import:
    path: Path
    line: int
    module: str

    @property
    def room(self) -> str:
        parts = self.path.relative_to(SRC).parts
        return parts[0] if len(parts) > 1 else ""

    def __str__(self) -> str:
        return f"{self.path.relative_to(SRC.parent)}:{self.line} imports {self.module}"


def imports_of(path: Path) -> Iterator[Import]:
    tree = ast.parse(path.read_text(), filename=str(path))
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            skipped.update(inner for child in node.body for inner in ast.walk(child))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            if node.module == "rlmix":
                for alias in node.names:
                    yield Import(path, node.lineno, f"rlmix.{alias.name}")
            elif node.module:
                yield Import(path, node.lineno, node.module)


FILES = sorted(path for path in SRC.rglob("*.py") if "mini" not in path.parts)
IMPORTS = [found for path in FILES for found in imports_of(path)]


def is_allowed(found: Import) -> bool:
    target = found.module.removeprefix("rlmix.")
    if found.module == "rlmix" or target.split(".")[0] == found.room:
        return True
    allowed = ALLOWED[found.room].split()
    return any(target == rule or target.startswith(f"{rule}.") for rule in allowed)


def test_every_room_is_in_the_table() -> None:
    rooms = {path.name for path in SRC.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms - {"conf"} == set(ALLOWED)


def test_rooms_import_only_what_the_table_allows() -> None:
    ours = [found for found in IMPORTS if found.module.split(".")[0] == "rlmix" and found.room]
    assert "\n".join(str(found) for found in ours if not is_allowed(found)) == ""


@pytest.mark.parametrize("package", HEAVY)
def test_heavy_packages_stay_in_their_rooms(package: str) -> None:
    allowed = HEAVY[package]
    wrong = [
        str(found)
        for found in IMPORTS
        if found.module.split(".")[0] == package
        and found.room not in allowed
        and found.path.relative_to(SRC).as_posix() not in allowed
    ]
    assert wrong == []


def test_light_entry_points_load_nothing_heavy_and_print_nothing() -> None:
    code = (
        "import sys\n"
        "import rlmix.cli, rlmix.router.__main__, rlmix.sessions.worker, rlmix.plan.build\n"
        "heavy = {'torch', 'ray', 'hydra', 'omegaconf', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_files_stay_below_five_hundred_lines() -> None:
    paths = [*FILES, *TESTS.rglob("*.py"), *SCRIPTS.glob("*.py")]
    lengths = {str(path): len(path.read_text().splitlines()) for path in paths}
    assert {path: length for path, length in lengths.items() if length > MAX_LINES} == {}


def test_no_file_or_folder_has_a_name_that_says_nothing() -> None:
    named = [path for path in SRC.rglob("*") if path.stem.lower() in BANNED_NAMES]
    assert named == []


def test_every_module_says_what_it_is_for() -> None:
    silent = [str(path) for path in FILES if not ast.get_docstring(ast.parse(path.read_text()))]
    assert silent == []
