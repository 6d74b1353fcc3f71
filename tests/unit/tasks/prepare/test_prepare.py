"""A repository with the fix in every known place comes out clean, whole, and still builds."""

import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from rlmix.tasks.prepare.manifest import Excluded, Manifest
from rlmix.tasks.prepare.overlay import Unproven
from rlmix.tasks.prepare.proof import prove
from rlmix.tasks.prepare.task import prepare_task
from rlmix.tasks.record import GoldRecord
from tests.unit.tasks.prepare.images import (
    BUGGY,
    FIX,
    FIXED,
    SECRET,
    leaking_image,
    plain_image,
    sh,
    task,
    write,
)


def prepared(rootfs: Path, tmp_path: Path, **options: object) -> Manifest:
    done = prepare_task(task(**options), rootfs, tmp_path / "out")  # type: ignore[arg-type]
    assert isinstance(done, Manifest), done
    return done


def every_object(repo: Path) -> bytes:
    ids = sh("git cat-file --batch-all-objects --batch-check='%(objectname)'", repo).split()
    return b"".join(
        subprocess.run(["git", "cat-file", "-p", one], cwd=repo, capture_output=True).stdout
        for one in ids
    )


def test_the_old_check_is_blind_to_a_dangling_fix(tmp_path: Path) -> None:
    repo = leaking_image(tmp_path / "image") / "testbed"
    sh(
        "git for-each-ref --format='%(refname)' | grep -v heads/main | "
        "xargs -n1 git update-ref -d; git reflog expire --expire=now --all",
        repo,
    )
    assert sh("git rev-list --all --not main", repo) == ""
    assert SECRET.strip().encode() in every_object(repo)


def test_a_leaking_image_is_prepared_clean(tmp_path: Path) -> None:
    image = leaking_image(tmp_path / "image")
    done = prepared(image, tmp_path)
    repo = tmp_path / "out/repo"
    assert SECRET.strip().encode() not in every_object(repo)
    found = sh(f"grep -rlF -e '{SECRET.strip()}' . || true", repo)
    assert found == ""
    assert sh("git log --all --format=%s", repo).split() == ["base"] + ["earlier"] * 3
    assert sh("git stash list; git reflog; git remote", repo) == ""
    assert not (repo / "vendor/inner/.git").exists()
    assert (repo / "vendor/inner/keep").exists()
    assert not (repo / "tests/test_sums.py").exists()
    assert not (repo / ".pytest_cache").exists()
    assert (repo / "build/lib/pack/sums.py").read_text() == BUGGY
    times = {path.stat().st_mtime for path in repo.rglob("*") if ".git/" not in str(path)}
    assert len(times) == 1
    for said in ("alternates", "reflogs", "submodule git folders", "stash", "notes", "remotes"):
        assert said in done.left_behind, done.left_behind
    assert any("objects beyond the base" in said for said in done.left_behind)
    assert set(done.overlaid) == {
        "/logs",
        "/opt/mirror.git",
        "/root/.cache/pip/wheels/pack-2.0-py3-none-any.whl",
        "/usr/lib/python3/site-packages/pack/__pycache__/sums.cpython-311.pyc",
        "/usr/lib/python3/site-packages/pack/sums.py",
        "build/lib/pack/sums.py",
    }
    overlay = tmp_path / "out/overlay"
    assert (overlay / "usr/lib/python3/site-packages/pack/sums.py").read_text() == BUGGY
    assert (overlay / "opt/.wh.mirror.git").exists()
    assert (overlay / ".wh.logs").exists()


def test_everything_else_of_the_base_survives(tmp_path: Path) -> None:
    image = leaking_image(tmp_path / "image")
    done = prepared(image, tmp_path)
    repo = tmp_path / "out/repo"
    assert (repo / "crlf.txt").read_bytes() == b"one\r\ntwo\r\n"
    assert os.readlink(repo / "link.py") == "pack/sums.py"
    assert (repo / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (repo / "data.bin").read_bytes() == bytes(range(256))
    assert (repo / "build/native.so").read_bytes() == b"\x7fELF compiled"
    assert (repo / "na\u00efve name.txt").exists()
    tracked = sh("git -c core.quotePath=false ls-files", repo).splitlines()
    assert "kept.log" in tracked
    assert "build/native.so" not in tracked
    assert "pack/fast.so" in done.ignored
    assert sh("git describe", repo).startswith("v1.2.0-3-g")
    assert sh("git status --porcelain", repo) == ""
    assert not any(path.startswith("pack/fast") for path in done.purged)


def test_the_prepared_repository_still_builds(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    prepared(leaking_image(tmp_path / "image"), tmp_path)
    repo = tmp_path / "out/repo"
    run = subprocess.run(
        [sys.executable, "setup.py", "-q", "build", "--build-base", str(tmp_path / "built")],
        cwd=repo, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "built/lib/pack/sums.py").read_text() == BUGGY


def listing(folder: Path) -> dict[str, tuple[float, bytes]]:
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_mtime,
            path.read_bytes() if path.is_file() and not path.is_symlink() else b"",
        )
        for path in sorted(folder.rglob("*"))
    }


