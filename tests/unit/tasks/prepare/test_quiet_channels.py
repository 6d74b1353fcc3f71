"""Channels that say the fix without any of its telling lines, and what else must stay as it was."""

import os
import py_compile
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from rlmix.core.errors import ConfigError, DataError
from rlmix.tasks.prepare.manifest import Excluded, Manifest
from rlmix.tasks.prepare.set import prepare_set
from rlmix.tasks.prepare.task import prepare_task
from rlmix.tasks.record import Base, GoldRecord
from rlmix.tasks.sources.patches import added_by_file, added_lines, reversed_lines
from tests.unit.tasks.prepare.images import BUGGY, FIXED, SECRET, plain_image, sh, task, write

SITE = "usr/lib/python3/site-packages/pack"
LONG = "".join(f"def number_{n}(value):\n    return v + {n}\n\n\n" for n in range(6))
LATER = LONG.replace("v + 3", "v * 3")
SHORT_FIX = (
    "diff --git a/pack/long.py b/pack/long.py\n--- a/pack/long.py\n+++ b/pack/long.py\n"
    "@@ -13,5 +13,5 @@\n def number_3(value):\n-    return v + 3\n+    return v * 3\n \n \n"
    " def number_4(value):\n"
)
NEWS = (
    "diff --git a/CHANGES.md b/CHANGES.md\nnew file mode 100644\n--- /dev/null\n"
    "+++ b/CHANGES.md\n@@ -0,0 +1 @@\n+* Number three is multiplied, as everybody had expected.\n"
)
BUG = SHORT_FIX.replace(
    "-    return v + 3\n+    return v * 3", "-    return v * 3\n+    return v + 3"
)
GOLDS = {
    "a change log tells, the change does not": GoldRecord(task_id="t", patch=NEWS + SHORT_FIX),
    "a bug whose reverse is short": GoldRecord(task_id="t", patch=BUG, is_reversed=True),
}


def image_with(tmp_path: Path, in_repo: dict[str, str | bytes]) -> Path:
    image = plain_image(tmp_path / "image")
    write(image / "testbed", in_repo)
    sh("git add -A && git add -f pack && git commit -qm more", image / "testbed")
    return image


@pytest.mark.parametrize("name", GOLDS)
def test_copies_of_a_file_whose_change_no_line_tells_are_compared_whole(
    tmp_path: Path, name: str
) -> None:
    image = image_with(tmp_path, {"pack/long.py": LONG})
    write(image, {f"{SITE}/__init__.py": "", f"{SITE}/long.py": LATER})
    write(image, {"root/.cache/x/long.py": LATER, "testbed/build/lib/pack/long.py": LATER})
    done = prepare_task(task(gold=GOLDS[name]), image, tmp_path / "out")
    assert isinstance(done, Manifest), done
    assert (tmp_path / "out/overlay" / SITE / "long.py").read_text() == LONG
    assert (tmp_path / "out/repo/build/lib/pack/long.py").read_text() == LONG
    assert "/root/.cache/x/long.py" in done.overlaid

    write(image, {"opt/pack/long.py": LATER})
    done = prepare_task(task(gold=GOLDS[name]), image, tmp_path / "other")
    assert isinstance(done, Excluded)
    assert "/opt/pack/long.py shares 92% of its lines with pack/long.py" in done.reason


def test_files_that_the_fix_leaves_alone_may_differ_where_the_fix_is_known(tmp_path: Path) -> None:
    image = image_with(tmp_path, {"pack/long.py": LONG, "pack/near.py": LONG + "x = 1\n"})
    write(image, {"opt/near.py": LONG + "x = 1\ny = 2\n"})
    gold = GOLDS["a change log tells, the change does not"]
    done = prepare_task(task(gold=gold), image, tmp_path / "out")
    assert isinstance(done, Manifest), done
    assert "copies of 1 files of it were compared whole" in done.proof[-1]


def test_heads_of_a_diff_are_no_lines_of_it() -> None:
    assert added_lines(reversed_lines(BUG)) == ("    return v * 3",)
    assert reversed_lines(BUG).split("@@")[0] == BUG.split("@@")[0]
    odd = "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n--- minus\n+++ plus\n"
    assert added_lines(odd) == ("++ plus",)
    moved = (
        "diff --git a/old.py b/new.py\nrename from old.py\nrename to new.py\n--- a/old.py\n"
        "+++ b/new.py\n@@ -1 +1 @@\n-a\n+b\n"
    )
    assert list(added_by_file(moved)) == [(("old.py", "new.py"), ("b",))]


def test_bytecode_of_a_package_file_and_of_a_source_of_the_same_size_is_seen(
    tmp_path: Path,
) -> None:
    right = "def one(x):\n    return x + 1  # one more than it was\n"
    wrong = right.replace("+ 1", "- 1")
    image = image_with(tmp_path, {"pack/__init__.py": wrong})
    place = image / SITE / "__init__.py"
    write(image, {f"{SITE}/__init__.py": right})
    os.utime(place, (1_500_000_000, 1_500_000_000))
    compiled = Path(py_compile.compile(str(place), doraise=True))
    place.write_text(wrong)
    # The same file name in another package, rightly compiled, stays.
    write(image, {"usr/lib/python3/site-packages/other/__init__.py": "x = 1\n"})
    py_compile.compile(str(image / "usr/lib/python3/site-packages/other/__init__.py"))
    patch = (
        "diff --git a/pack/__init__.py b/pack/__init__.py\n--- a/pack/__init__.py\n"
        "+++ b/pack/__init__.py\n@@ -1,2 +1,2 @@\n def one(x):\n"
        f"-{wrong.splitlines()[1]}\n+{right.splitlines()[1]}\n"
    )
    done = prepare_task(task(gold=GoldRecord(task_id="t", patch=patch)), image, tmp_path / "out")
    assert isinstance(done, Manifest), done
    assert done.overlaid == (f"/{compiled.relative_to(image)}",)


