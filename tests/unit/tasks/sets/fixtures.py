"""A small set in the form of each source, with unpacked images that its gates really run in.

Contents are invented. Images of Python tasks hold the repository alone, with pytest's own sources
in it, and run with this machine's programs; the others hold a small system of their own.
"""

import importlib.util
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rlmix.tasks.prepare.set import slug
from tests.unit.sandbox.rootfs import small_system
from tests.unit.tasks.prepare.images import sh, write
from tests.unit.tasks.sources import rows

BUGGY = "def total(first, second):\n    return first - second\n"
FIXED_LINE = "    return first + second  # both of them"
FIXED = f"def total(first, second):\n{FIXED_LINE}\n"
FIX = (
    "diff --git a/pack/sums.py b/pack/sums.py\n--- a/pack/sums.py\n+++ b/pack/sums.py\n"
    "@@ -1,2 +1,2 @@\n def total(first, second):\n-    return first - second\n"
    f"+{FIXED_LINE}\n"
)
BUG = (
    "diff --git a/pack/sums.py b/pack/sums.py\n--- a/pack/sums.py\n+++ b/pack/sums.py\n"
    f"@@ -1,2 +1,2 @@\n def total(first, second):\n-{FIXED_LINE}\n+    return first - second\n"
)
TESTS = (
    "from pack.sums import total\n\n\ndef test_adds():\n    assert total(2, 3) == 5\n\n\n"
    "def test_zero():\n    assert total(0, 0) == 0\n"
)
METHODS = (
    "from pack.sums import total\n\n\nclass TestSums:\n"
    "    def test_adds(self):\n        assert total(2, 3) == 5\n\n"
    "    def test_zero(self):\n        assert total(0, 0) == 0\n"
)
ADDS, ZERO = "tests/test_sums.py::test_adds", "tests/test_sums.py::test_zero"


def added(path: str, text: str) -> str:
    """A git diff that adds a file."""
    lines = text.splitlines()
    return (
        f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
        f"@@ -0,0 +1,{len(lines)} @@\n" + "".join(f"+{line}\n" for line in lines)
    )


HIDDEN = added("tests/test_sums.py", TESTS)


@dataclass(frozen=True, kw_only=True)
class MadeSet:
    """What `rlmix tasks prepare` is given."""

    data: Path
    images: Path
    task_id: str


NO_COLOURS = {
    "__init__": b"highlight = None\n",
    "util": b"ClassNotFound = KeyError\n",
    "lexer": b"Lexer = None\n",
    "lexers/__init__": b"",
    "lexers/diff": b"DiffLexer = None\n",
    "lexers/python": b"PythonLexer = None\n",
    "formatters/__init__": b"",
    "formatters/terminal": b"TerminalFormatter = None\n",
}


@cache
def pytest_sources() -> dict[str, bytes]:
    """pytest and what it needs, to lie at the top of a repository: `python -m pytest` finds it."""
    py = importlib.util.find_spec("py")
    assert py is not None
    assert py.origin is not None
    site = Path(py.origin).parent
    files = {"py.py": Path(py.origin).read_bytes()}
    for folder in [*site.glob("pluggy-*.dist-info"), *site.glob("pytest-*.dist-info")]:
        files[f"{folder.name}/METADATA"] = (folder / "METADATA").read_bytes()
    for name in ("_pytest", "pytest", "pluggy", "iniconfig", "packaging"):
        for path in (site / name).rglob("*.py"):
            files[f"{name}/{path.relative_to(site / name).as_posix()}"] = path.read_bytes()
    # Colours are off in a sandbox, so only the names have to be there.
    files |= {f"pygments/{name}.py": text for name, text in NO_COLOURS.items()}
    return files


def python_repo(image: Path, workdir: str) -> str:
    """A repository at its base; returns the commit."""
    repo = image / workdir.strip("/")
    write(repo, {**pytest_sources(), "pack/__init__.py": "", "pack/sums.py": BUGGY})
    sh("git init -q -b main . && git add -A && git commit -qm base", repo)
    return sh("git rev-parse HEAD", repo).strip()


def table(folder: Path, row: dict[str, Any]) -> Path:
    file = folder / "data/set.jsonl"
    write(folder, {"data/set.jsonl": json.dumps(row) + "\n"})
    return file