def test_preparing_again_changes_nothing_and_elsewhere_gives_the_same_commit(
    tmp_path: Path,
) -> None:
    image = leaking_image(tmp_path / "image")
    first = prepared(image, tmp_path)
    before = listing(tmp_path / "out")
    assert prepared(image, tmp_path) == first
    assert listing(tmp_path / "out") == before
    (tmp_path / "elsewhere").mkdir()
    again = prepared(image, tmp_path / "elsewhere")
    assert (again.commit, again.tree) == (first.commit, first.tree)


def test_an_interrupted_preparation_is_made_again(tmp_path: Path) -> None:
    image = plain_image(tmp_path / "image")
    write(tmp_path, {"out.incomplete/repo/half": "x", "out/repo/old": "no manifest"})
    prepared(image, tmp_path)
    assert not (tmp_path / "out.incomplete").exists()
    assert not (tmp_path / "out/repo/old").exists()


def test_ctrl_c_leaves_no_half_made_repository(tmp_path: Path) -> None:
    image = leaking_image(tmp_path / "image")
    half = tmp_path / "out.incomplete"

    def interrupt() -> None:
        while not half.exists():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    def prepare() -> None:
        threading.Thread(target=interrupt, daemon=True).start()
        prepared(image, tmp_path)
        time.sleep(60)  # Until the signal is there.

    with pytest.raises(KeyboardInterrupt):
        prepare()
    assert not half.exists()
    assert not (tmp_path / "out").exists()


def test_a_fix_that_is_an_ancestor_is_not_in_the_history(tmp_path: Path) -> None:
    """SWE-smith's way: the fix is HEAD's parent, and the patch makes the bug."""
    image = plain_image(tmp_path / "image")
    repo = image / "testbed"
    (repo / "pack/sums.py").write_text(FIXED)
    sh("git commit -qam pristine", repo)
    (repo / "pack/sums.py").write_text(BUGGY)
    sh("git commit -qam bug", repo)
    swapped = {"+": "-", "-": "+"}
    bug = "\n".join(
        line if line.startswith(("---", "+++")) else swapped.get(line[:1], line[:1]) + line[1:]
        for line in FIX.split("\n")
    )
    gold = GoldRecord(task_id="t", patch=bug, is_reversed=True)
    prepared(image, tmp_path, gold=gold)
    out = tmp_path / "out/repo"
    assert SECRET.strip().encode() not in every_object(out)
    assert (out / "pack/sums.py").read_text() == BUGGY


def test_a_base_that_is_not_the_images_head_is_written_from_its_commit(tmp_path: Path) -> None:
    image = plain_image(tmp_path / "image")
    repo = image / "testbed"
    base = sh("git rev-parse HEAD", repo).strip()
    (repo / "pack/sums.py").write_text(FIXED)
    (repo / "pack/later.py").write_text("later = True\n")
    sh("git add -A && git commit -qm fix", repo)
    (repo / "run.sh").unlink()  # What the image lost comes from the commit.
    prepared(image, tmp_path, base=base)
    out = tmp_path / "out/repo"
    assert (out / "pack/sums.py").read_text() == BUGGY
    assert (out / "run.sh").stat().st_mode & 0o777 == 0o755
    assert not (out / "pack/later.py").exists()
    assert (out / "build/native.so").exists()
    assert (out / "crlf.txt").read_bytes() == b"one\r\ntwo\r\n"


def test_a_fix_known_only_as_a_commit_is_read_from_the_image(tmp_path: Path) -> None:
    """R2E's way: the set names the commit, and the image holds the whole history."""
    image = leaking_image(tmp_path / "image")
    commit = sh("git rev-parse future", image / "testbed").strip()
    done = prepared(image, tmp_path, gold=GoldRecord(task_id="t", patch="", commit=commit))
    assert "/usr/lib/python3/site-packages/pack/sums.py" in done.overlaid


def test_without_a_known_fix_installed_copies_become_the_bases_files(tmp_path: Path) -> None:
    image = leaking_image(tmp_path / "image")
    done = prepared(image, tmp_path, knows_fix=False)
    assert "/usr/lib/python3/site-packages/pack/sums.py" in done.overlaid
    assert "the fix is unknown" in done.proof[-1]


