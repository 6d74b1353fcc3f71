"""Images made to trick their preparation: out of their folder, into a program, past the search."""

import bz2
import dataclasses
import io
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

from rlmix.core.errors import DataError
from rlmix.tasks.prepare.archives import Search, TooLarge
from rlmix.tasks.prepare.image import resolve
from rlmix.tasks.prepare.manifest import Excluded, Manifest
from rlmix.tasks.prepare.task import prepare_task
from rlmix.tasks.record import GoldRecord, SourceTask
from tests.unit.tasks.prepare.images import BUGGY, FIX, FIXED, SECRET, plain_image, sh, task, write

SITE = "usr/lib/python3/site-packages"


def prepare(image: Path, tmp_path: Path, made: SourceTask) -> Manifest | Excluded:
    return prepare_task(made, image, tmp_path / "out")


def zipped(files: dict[str, bytes | str]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, inner in files.items():
            archive.writestr(name, inner)
    return content.getvalue()


def test_links_are_followed_as_inside_the_image(tmp_path: Path) -> None:
    write(tmp_path, {"opt/repo/a": "x"})
    os.symlink("/opt/repo", tmp_path / "testbed")
    os.symlink("../../../../etc", tmp_path / "opt/up")
    os.symlink("loop", tmp_path / "loop")
    assert resolve(tmp_path, "/testbed/a") == tmp_path / "opt/repo/a"
    assert resolve(tmp_path, "/opt/up/passwd") == tmp_path / "etc/passwd"
    assert resolve(tmp_path, "/../../x") == tmp_path / "x"
    assert resolve(tmp_path, "testbed", follow_last=False) == tmp_path / "testbed"
    with pytest.raises(DataError, match="loop of links"):
        resolve(tmp_path, "/loop")


def test_a_partial_clone_runs_no_program_to_fetch_what_it_lacks(tmp_path: Path) -> None:
    """`protocol.ext.allow` of a repository outranks `protocol.allow` of the command line."""
    repo = plain_image(tmp_path / "image") / "testbed"
    write(repo, {"gone.txt": "only in the base\n"})
    sh("git add -A && git commit -qm base", repo)
    base = sh("git rev-parse HEAD", repo).strip()
    blob = sh("git rev-parse HEAD:gone.txt", repo).strip()
    sh("git rm -q gone.txt && git commit -qm later", repo)
    (repo / f".git/objects/{blob[:2]}/{blob[2:]}").unlink()
    (repo / ".git/config").write_text(
        "[core]\nrepositoryformatversion = 1\n[extensions]\npartialClone = origin\n"
        f'[remote "origin"]\nurl = ext::sh -c "touch% {tmp_path}/ran"\npromisor = true\n'
        '[protocol "ext"]\nallow = always\n'
    )
    assert isinstance(prepare(tmp_path / "image", tmp_path, task(base=base)), Excluded)
    assert not (tmp_path / "ran").exists()


def test_a_work_folder_that_leads_out_of_the_image_is_not_there(tmp_path: Path) -> None:
    host = plain_image(tmp_path / "host")
    (tmp_path / "image").mkdir()
    os.symlink(host / "testbed", tmp_path / "image/testbed")
    for made in (task(), task(workdir="/../host/testbed"), task(workdir="/")):
        done = prepare(tmp_path / "image", tmp_path, made)
        assert isinstance(done, Excluded)
        assert done.reason.startswith("the image has no folder")


def test_a_work_folder_behind_a_link_of_the_image_is_found(tmp_path: Path) -> None:
    image = plain_image(tmp_path / "image")
    (image / "testbed").rename(image / "repo")
    os.symlink("/repo", image / "testbed")
    done = prepare(image, tmp_path, task())
    assert isinstance(done, Manifest), done
    assert done.overlaid == ()


@pytest.mark.parametrize("kind", ["git file", "git link", "objects", "alternates", "commondir"])
def test_a_git_folder_that_points_out_of_the_image_is_excluded(tmp_path: Path, kind: str) -> None:
    host = plain_image(tmp_path / "host") / "testbed"
    repo = plain_image(tmp_path / "image") / "testbed"
    if kind in ("git file", "git link"):
        sh("rm -r .git", repo)
        if kind == "git link":
            os.symlink(host / ".git", repo / ".git")
        else:
            write(repo, {".git": f"gitdir: {host}/.git\n"})
    elif kind == "objects":
        sh("rm -r .git/objects", repo)
        os.symlink(host / ".git/objects", repo / ".git/objects")
    elif kind == "alternates":
        write(repo, {".git/objects/info/alternates": f"{host}/.git/objects\n"})
    else:
        write(repo, {".git/commondir": f"{host}/.git\n"})
    done = prepare(tmp_path / "image", tmp_path, task())
    assert isinstance(done, Excluded)
    assert not (tmp_path / "out").exists()


def test_an_alternate_named_as_in_the_image_is_read_from_the_image(tmp_path: Path) -> None:
    image = plain_image(tmp_path / "image")
    repo = image / "testbed"
    sh(f"git clone -q --bare . {image}/opt/mirror.git && rm -r .git/objects/??", repo)
    write(repo, {".git/objects/info/alternates": "/opt/mirror.git/objects\n"})
    done = prepare(image, tmp_path, task())
    assert isinstance(done, Manifest), done
    assert done.overlaid == ("/opt/mirror.git",)


def test_a_link_in_the_work_tree_leads_no_file_of_the_base_elsewhere(tmp_path: Path) -> None:
    repo = plain_image(tmp_path / "image") / "testbed"
    write(repo, {"data/file.txt": "of the base\n"})
    sh("git add -A && git commit -qm base", repo)
    base = sh("git rev-parse HEAD", repo).strip()
    sh("git rm -rq data && git commit -qm later", repo)
    (tmp_path / "host").mkdir()
    os.symlink(tmp_path / "host", repo / "data")
    done = prepare(tmp_path / "image", tmp_path, task(base=base))
    assert isinstance(done, Manifest), done
    assert list((tmp_path / "host").iterdir()) == []
    assert (tmp_path / "out/repo/data/file.txt").read_text() == "of the base\n"


@pytest.mark.parametrize("knows_fix", [True, False])
def test_no_file_of_this_machine_is_copied_through_a_link(tmp_path: Path, knows_fix: bool) -> None:
    image = plain_image(tmp_path / "image")
    write(tmp_path / "host", {"__init__.py": "", "secret.py": "of this machine"})
    os.symlink(tmp_path / "host", image / "testbed/mod")
    sh("git add -A && git commit -qm link", image / "testbed")
    write(image, {f"{SITE}/mod/secret.py": FIXED})
    done = prepare(image, tmp_path, task(knows_fix=knows_fix))
    assert isinstance(done, Excluded) == knows_fix
    for path in tmp_path.rglob("secret.py"):
        assert path.read_bytes() != b"of this machine" or path.parent == tmp_path / "host"


def test_git_folders_packs_and_bundles_of_others_go_and_those_of_the_base_stay(
    tmp_path: Path,
) -> None:
    image = plain_image(tmp_path / "image")
    repo = image / "testbed"
    sh("git clone -q --bare . fixtures.git && git add -Af && git commit -qm base", repo)
    sh(
        "git clone -q --bare . build/other.git && cp -r .git/objects build/loose && "
        "git bundle create -q build/all.bundle --all && git repack -adq && "
        "cp .git/objects/pack/* build/",
        repo,
    )
    done = prepare(image, tmp_path, task())
    assert isinstance(done, Manifest), done
    out = tmp_path / "out/repo"
    assert (out / "fixtures.git/HEAD").exists()
    assert not (out / "build/other.git").exists()
    assert sorted(p.name for p in (out / "build").rglob("*") if p.is_file()) == ["native.so"]
    assert {"build/other.git", "build/all.bundle"} <= set(done.purged)


def test_a_link_whose_target_must_be_hidden_hides_both(tmp_path: Path) -> None:
    image = plain_image(tmp_path / "image")
    write(image, {"var/logs/verifier/reward.txt": "1"})
    os.symlink("/var/logs", image / "logs")
    done = prepare(image, tmp_path, task())
    assert isinstance(done, Manifest), done
    assert done.overlaid == ("/logs", "/var/logs")


def test_a_mark_in_a_file_name_hides_nothing(tmp_path: Path) -> None:
    image = plain_image(tmp_path / "image")
    write(image, {"root/.cache/a!b.py": FIXED})
    done = prepare(image, tmp_path, task())
    assert isinstance(done, Manifest), done
    assert done.overlaid == ("/root/.cache/a!b.py",)
    assert (tmp_path / "out/overlay/root/.cache/.wh.a!b.py").exists()


def tarred(name: str, content: bytes, mode: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as tar:  # type: ignore[call-overload]
        entry = tarfile.TarInfo(name)
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
    return out.getvalue()


PACKED = {
    "plain.bz2": bz2.compress(FIXED.encode()),
    "UPPER.ZIP": zipped({"pack/sums.py": FIXED}),
    "no_name_of_an_archive": tarred("pack/sums.py", FIXED.encode(), "w:xz"),
    "wheel_in_a_tar.tgz": tarred("p.whl", zipped({"pack/sums.py": FIXED}), "w:gz"),
    "behind_a_program": b"#!/usr/bin/env python3\n" + zipped({"pack/sums.py": FIXED}),
}


@pytest.mark.parametrize("name", PACKED)
def test_archives_are_known_by_content_and_looked_into_at_any_depth(
    tmp_path: Path, name: str
) -> None:
    image = plain_image(tmp_path / "image")
    write(image, {f"srv/{name}": PACKED[name]})
    done = prepare(image, tmp_path, task())
    assert isinstance(done, Excluded)
    assert f"/srv/{name}!" in done.reason
    assert SECRET.strip() in done.reason


def test_what_unpacks_to_too_much_is_never_taken_for_clean() -> None:
    bomb = io.BytesIO(zipped({"zeros": b"\0" * 300_000}))
    lines = (b"a line of the fix",)
    with pytest.raises(TooLarge):
        Search(lines, most_bytes=200_000).find(bomb)
    assert Search(lines, most_bytes=400_000).find(bomb) is None
    deep = b"a line of the fix"
    for _ in range(6):
        deep = zipped({"inner.zip": deep})
    with pytest.raises(TooLarge):
        Search(lines).find(io.BytesIO(deep))


def test_a_line_over_the_border_of_two_chunks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlmix.tasks.prepare.archives.CHUNK_BYTES", 10)
    found = Search((b"a line of the fix",)).find(io.BytesIO(b"1234567a line of the fix89"))
    assert found == ("", "a line of the fix")


def test_a_file_that_cannot_be_unpacked_goes_from_a_cache_and_excludes_elsewhere(
    tmp_path: Path,
) -> None:
    image = plain_image(tmp_path / "image")
    zstd = b"\x28\xb5\x2f\xfd compressed"
    write(image, {"opt/conda/pkgs/pack.conda": zipped({"pkg.tar.zst": zstd})})
    done = prepare(image, tmp_path, task())
    assert isinstance(done, Manifest), done
    assert done.overlaid == ("/opt/conda/pkgs/pack.conda",)
    write(image, {"srv/data.zst": zstd})
    other = prepare_task(task(), image, tmp_path / "other")
    assert isinstance(other, Excluded)
    assert other.reason == "/srv/data.zst cannot be looked through for lines of the fix"


def test_many_lines_of_hidden_tests_push_none_of_the_fix_out(tmp_path: Path) -> None:
    image = plain_image(tmp_path / "image")
    write(image, {"srv/notes.py": FIXED})
    added = "".join(f"+    assert add(1, {i}) == {i + 1}  # number {i}\n" for i in range(500))
    patch = (
        "diff --git a/tests/test_sums.py b/tests/test_sums.py\nnew file mode 100644\n"
        f"--- /dev/null\n+++ b/tests/test_sums.py\n@@ -0,0 +1,500 @@\n{added}"
    )
    made = task()
    hidden = dataclasses.replace(made.hidden, hidden_patch=patch)
    done = prepare(image, tmp_path, dataclasses.replace(made, hidden=hidden))
    assert isinstance(done, Excluded)
    assert "/srv/notes.py holds a line of the fix" in done.reason


def test_a_fix_too_short_to_be_looked_for_is_treated_as_unknown(tmp_path: Path) -> None:
    image = plain_image(tmp_path / "image")
    write(image, {f"{SITE}/pack/__init__.py": "", f"{SITE}/pack/sums.py": "total = sum\n"})
    gold = GoldRecord(task_id="t", patch=FIX.replace(SECRET, "        r += v"))
    done = prepare(image, tmp_path, task(gold=gold))
    assert isinstance(done, Manifest), done
    assert f"/{SITE}/pack/sums.py" in done.overlaid
    assert (tmp_path / f"out/overlay/{SITE}/pack/sums.py").read_text() == BUGGY
    assert "the fix adds no line that tells" in done.proof[-1]


def test_odd_files_of_the_work_tree_are_left_or_made_plain(tmp_path: Path) -> None:
    image = plain_image(tmp_path / "image")
    repo = image / "testbed"
    os.mkfifo(repo / "build/pipe")
    (repo / "build/root.so").write_bytes(b"set-uid")
    (repo / "build/root.so").chmod(0o4755)
    os.link(repo / "build/native.so", repo / "build/same.so")
    write(repo, {os.fsdecode(b"build/caf\xe9.so"): b"x"})
    done = prepare(image, tmp_path, task())
    assert isinstance(done, Manifest), done
    out = tmp_path / "out/repo/build"
    assert "build/pipe" in done.purged
    assert not (out / "pipe").exists()
    assert (out / "root.so").stat().st_mode & 0o7777 == 0o755
    assert (out / "same.so").stat().st_nlink == 1
    assert (out / os.fsdecode(b"caf\xe9.so")).read_bytes() == b"x"


def test_a_hidden_test_with_a_name_in_quotes_is_taken_out(tmp_path: Path) -> None:
    """`"b/tests/test_na\\303\\257ve.py"` names a file that git tracks in this image."""
    image = plain_image(tmp_path / "image")
    write(image, {"testbed/tests/test_na\u00efve.py": "def test_it(): assert total([1]) == 1\n"})
    sh("git add -A && git commit -qm tests", image / "testbed")
    patch = (
        'diff --git "a/tests/test_na\\303\\257ve.py" "b/tests/test_na\\303\\257ve.py"\n'
        'new file mode 100644\n--- /dev/null\n+++ "b/tests/test_na\\303\\257ve.py"\n'
        "@@ -0,0 +1 @@\n+def test_it(): assert total([1]) == 1\n"
    )
    made = task()
    hidden = dataclasses.replace(made.hidden, hidden_patch=patch)
    done = prepare(image, tmp_path, dataclasses.replace(made, hidden=hidden))
    assert isinstance(done, Manifest), done
    assert "tests/test_na\u00efve.py" in done.purged
    assert not (tmp_path / "out/repo/tests").exists() or not list(
        (tmp_path / "out/repo/tests").iterdir()
    )


def test_a_task_whose_hidden_tests_changed_is_prepared_again(tmp_path: Path) -> None:
    image = plain_image(tmp_path / "image")
    write(image, {"testbed/tests/test_sums.py": "pass\n", "testbed/tests/test_more.py": "pass\n"})
    made = task()
    assert isinstance(prepare(image, tmp_path, made), Manifest)
    assert (tmp_path / "out/repo/tests/test_more.py").exists()
    patch = made.hidden.hidden_patch.replace("test_sums.py", "test_more.py")
    hidden = dataclasses.replace(made.hidden, hidden_patch=patch)
    assert isinstance(prepare(image, tmp_path, dataclasses.replace(made, hidden=hidden)), Manifest)
    assert not (tmp_path / "out/repo/tests/test_more.py").exists()


def test_a_commit_of_the_fix_is_never_an_option_of_git(tmp_path: Path) -> None:
    """`git diff-tree --output=FILE` writes one."""
    image = plain_image(tmp_path / "image")
    written = tmp_path / "written"
    gold = GoldRecord(task_id="t", patch="", commit=f"--output={written}")
    done = prepare(image, tmp_path, task(gold=gold))
    assert isinstance(done, Excluded)
    assert "is no commit id" in done.reason
    assert not written.exists()


@pytest.mark.parametrize("place", ["testbed/build", "opt"])
def test_folders_without_end_and_sparse_files_are_refused_at_once(
    tmp_path: Path, place: str
) -> None:
    image = plain_image(tmp_path / "image")
    (image / place).mkdir(exist_ok=True)
    with (image / place / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    done = prepare(image, tmp_path, task())
    assert isinstance(done, Excluded)
    (image / place / "sparse").unlink()
    deep = image / place
    for _ in range(210):
        deep = deep / "d"
    deep.mkdir(parents=True)
    done = prepare(image, tmp_path, task())
    assert isinstance(done, Excluded)
    assert "folders are nested deeper than 200" in done.reason


def test_names_with_line_ends_and_bytes_that_are_no_text_survive(tmp_path: Path) -> None:
    image = plain_image(tmp_path / "image")
    odd = os.fsdecode(b"pack/caf\xe9.py")
    write(image / "testbed", {"pack/two\nlines.py": "x = 1\n", odd: "y = 2\n", " lead": "z"})
    sh("git add -A && git commit -qm odd", image / "testbed")
    done = prepare(image, tmp_path, task())
    assert isinstance(done, Manifest), done
    repo = tmp_path / "out/repo"
    assert (repo / "pack/two\nlines.py").read_text() == "x = 1\n"
    assert (repo / odd).read_text() == "y = 2\n"
    assert (repo / " lead").exists()
