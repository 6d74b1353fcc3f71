"""What a diff says about itself: paths as on disk, whatever git writes around them."""

import os
import subprocess
from pathlib import Path

import pytest

from rlmix.tasks.sources.patches import Change, changes_in, paths_in
from tests.unit.tasks.prepare.images import sh, write

NAMES = ("plain.py", "with space.py", "na\u00efve.py", 'quo"te.py', "back\\slash.py", "ta\tb.py",
         "a b/x b/y.py", os.fsdecode(b"latin-\xe9.py"))  # fmt: skip


@pytest.mark.parametrize("quote", ["true", "false"])
def test_every_name_that_git_writes_comes_back(tmp_path: Path, quote: str) -> None:
    sh("git init -q . && git commit -q --allow-empty -m x", tmp_path)
    write(tmp_path, dict.fromkeys(NAMES, "one\n"))
    write(tmp_path, {f"empty/{name}": "" for name in NAMES})
    listing = subprocess.run(
        f"git add -A && git -c core.quotePath={quote} diff --cached",
        shell=True, cwd=tmp_path, capture_output=True, check=True,
    )  # fmt: skip
    found = list(changes_in(listing.stdout.decode("utf-8", "surrogateescape")))
    assert {one.path for one in found} == {*NAMES, *(f"empty/{name}" for name in NAMES)}
    assert all(one.makes_path for one in found)


def test_renames_copies_deletions_and_modes_are_told_apart() -> None:
    diff = (
        "diff --git a/old.py b/new.py\nsimilarity index 100%\nrename from old.py\n"
        "rename to new.py\n"
        "diff --git a/gone.py b/gone.py\ndeleted file mode 100644\n--- a/gone.py\n+++ /dev/null\n"
        "@@ -1 +0,0 @@\n-x\n"
        "diff --git a/run.sh b/run.sh\nold mode 100644\nnew mode 100755\n"
        "diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1,2 +1,2 @@\n--- not/a/path\n"
        "+++ b/not/a/path either\n+rename to nowhere\n"
    )
    assert list(changes_in(diff)) == [
        Change(path="new.py", makes_path=True),
        Change(path="gone.py", makes_path=False),
        Change(path="run.sh", makes_path=False),
        Change(path="a.py", makes_path=False),
    ]
    assert paths_in("no diff") == ()