def swe_bench_like(name: str) -> Callable[[Path], MadeSet]:
    def make(folder: Path) -> MadeSet:
        image = folder / "images/owner__pack-7"
        base = python_repo(image, "/testbed")
        # The fix is upstream's next commit, and a tag of it is still there.
        repo = image / "testbed"
        write(repo, {"pack/sums.py": FIXED})
        sh("git commit -qam 'the fix' && git tag v2 && git reset -q --hard HEAD~1", repo)
        row = {
            **rows.SWE_GYM,
            "base_commit": base,
            "patch": FIX,
            "test_patch": HIDDEN,
            "FAIL_TO_PASS": [ADDS],
            "PASS_TO_PASS": [ZERO],
        }
        if name == "swe_bench":
            row |= {"FAIL_TO_PASS": json.dumps([ADDS]), "PASS_TO_PASS": f"['{ZERO}']"}
        if name == "nemotron":
            metadata = {
                **rows.NEMOTRON["responses_create_params"]["metadata"],
                "base_commit": base,
                "instance_dict": json.dumps(row),
            }
            row = {"responses_create_params": {"input": [], "metadata": metadata}}
        return MadeSet(data=table(folder, row), images=folder / "images", task_id="owner__pack-7")

    return make


def swe_rebench(folder: Path) -> MadeSet:
    made = swe_bench_like("swe_rebench")(folder)
    image = made.images / made.task_id
    (image / "testbed").rename(image / "pack")
    row = json.loads(made.data.read_text())
    row["install_config"] = {"test_cmd": ["python -m compileall -q pack", "python -m pytest -rA"]}
    row["PASS_TO_PASS"] = []
    return MadeSet(data=table(folder, row), images=made.images, task_id=made.task_id)


def swe_smith(folder: Path) -> MadeSet:
    """The fix is the parent of the bug, whose tests were removed by a third commit: here they stay,
    because a set without a test patch has no other."""
    task_id = rows.SWE_SMITH["instance_id"]
    repo = folder / "images" / slug(task_id) / "testbed"
    write(repo, {**pytest_sources(), "pack/__init__.py": "", "pack/sums.py": FIXED,
                 "tests/test_sums.py": TESTS})  # fmt: skip
    sh("git init -q -b main . && git add -A && git commit -qm pristine", repo)
    write(repo, {"pack/sums.py": BUGGY})
    sh("git commit -qam 'Bug Patch'", repo)
    row = {**rows.SWE_SMITH, "patch": BUG, "FAIL_TO_PASS": [ADDS], "PASS_TO_PASS": [ZERO]}
    return MadeSet(data=table(folder, row), images=folder / "images", task_id=task_id)


def r2e_gym(folder: Path) -> MadeSet:
    """Tests and script lie in the image, and upstream linked them into the repository."""
    task_id = "pack-" + "c" * 12
    image = folder / "images" / task_id
    python_repo(image, "/testbed")
    write(image, {"r2e_tests/test_1.py": METHODS,
                  "testbed/run_tests.sh": "python -m pytest -rA r2e_tests\n"})  # fmt: skip
    os.symlink("/r2e_tests", image / "testbed/r2e_tests")
    expected = {"TestSums.test_adds": "PASSED", "TestSums.test_zero": "PASSED"}
    row = {**rows.R2E, "expected_output_json": json.dumps(expected)}
    return MadeSet(data=table(folder, row), images=folder / "images", task_id=task_id)


def mimo(folder: Path) -> MadeSet:
    task_id = "format-code-task-000123"
    python_repo(folder / "images" / task_id, "/workspace/repo")
    script = added("mimo_test_command.sh", "cd /workspace/repo\npython -m pytest -rA tests\n")
    row = rows.mimo(
        cwd="/workspace/repo",
        test_patch=HIDDEN + script,
        test_command="bash /workspace/repo/mimo_test_command.sh",
    )
    return MadeSet(data=table(folder, row), images=folder / "images", task_id=task_id)


SHELL_FIX = (
    "diff --git a/total.sh b/total.sh\n--- a/total.sh\n+++ b/total.sh\n@@ -1 +1 @@\n"
    "-echo $(($1 - $2))\n+echo $(($1 + $2)) # of both numbers\n"
)
SHELL_TEST = '[ "$(bash total.sh 2 3)" = 5 ] # two numbers are added\n'
RUN_SCRIPT = 'if bash tests/adds.sh; then echo "adds good"; else echo "adds bad"; fi\n'
PARSER = (
    "import json, sys\nout, err, result = sys.argv[1:]\n"
    "said = dict(line.split() for line in open(out))\n"
    "status = 'PASSED' if said.get('adds') == 'good' else 'FAILED'\n"
    "json.dump({'tests': [{'name': 'adds', 'status': status}]}, open(result, 'w'))\n"
)


