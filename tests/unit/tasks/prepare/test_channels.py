"""One channel at a time: planted with real git, prepared, proven clean, and still whole.

Each plant is shell text run in the image's repository, with `$SECRET` the line of the fix. It must
be there before (or the test proves nothing) and nowhere in the result.
"""

import base64
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from rlmix.tasks.prepare.manifest import Excluded, Manifest
from rlmix.tasks.prepare.task import prepare_task
from rlmix.tasks.record import GoldRecord
from tests.unit.tasks.prepare.images import BUGGY, FIXED, SECRET, plain_image, sh, task, write

LINE = SECRET.strip()
WRITE_FIX = "printf '%s' \"$FIXED\" > pack/sums.py"
COMMIT_FIX = f"git checkout -q -b future && {WRITE_FIX} && git commit -qam fix"
BACK = "git checkout -q main"
INSIDE: dict[str, str] = {
    "a branch": f"{COMMIT_FIX} && {BACK}",
    "a tag": f"{COMMIT_FIX} && git tag v9 && {BACK} && git branch -qD future",
    "an ancestor": f"{WRITE_FIX} && git commit -qam good && "
    "printf '%s\\n' \"$BUGGY\" > pack/sums.py && git commit -qam bug",
    "a dangling commit": f"{COMMIT_FIX} && {BACK} && git branch -qD future && rm -rf .git/logs",
    "a dangling blob": 'printf "%s" "$FIXED" | git hash-object -w --stdin',
    "a pack": f"{COMMIT_FIX} && {BACK} && git repack -adq",
    "a pack with a new index": f"{COMMIT_FIX} && {BACK} && git repack -adq && "
    "git branch -qD future && rm .git/objects/pack/*.idx && "
    "git index-pack .git/objects/pack/*.pack >/dev/null",
    "a reflog": f"{COMMIT_FIX} && {BACK} && git branch -qD future",
    "packed references": f"{COMMIT_FIX} && {BACK} && git pack-refs --all",
    "a remote's branch": f"{COMMIT_FIX} && git update-ref refs/remotes/origin/x HEAD && {BACK} "
    "&& git branch -qD future",
    "FETCH_HEAD": f"{COMMIT_FIX} && git rev-parse HEAD > .git/FETCH_HEAD && {BACK} && "
    "git branch -qD future",
    "ORIG_HEAD": f"{WRITE_FIX} && git commit -qam fix && git reset -q --hard HEAD~1",
    "a stash": f"{WRITE_FIX} && git stash -q",
    "notes": 'git notes add -m "$SECRET"',
    "a replaced object": f"{COMMIT_FIX} && {BACK} && git replace HEAD future && "
    "git branch -qD future",
    "a graft": f"{COMMIT_FIX} && {BACK} && git rev-parse HEAD future | tr '\\n' ' ' "
    "> .git/info/grafts && git branch -qD future",
    "a shallow mark": f"{COMMIT_FIX} && {BACK} && git rev-parse HEAD > .git/shallow && "
    "git branch -qD future",
    "an alternate": f"{COMMIT_FIX} && git clone -q --bare . ../opt/m.git && {BACK} && "
    "git branch -qD future && echo /opt/m.git/objects > .git/objects/info/alternates",
    "a worktree's administration": f"{COMMIT_FIX} && {BACK} && git worktree add -q ../wt future && "
    "rm -rf ../wt",
    "a submodule's git folder": "mkdir .git/modules && git clone -q --bare . .git/modules/lib && "
    'git -C .git/modules/lib hash-object -w --stdin <<< "$FIXED"',
    "a nested repository": "git init -q vendor/in && cd vendor/in && "
    "printf '%s' \"$FIXED\" > s.py && git add -A && git commit -qm x && "
    "git rm -q s.py && git commit -qm y && touch keep",
    "a bundle": f"{COMMIT_FIX} && git bundle create -q build/all.bundle --all && {BACK} && "
    "git branch -qD future",
    "LFS's store": 'mkdir -p .git/lfs/objects/ab && printf "%s" "$FIXED" > .git/lfs/objects/ab/c',
    "a hook": 'printf "#!/bin/sh\\n# %s\\n" "$SECRET" > .git/hooks/pre-push',
    "an included configuration": 'printf "[x]\\n\\ty = \\"%s\\"\\n" "$SECRET" > .git/more && '
    "git config include.path more",
    "a rebase that stopped": 'mkdir .git/rebase-apply && printf "%s" "$FIXED" > '
    ".git/rebase-apply/p",
    "a recorded resolution": 'mkdir -p .git/rr-cache/a && printf "%s" "$FIXED" > .git/rr-cache/a/x',
    "a commit's message": 'printf "%s" "$SECRET" > .git/COMMIT_EDITMSG',
    "a leftover of a merge": 'printf "%s" "$FIXED" > pack/sums.py.orig',
    "a rejected hunk": 'printf "+%s\\n" "$SECRET" > pack/sums.py.rej',
    "an editor's backup": 'printf "%s" "$FIXED" > pack/sums.py~',
    "bytecode": 'mkdir -p pack/__pycache__ && printf "%s" "$FIXED" > pack/__pycache__/s.pyc',
    "results of test runs": 'mkdir .pytest_cache && printf "%s" "$SECRET" > .pytest_cache/x',
    "a build output": 'mkdir -p build/lib/pack && printf "%s" "$FIXED" > build/lib/pack/sums.py',
    "times": "touch -d 2031-01-01 pack/sums.py",
}
"""Of the repository: left behind, removed, or replaced by the base's file."""