def test_a_replaced_program_can_still_be_run(tmp_path: Path) -> None:
    image = image_with(tmp_path, {"bin/tool": BUGGY})
    write(image, {"usr/local/bin/tool": FIXED})
    (image / "usr/local/bin/tool").chmod(0o755)
    done = prepare_task(task(), image, tmp_path / "out")
    assert isinstance(done, Manifest), done
    replaced = tmp_path / "out/overlay/usr/local/bin/tool"
    assert (replaced.read_text(), replaced.stat().st_mode & 0o777) == (BUGGY, 0o755)


def test_every_tag_that_a_version_is_read_from_stays_at_its_distance(tmp_path: Path) -> None:
    image = plain_image(tmp_path / "image")
    sh("git tag nightly HEAD~1 && git tag build-7 HEAD~2", image / "testbed")
    assert isinstance(prepare_task(task(), image, tmp_path / "out"), Manifest)
    asked = ("", "--tags", "--tags --match 'v*'", "--tags --match '*[0-9]*'")
    for options in asked:
        question = f"git describe --long {options} | sed s/-g.*//"
        said = sh(question, image / "testbed")
        assert sh(question, tmp_path / "out/repo") == said
    # `git describe` alone answers with v1.2.0, the only annotated one.
    assert sh("git describe --long | sed s/-g.*//", tmp_path / "out/repo") == "v1.2.0-3\n"
    assert sh("git describe --tags --long | sed s/-g.*//", tmp_path / "out/repo") == "nightly-1\n"


def test_a_hidden_folder_of_the_repository_goes_with_all_that_is_in_it(tmp_path: Path) -> None:
    image = image_with(tmp_path, {"hidden/inner/test_1.py": "def test_x():\n    assert 1\n"})
    made = task()
    made = replace(made, hidden=replace(made.hidden, image_paths=("/testbed/hidden",)))
    done = prepare_task(made, image, tmp_path / "out")
    assert isinstance(done, Manifest), done
    assert not (tmp_path / "out/repo/hidden").exists()
    assert "hidden" in done.purged


def test_files_of_the_named_commit_that_bear_the_name_of_a_cache_stay(tmp_path: Path) -> None:
    image = image_with(tmp_path, {"tests/data/coverage.xml": "<x/>\n", "tests/data/.tox/x": "y\n"})
    base = sh("git rev-parse HEAD", image / "testbed").strip()
    write(image, {"testbed/coverage.xml": "<mine/>\n"})
    done = prepare_task(task(base=base), image, tmp_path / "out")
    assert isinstance(done, Manifest), done
    assert (tmp_path / "out/repo/tests/data/coverage.xml").read_text() == "<x/>\n"
    assert (tmp_path / "out/repo/tests/data/.tox/x").read_text() == "y\n"
    assert done.purged == ("coverage.xml", "tests/data/.tox")  # Of the folder, all the rest.
    # Of a commit that the image's makers wrote, nobody knows what they ran before.
    done = prepare_task(replace(task(), public=replace(task().public, base=Base(kind="tree"))),
                        image, tmp_path / "other")  # fmt: skip
    assert isinstance(done, Manifest), done
    assert "tests/data/coverage.xml" in done.purged


def test_a_mercurial_history_goes_and_a_packed_one_in_an_archive_excludes(tmp_path: Path) -> None:
    image = plain_image(tmp_path / "image")
    # A revision log: the packed contents lie somewhere behind a head.
    log = b"\0\1\0\1" + bytes(60) + zlib.compress(FIXED.encode())
    for place in ("testbed/.hg", "opt/mirror/.hg"):
        write(image, {f"{place}/store/data/pack/sums.py.i": log, f"{place}/requires": "store\n"})
    done = prepare_task(task(), image, tmp_path / "out")
    assert isinstance(done, Manifest), done
    assert (done.purged, done.overlaid) == ((".hg",), ("/opt/mirror/.hg",))
    assert not (tmp_path / "out/repo/.hg").exists()

    sh("git checkout -q -b future && printf '%s' \"" + SECRET.strip() + "\" > pack/sums.py && "
       "git commit -qam fix && git repack -adq && tar -czf ../opt/old.tgz .git && "
       "git checkout -q main && git branch -qD future", image / "testbed")  # fmt: skip
    done = prepare_task(task(), image, tmp_path / "other")
    assert isinstance(done, Excluded)
    assert done.reason == "/opt/old.tgz cannot be looked through for lines of the fix"


@pytest.mark.parametrize("start", [b"LZIP\1", b"MSCF\0", b"\x89LZO\0", b"xar!\0", b"LRZI\0"])
def test_what_no_library_unpacks_is_not_taken_for_clean(tmp_path: Path, start: bytes) -> None:
    image = plain_image(tmp_path / "image")
    with zipfile.ZipFile(image / "all.zip", "w") as archive:
        archive.writestr("inner", start + b"packed")
    done = prepare_task(task(), image, tmp_path / "out")
    assert isinstance(done, Excluded)
    assert done.reason == "/all.zip cannot be looked through for lines of the fix"


def test_a_place_where_no_set_can_be_written_and_a_machine_without_git_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"set.jsonl": "{}\n", "images/x": ""})
    data, images = tmp_path / "set.jsonl", tmp_path / "images"
    with pytest.raises(ConfigError, match=r"--out .*set.jsonl/x: no folder can be made there"):
        prepare_set("swe_gym", data, images, data / "x", revision="r", limit=None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match="tasks prepare swe_gym: no git on PATH"):
        prepare_set("swe_gym", data, images, tmp_path / "out", revision="r", limit=None)
