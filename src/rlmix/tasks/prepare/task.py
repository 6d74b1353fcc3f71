"""Prepares one task: copy, re-create, scan, prove; a task that cannot be proven is excluded.

Invariant: the folder of a task appears whole or not at all, and preparing it again changes nothing.
"""

import hashlib
import json
import os
import re
import shutil
import stat
from dataclasses import asdict
from pathlib import Path

from rlmix.core.errors import DataError
from rlmix.tasks.prepare.git import git
from rlmix.tasks.prepare.image import has_programs, plain_file, resolve
from rlmix.tasks.prepare.inspect import Original, inspect
from rlmix.tasks.prepare.lines import telling_lines
from rlmix.tasks.prepare.manifest import SCHEMA_VERSION, Excluded, Manifest
from rlmix.tasks.prepare.overlay import clean_tree, make_overlay
from rlmix.tasks.prepare.proof import prove
from rlmix.tasks.prepare.recreate import recreate
from rlmix.tasks.prepare.worktree import committed, copy_base, indexed, keep_caches, set_times
from rlmix.tasks.record import SourceTask
from rlmix.tasks.sources.patches import added_by_file, changes_in, paths_in, reversed_lines

MAX_NAMED = 100
MANIFEST = "manifest.json"
_COMMIT = re.compile(r"[0-9a-f]{7,64}")


def prepare_task(task: SourceTask, rootfs: Path, out: Path) -> Manifest | Excluded:
    """Prepare `task` from the unpacked image `rootfs` into the folder `out`.

    `out` gets `repo/` (files and a new git folder), `capture/` (what diffs are taken with),
    `overlay/` (what lies on top of the image) and `manifest.json`.
    """
    inputs = _inputs(task)
    known = _read_manifest(out, inputs)
    if known is not None:
        return known
    work = out.with_name(f"{out.name}.incomplete")
    shutil.rmtree(work, ignore_errors=True)
    try:
        manifest = _prepare(task, rootfs, work, inputs)
    except (DataError, OSError, ValueError, RecursionError) as error:
        shutil.rmtree(work, ignore_errors=True)
        return Excluded(task_id=task.public.task_id, reason=str(error))
    except BaseException:  # Interrupted: what is half made may still hold the fix.
        shutil.rmtree(work, ignore_errors=True)
        raise
    text = json.dumps(manifest.document(), indent=1, sort_keys=True) + "\n"
    (work / MANIFEST).write_text(text)
    shutil.rmtree(out, ignore_errors=True)
    work.rename(out)
    return manifest


def _bytes_below(folder: Path) -> int:
    """Size of the regular files, a file of several names once."""
    seen: dict[tuple[int, int], int] = {}
    for here, _, names in os.walk(folder):
        for name in names:
            facts = os.lstat(os.path.join(here, name))
            if stat.S_ISREG(facts.st_mode):
                seen[facts.st_dev, facts.st_ino] = facts.st_size
    return sum(seen.values())


def _inputs(task: SourceTask) -> str:
    """What a preparation depends on beside the image, as a digest."""
    public = task.public
    facts = (public.task_id, public.workdir, asdict(public.base), asdict(task.hidden))
    gold = None if task.gold is None else asdict(task.gold)
    return hashlib.sha256(json.dumps((*facts, gold)).encode()).hexdigest()