def planted(tmp_path: Path, script: str) -> Path:
    image = plain_image(tmp_path / "image")
    (image / "opt").mkdir(exist_ok=True)
    quoted = {"SECRET": LINE, "FIXED": FIXED, "BUGGY": BUGGY}
    values = "".join(
        f"{k}=$(printf %s {base64.b64encode(v.encode()).decode()} | base64 -d)\n"
        for k, v in quoted.items()
    )
    sh(values + script, image / "testbed")
    return image


def everything_in(folder: Path) -> bytes:
    """All bytes below a folder: names, contents, link targets, git objects, unpacked."""
    parts = []
    for path in folder.rglob("*"):
        parts.append(os.fsencode(path.name))
        if path.is_symlink():
            parts.append(os.fsencode(os.readlink(path)))
        elif path.is_file():
            content = path.read_bytes()
            parts.append(content)
            try:
                parts.append(zlib.decompress(content))
            except zlib.error:
                continue
    for place in folder.rglob("objects"):
        if place.is_dir() and (place.parent / "HEAD").exists():
            listing = subprocess.run(
                ["git", f"--git-dir={place.parent}", "cat-file", "--batch", "--batch-all-objects"],
                capture_output=True, env={"PATH": os.environ["PATH"], "HOME": "/"},
            )  # fmt: skip
            parts.append(listing.stdout)
    return b"\n".join(parts)


@pytest.mark.parametrize("name", INSIDE)
def test_a_channel_of_the_repository_is_closed(tmp_path: Path, name: str) -> None:
    image = planted(tmp_path, INSIDE[name])
    if name not in ("times", "a shallow mark"):
        assert LINE.encode() in everything_in(image), "the plant is not there"
    done = prepare_task(task(), image, tmp_path / "out")
    assert isinstance(done, Manifest), done
    assert LINE.encode() not in everything_in(tmp_path / "out")
    repo = tmp_path / "out/repo"
    assert (repo / "pack/sums.py").read_text() == BUGGY
    assert sh("git status --porcelain; git stash list; git notes list", repo) == ""
    assert sh("git fsck --unreachable --no-reflogs", repo) == ""
    assert len({p.lstat().st_mtime for p in repo.rglob("*") if ".git" not in p.parts}) == 1
    built = subprocess.run(
        [sys.executable, "-c", "import pack.sums; print(pack.sums.total([1]))"],
        cwd=repo, capture_output=True, text=True,
    )  # fmt: skip
    assert built.stdout == "-1\n", built.stderr