EXCLUDED = {
    "a copy in an unknown place": (
        {"srv/app/notes.py": FIXED},
        "/srv/app/notes.py holds a line of the fix",
    ),
    "a copy in an archive that is no cache": (
        {"srv/app/archive.zip": None},
        "/srv/app/archive.zip!pack/sums.py holds a line of the fix",
    ),
    "a hidden test in another place": (
        {"srv/tests.py": "def test_the_sum_of_many_values():\n"},
        "/srv/tests.py holds a line of the fix or of a hidden test",
    ),
    "an ignored file of the work tree": (
        {"testbed/debug.log": f"note {SECRET}\n"},
        "debug.log holds a line of the fix",
    ),
}


@pytest.mark.parametrize("name", EXCLUDED)
def test_what_cannot_be_proven_is_excluded_with_its_reason(tmp_path: Path, name: str) -> None:
    image = plain_image(tmp_path / "image")
    files, reason = EXCLUDED[name]
    for path, content in files.items():
        (image / path).parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            with zipfile.ZipFile(image / path, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr("pack/sums.py", FIXED)
        else:
            write(image, {path: content})
    done = prepare_task(task(), image, tmp_path / "out")
    assert isinstance(done, Excluded)
    assert reason in done.reason
    assert list(tmp_path.glob("out*")) == []


def test_an_image_without_the_repository_or_its_base_is_excluded(tmp_path: Path) -> None:
    image = plain_image(tmp_path / "image")
    elsewhere = prepare_task(task(workdir="/app"), image, tmp_path / "out")
    assert isinstance(elsewhere, Excluded)
    assert elsewhere.reason == "the image has no folder /app"
    missing = prepare_task(task(base="1" * 40), image, tmp_path / "out")
    assert isinstance(missing, Excluded)
    assert missing.reason == f"the repository has no commit {'1' * 40}"


def test_a_submodule_without_files_is_excluded(tmp_path: Path) -> None:
    image = plain_image(tmp_path / "image")
    repo = image / "testbed"
    sh(
        "git update-index --add --cacheinfo 160000,1111111111111111111111111111111111111111,sub "
        "&& git commit -qm sub",
        repo,
    )
    base = sh("git rev-parse HEAD", repo).strip()
    sh("git commit -q --allow-empty -m later", repo)
    done = prepare_task(task(base=base), image, tmp_path / "out")
    assert isinstance(done, Excluded)
    assert done.reason == "the submodule sub has no files in the image"


def test_hooks_filters_and_configuration_of_the_image_run_nothing(tmp_path: Path) -> None:
    image = plain_image(tmp_path / "image")
    repo = image / "testbed"
    mark = tmp_path / "ran"
    write(repo, {".git/hooks/post-checkout": f"#!/bin/sh\ntouch {mark}\n"})
    (repo / ".git/hooks/post-checkout").chmod(0o755)
    sh(
        f"git config core.fsmonitor 'touch {mark}' && git config filter.f.clean 'touch {mark}' && "
        f"git config filter.f.smudge 'touch {mark}' && git config diff.external 'touch {mark}'",
        repo,
    )
    write(repo, {".gitattributes": "*.py filter=f\n"})
    prepared(image, tmp_path)
    assert not mark.exists()


PLANTS = {
    "a dangling blob": "git hash-object -w --stdin <<< 'left over'",
    "another branch": "git branch other",
    "a reflog": "mkdir .git/logs && echo x > .git/logs/HEAD",
    "an alternate": "mkdir -p .git/objects/info && echo /tmp > .git/objects/info/alternates",
    "a changed file": "echo x >> setup.py",
    "a hidden path": "mkdir -p tests && touch tests/test_sums.py",
    "a telling line": f"mkdir -p build && echo '{SECRET}' > build/x",
    "another time": "touch -d 2030-01-01 setup.py",
}


@pytest.mark.parametrize("name", PLANTS)
def test_the_proof_fails_on_whatever_is_planted_afterwards(tmp_path: Path, name: str) -> None:
    image = plain_image(tmp_path / "image")
    done = prepared(image, tmp_path)
    sh(PLANTS[name], tmp_path / "out/repo")
    with pytest.raises(Unproven):
        prove(
            tmp_path / "out",
            commit=done.commit,
            original=image / "testbed",
            gone=frozenset({"tests/test_sums.py"}),
            lines=(SECRET.strip().encode(),),
            was_replaced=frozenset(),
            was_committed=False,
        )