def _read_manifest(out: Path, inputs: str) -> Manifest | None:
    """What an earlier preparation of the same task wrote, if its form is today's."""
    try:
        document = json.loads((out / MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    if document.get("schema_version") != SCHEMA_VERSION or document.get("inputs") != inputs:
        return None
    lists = ("left_behind", "purged", "overlaid", "ignored", "proof")
    return Manifest(**{**document, **{name: tuple(document[name]) for name in lists}})


def _prepare(task: SourceTask, rootfs: Path, work: Path, inputs: str) -> Manifest:
    public, hidden = task.public, task.hidden
    rootfs = rootfs.resolve()
    source = resolve(rootfs, public.workdir)
    if source == rootfs or not source.is_dir():
        raise DataError(f"the image has no folder {public.workdir}")
    with_programs = has_programs(rootfs)
    original = inspect(rootfs, source, public.base.commit if public.base.kind == "commit" else "")
    is_commit = public.base.kind == "commit" and original.head != original.base
    gone = _hidden_paths(task)
    copied = copy_base(
        source,
        work / "repo",
        env=original.env,
        commit=original.base if is_commit else "",
        gone=gone,
    )
    if public.base.kind == "commit" and not is_commit:
        named = committed(source, original.base, original.env)
        keep_caches(source, work / "repo", sorted(named - gone), copied)
    fix = _fix(task, source, original)
    tracked = copied.tracked or indexed(source, original.env)
    base_files = [file for path in tracked if (file := plain_file(work / "repo", path))]
    # Two lists, so that many lines of tests push none of the fix out.
    fix_lines, test_lines = (
        telling_lines(diff, (file.read_bytes() for file in base_files))
        for diff in (fix, hidden.hidden_patch)
    )
    lines = (*fix_lines, *test_lines)
    untold = untold_files(fix, fix_lines) if fix_lines else None
    replaced = clean_tree(work / "repo", lines, frozenset(tracked), untold=untold)
    overlaid = make_overlay(
        rootfs,
        source,
        work / "repo",
        work / "overlay",
        lines,
        gone=hidden.image_paths,
        untold=untold,
        tracked=frozenset(tracked),
        touched=frozenset(paths_in(fix)) if fix_lines else frozenset(),
    )
    commit = recreate(work, tracked=tracked, tags=original.tags)
    tree, proof = prove(
        work,
        commit=commit,
        original=source,
        gone=gone,
        lines=lines,
        was_replaced=frozenset(replaced),
        was_committed=is_commit,
    )
    ignored = _ignored(work / "repo")
    set_times(work)
    return Manifest(
        task_id=public.task_id,
        inputs=inputs,
        commit=commit,
        tree=tree,
        num_objects=len(git("rev-list", "--objects", "--all", cwd=work / "repo").splitlines()),
        left_behind=_left_behind(original),
        purged=tuple(sorted(copied.purged)),
        overlaid=(*replaced, *overlaid),
        ignored=tuple(ignored[:MAX_NAMED]),
        num_ignored=len(ignored),
        workdir=f"/{source.relative_to(rootfs).as_posix()}",
        has_programs=with_programs,
        image_bytes=_bytes_below(rootfs),
        repository_bytes=_bytes_below(work / "repo"),
        proof=(*proof, _said_of_fix(fix, untold, overlaid)),
    )


def _hidden_paths(task: SourceTask) -> frozenset[str]:
    """Relative paths that the base must not have: files that the hidden patch adds, and what the
    set says lies in the image."""
    workdir = task.public.workdir.rstrip("/") + "/"
    named = [p.removeprefix(workdir) for p in task.hidden.image_paths if p.startswith(workdir)]
    return frozenset([*_added_by(task.hidden.hidden_patch), *named])


def _added_by(patch: str) -> list[str]:
    return [change.path for change in changes_in(patch) if change.makes_path]


def _fix(task: SourceTask, source: Path, original: Original) -> str:
    """The reference fix as a diff; empty when nobody knows it."""
    gold = task.gold
    if gold is None:
        return ""
    if gold.patch and not gold.is_reversed:
        return gold.patch
    if gold.is_reversed:
        return reversed_lines(gold.patch)  # The patch makes the bug.
    if gold.commit and original.base:
        # A word that begins with a dash would be an option, and some of them write files.
        if not _COMMIT.fullmatch(gold.commit):
            raise DataError(f"the fix {gold.commit[:60]!r} is no commit id")
        args = ("diff-tree", "-p", "--no-ext-diff", "--no-textconv", original.base, gold.commit)
        diff = git(*args, cwd=source, env=dict(original.env), check=False)
        return diff.decode(errors="replace")
    return ""


def _ignored(repo: Path) -> list[str]:
    listing = git("ls-files", "-z", "--others", "--ignored", "--exclude-standard", cwd=repo)
    return [p.decode("utf-8", "surrogateescape") for p in listing.split(b"\0") if p]


def _left_behind(original: Original) -> tuple[str, ...]:
    said = list(original.channels)
    if original.num_beyond_base:
        said.append(f"{original.num_beyond_base} of {original.num_objects} objects beyond the base")
    if original.num_refs:
        said.append(f"{original.num_refs} references")
    return tuple(said)


def untold_files(fix: str, fix_lines: tuple[bytes, ...]) -> frozenset[str]:
    """Paths that a fix changes by lines of which none tells: nobody can look for those changes."""
    telling = set(fix_lines)
    found: set[str] = set()
    for paths, lines in added_by_file(fix):
        if telling.isdisjoint(line.strip().encode() for line in lines):
            found.update(paths)
    return frozenset(found)


def _said_of_fix(fix: str, untold: frozenset[str] | None, overlaid: list[str]) -> str:
    if untold is not None:
        compared = f", copies of {len(untold)} files of it were compared whole" if untold else ""
        return (
            f"no telling line of the fix in the image{compared}; {len(overlaid)} paths lie under "
            "the overlay"
        )
    why = "adds no line that tells" if fix else "is unknown"
    return (
        f"the fix {why}: installed copies of the project were replaced by the base's files, "
        f"{len(overlaid)} paths lie under the overlay"
    )