SITE = "usr/lib/python3/site-packages/pack"
OUTSIDE: dict[str, str] = {
    "an installed copy": f"mkdir -p ../{SITE} && printf '%s' \"$FIXED\" > ../{SITE}/sums.py",
    "pip's cache": "mkdir -p ../root/.cache/pip && printf '%s' \"$FIXED\" > ../root/.cache/pip/b",
    "npm's cache": "mkdir -p ../root/.npm/_cacache/c && printf '%s' \"$FIXED\" | gzip "
    "> ../root/.npm/_cacache/c/d",
    "a shell's history": 'printf "echo \'%s\'\\n" "$SECRET" > ../his && mkdir -p ../root && '
    "mv ../his ../root/.bash_history",
    "a mirror": f"{COMMIT_FIX} && git clone -q --bare . ../opt/m.git && {BACK}",
    "a pack by itself": f"{COMMIT_FIX} && git repack -adq && cp .git/objects/pack/* ../opt && "
    f"{BACK}",
    "a worktree elsewhere": f"{COMMIT_FIX} && {BACK} && git worktree add -q ../wt future",
    "an object by another name": 'cp .git/objects/$(printf "%s" "$FIXED" | git hash-object -w '
    "--stdin | sed 's,..,&/,') ../opt/notes",
    "a pack by another name": f"{COMMIT_FIX} && git repack -adq && "
    f"cp .git/objects/pack/*.pack ../opt/notes && {BACK}",
    "bytecode that is older than its source": "mkdir ../opt/m && printf '%s' \"$FIXED\" > "
    "../opt/m/sums.py && python3 -m compileall -q ../opt/m && printf 'x = 1\\n' > ../opt/m/sums.py",
    "a leftover": "printf '%s' \"$FIXED\" > ../opt/sums.py.orig",
}
"""Of the image: under the overlay."""


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_channel_of_the_image_is_covered(tmp_path: Path, name: str) -> None:
    image = planted(tmp_path, OUTSIDE[name])
    done = prepare_task(task(), image, tmp_path / "out")
    assert isinstance(done, Manifest), done
    assert done.overlaid != ()
    assert LINE.encode() not in everything_in(tmp_path / "out")
    assert any((tmp_path / "out/overlay").rglob("*"))


UNPROVABLE: dict[str, str] = {
    "another formatting": "tr -d ' ' <<< \"$SECRET\" > ../opt/notes",
    "over two lines": "sed 's/ += /\\n    += /' <<< \"$SECRET\" > ../opt/notes",
    "UTF-16": 'printf "%s" "$SECRET" | iconv -t UTF-16LE > ../opt/notes',
    "base64": 'printf "ab%s" "$FIXED" | base64 > ../opt/notes',
    "base64 in long lines": 'printf "x%s" "$FIXED" | base64 -w 0 > ../opt/notes',
    "hex": 'python3 -c "import sys; print(sys.argv[1].encode().hex())" "$FIXED" > ../opt/notes',
    "an archive in an archive": "printf '%s' \"$FIXED\" > f && tar -czf f.tgz f && "
    "tar -cf ../opt/notes f.tgz && rm f f.tgz",
    "a Debian package": "printf '%s' \"$FIXED\" > f && tar -cJf data.tar.xz f && "
    "ar q ../opt/notes data.tar.xz 2>/dev/null && rm f data.tar.xz",
    "zlib": 'python3 -c "import sys, zlib; sys.stdout.buffer.write(zlib.compress('
    'sys.argv[1].encode()))" "$FIXED" > ../opt/notes',
    "old lzma": "printf '%s' \"$FIXED\" | xz --format=lzma > ../opt/notes",
    "a damaged gzip": "for n in 1 2 3 4 5 6 7 8 9; do printf '%s\\n' \"$FIXED\"; done | gzip -n | "
    "head -c -12 > ../opt/notes && echo broken >> ../opt/notes",
    "a link": f"ln -s '{LINE}' build/link",
    "a link elsewhere": f"ln -s '{LINE}' ../opt/link",
    "a name elsewhere": f"mkdir '../opt/{LINE}'",
    "/run": 'mkdir -p ../run && printf "%s" "$SECRET" > ../run/notes',
    "a file of the tree": 'printf "%s" "$SECRET" > build/notes',
    "bytecode by itself": "mkdir ../opt/m && printf '%s' \"$FIXED\" > ../opt/m/sums.py && "
    "python3 -m compileall -qb ../opt/m && rm ../opt/m/sums.py",
    "a name": f"mkdir -p build && touch 'build/{LINE}'",
}