def shell_image(folder: Path, name: str, *, has_git: bool = True) -> str:
    """An image with programs of its own; the base's commit."""
    image = small_system(folder / "images" / name)
    write(image, {"app/total.sh": "echo $(($1 - $2))\n"})
    if not has_git:
        return ""
    sh("git init -q -b main . && git add -A && git commit -qm base", image / "app")
    return sh("git rev-parse HEAD", image / "app").strip()


def pro_v1(folder: Path) -> MadeSet:
    task_id = rows.PRO_V1["instance_id"]
    base = shell_image(folder, task_id)
    row = {
        **rows.PRO_V1,
        "base_commit": base,
        "patch": SHELL_FIX,
        "test_patch": added("tests/adds.sh", SHELL_TEST),
        "fail_to_pass": "['adds']",
        "selected_test_files_to_run": '["tests/adds.sh"]',
    }
    scripts = f"data/run_scripts/{task_id}"
    write(folder, {f"{scripts}/run_script.sh": RUN_SCRIPT, f"{scripts}/parser.py": PARSER})
    return MadeSet(data=table(folder, row), images=folder / "images", task_id=task_id)


def pro_v2(folder: Path) -> MadeSet:
    shell_image(folder, "one")
    config = {"repo": "owner/app", "fail_to_pass": ["adds"], "pass_to_pass": []}
    files = {
        **rows.PRO_V2_FILES,
        "environment/Dockerfile": "FROM ghcr.io/owner/pro:one\nWORKDIR /app\n",
        "solution/gold_patch.diff": SHELL_FIX,
        "tests/run_script.sh": RUN_SCRIPT,
        "tests/parser.py": PARSER,
        "tests/config.json": json.dumps(config),
        "tests/test_patch.patch": added("tests/adds.sh", SHELL_TEST),
    }
    write(folder, {f"data/one/{name}": text for name, text in files.items()})
    return MadeSet(data=folder / "data", images=folder / "images", task_id="one")


def harbor(folder: Path) -> MadeSet:
    """No git, no diff: a script makes the fix, and a script says the reward."""
    shell_image(folder, "sum-it", has_git=False)
    write(folder, {
        "data/sum-it/instruction.md": "total.sh subtracts\n",
        "data/sum-it/task.toml": 'version = "1.0"\n[verifier]\ntimeout_sec = 60\n'
        '[verifier.env]\nWANTED = "5"\n[environment]\ncpus = 1\nmemory = "1G"\n',
        "data/sum-it/environment/Dockerfile": "FROM hub/shell:1\nWORKDIR /app\n",
        "data/sum-it/solution/solve.sh": "cat /solution/right.sh > /app/total.sh\n",
        "data/sum-it/solution/right.sh": "echo $(($1 + $2))\n",
        "data/sum-it/tests/test.sh": "cd /app\nmkdir -p /logs/verifier\n"
        '[ "$(bash total.sh 2 3)" = "$WANTED" ] && [ "$(tail -c 1 /tests/odd.bin)" = x ]\n'
        "echo $((1 - $?)) > /logs/verifier/reward.txt\n",
        "data/sum-it/tests/odd.bin": b"\xff\xfex",
    })  # fmt: skip
    return MadeSet(data=folder / "data", images=folder / "images", task_id="sum-it")


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What its gates say."""

    make: Callable[[Path], MadeSet]
    runs: int = 4
    """Two of the reference and two of no change; no reference, two."""
    is_weak: bool = False
    programs: str = "this machine's"


SETS: dict[str, Expected] = {
    "swe_bench": Expected(make=swe_bench_like("swe_bench")),
    "swe_gym": Expected(make=swe_bench_like("swe_gym")),
    "nemotron": Expected(make=swe_bench_like("nemotron")),
    "swe_rebench": Expected(make=swe_rebench),
    "swe_smith": Expected(make=swe_smith),
    "r2e_gym": Expected(make=r2e_gym, runs=2, is_weak=True),
    "mimo": Expected(make=mimo, runs=2, is_weak=True),
    "swe_bench_pro": Expected(make=pro_v1, programs="the image's"),
    "swe_bench_pro_v2": Expected(make=pro_v2, programs="the image's"),
    "harbor": Expected(make=harbor, is_weak=True, programs="the image's"),
}