@pytest.mark.parametrize("name", UNPROVABLE)
def test_what_can_be_neither_removed_nor_replaced_excludes_the_task(
    tmp_path: Path, name: str
) -> None:
    image = planted(tmp_path, UNPROVABLE[name])
    done = prepare_task(task(), image, tmp_path / "out")
    assert isinstance(done, Excluded), done
    assert "a line of the fix" in done.reason or "bytecode without its source" in done.reason
    assert not (tmp_path / "out").exists()


# --- where the fix is not known

LONG = "".join(f"def number_{n}(value):\n    return value + {n}\n\n\n" for n in range(6))
LATER = LONG.replace("value + 3", "value * 3")
OTHER = "".join(f"class Thing{n}:\n    size = {n} * 7\n\n\n" for n in range(6))
STALE: dict[str, tuple[str, str]] = {
    "a build output": ("testbed/build/lib/pack/long.py", "replaced"),
    "a copy beside it": ("testbed/build/long_new.py", "excluded"),
    "a copy elsewhere": ("opt/site/long.py", "excluded"),
    "an installed copy": ("usr/lib/python3/site-packages/pack/long.py", "replaced"),
    "a vendored copy": ("usr/lib/python3/site-packages/other/pack/long.py", "excluded"),
    "a backup": ("opt/site/long.py.bak", "hidden"),
    "a cache": ("root/.cache/x/long.py", "hidden"),
    "whatever pip downloaded": ("root/.cache/pip/http/any", "hidden"),
}


def stale_image(tmp_path: Path, path: str, content: str) -> Path:
    image = plain_image(tmp_path / "image")
    write(image, {"testbed/pack/long.py": LONG})
    sh("git add -A && git commit -qm long", image / "testbed")
    write(image, {"usr/lib/python3/site-packages/pack/__init__.py": "", path: content})
    return image


@pytest.mark.parametrize("name", STALE)
def test_a_near_copy_is_not_taken_for_harmless_where_the_fix_is_unknown(
    tmp_path: Path, name: str
) -> None:
    path, fate = STALE[name]
    done = prepare_task(task(knows_fix=False), stale_image(tmp_path, path, LATER), tmp_path / "out")
    if fate == "excluded":
        assert isinstance(done, Excluded)
        # 12 lines that count, one of them changed.
        assert "shares 92% of its lines with pack/long.py and differs" in done.reason
        return
    assert isinstance(done, Manifest), done
    assert b"value * 3" not in everything_in(tmp_path / "out")
    if fate == "replaced":
        places = [tmp_path / "out/overlay" / path, tmp_path / "out/repo" / path[8:]]
        assert LONG in [place.read_text() for place in places if place.exists()]
    else:
        assert any(f"/{path}".startswith(one) for one in done.overlaid), done.overlaid


@pytest.mark.parametrize("content", [LONG, OTHER, LONG[:60]])
def test_exact_copies_other_files_and_short_ones_tell_nothing(tmp_path: Path, content: str) -> None:
    image = stale_image(tmp_path, "opt/site/long.py", content)
    done = prepare_task(task(knows_fix=False), image, tmp_path / "out")
    assert isinstance(done, Manifest), done
    assert done.overlaid == ()


def test_a_known_fix_is_looked_for_by_its_lines_and_not_by_likeness(tmp_path: Path) -> None:
    done = prepare_task(task(), stale_image(tmp_path, "opt/site/long.py", LATER), tmp_path / "out")
    assert isinstance(done, Manifest), done


def test_an_unknown_gold_counts_as_unknown(tmp_path: Path) -> None:
    gold = GoldRecord(task_id="t", patch="", script={"/solution/solve.sh": "true\n"})
    image = stale_image(tmp_path, "opt/site/long.py", LATER)
    done = prepare_task(task(gold=gold), image, tmp_path / "out")
    assert isinstance(done, Excluded)
