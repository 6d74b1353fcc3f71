"""Prepares every task of a set: finds its unpacked image, prepares it, keeps its reference fix."""

import hashlib
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rlmix.core.errors import ConfigError, DataError
from rlmix.tasks.prepare.git import git
from rlmix.tasks.prepare.image import resolve
from rlmix.tasks.prepare.manifest import Excluded, Manifest
from rlmix.tasks.prepare.task import MANIFEST, prepare_task
from rlmix.tasks.prepared import HARD_FILES, PreparedTask, forget_gates, write_set
from rlmix.tasks.record import BadRow, SourceTask
from rlmix.tasks.sources.read import read_set

REPOSITORIES = "repositories"
MAX_LISTED = 10
MAX_IMAGE_TESTS_BYTES = 16 << 20
"""They travel to every sandbox that judges the task."""
MAX_NAME_CHARS = 200
"""With a digest and `.incomplete` behind it still a name that every file system takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedSet:
    """What became of a set."""

    num_rows: int
    done: tuple[Manifest, ...]
    excluded: tuple[Excluded, ...]
    bad: tuple[BadRow, ...]
    """Problems of rows that could not be read; each row is among the excluded as well."""


def prepare_set(
    name: str,
    path: Path,
    images: Path,
    out: Path,
    *,
    revision: str,
    limit: int | None,
    is_strict: bool = False,
    on_task: Callable[[str], None] = lambda _: None,
) -> PreparedSet:
    """Prepare the tasks of a set.

    Args:
        path: data of the set.
        images: folder with one unpacked image per task, named as `image_folder` says.
        out: folder of the prepared set; what is there already is kept.
        is_strict: refuse a set with a row that cannot be read, before anything is prepared.
        on_task: called with the id of each task before it is worked on.

    Raises:
        ConfigError: `images` is no folder, or `out` cannot be one.
        DataError: there is no git, the data cannot be read, is_strict and one of its rows cannot,
            or `out` cannot be written.
    """
    if not images.is_dir():
        raise ConfigError(
            f"--images {images}: no such folder; allowed: a folder with one unpacked image per "
            "task, e.g. from `docker export $(docker create IMAGE) | tar -x -C DIR/TASK_ID`"
        )
    if shutil.which("git") is None:
        raise DataError(
            f"tasks prepare {name}: no git on PATH, which re-creates repositories; install it"
        )
    images, out = images.resolve(), out.resolve()  # git is run in other folders.
    found = read_set(name, path, revision=revision, limit=limit)
    excluded = bad_rows(found.bad)
    if is_strict and excluded:
        listed = "; ".join(one.reason for one in excluded[:MAX_LISTED])
        more = f" and {len(excluded) - MAX_LISTED} more" if len(excluded) > MAX_LISTED else ""
        raise DataError(
            f"tasks prepare {name} --strict: {len(excluded)} of {found.num_rows} rows cannot be "
            f"read: {listed}{more}; mend them, or leave out --strict to prepare the others"
        )
    done: list[PreparedTask] = []
    changed: set[str] = set()
    try:
        (out / REPOSITORIES).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out {out}: no folder can be made there ({error.strerror}); give one that you may "
            "write to"
        ) from None
    for task in found.tasks:
        task_id = task.public.task_id
        on_task(task_id)
        rootfs = image_folder(task, images)
        folder = out / REPOSITORIES / folder_name(task_id)
        if rootfs is None:
            excluded.append(Excluded(task_id=task_id, reason=_no_image(task, images)))
            continue
        before = _bytes_of(folder / MANIFEST)
        manifest = prepare_task(task, rootfs, folder)
        if before != _bytes_of(folder / MANIFEST):
            changed.add(task_id)
        if isinstance(manifest, Excluded):
            excluded.append(manifest)
            continue
        try:
            diff = _reference(task, folder, manifest.commit)
            judged = with_image_files(task, rootfs)
        except DataError as error:
            shutil.rmtree(folder)
            excluded.append(Excluded(task_id=task_id, reason=str(error)))
            continue
        done.append(
            PreparedTask(task=judged, manifest=manifest, folder=folder, rootfs=rootfs, diff=diff)
        )
    try:
        copy_hard_ids(path, out)
        write_set(out, name=name, revision=revision, done=done, excluded=excluded)
        forget_gates(out, changed)
    except OSError as error:
        raise DataError(f"--out {out}: the set cannot be written there: {error}") from None
    return PreparedSet(
        num_rows=found.num_rows,
        done=tuple(one.manifest for one in done),
        excluded=tuple(excluded),
        bad=found.bad,
    )


def _bytes_of(file: Path) -> bytes:
    return file.read_bytes() if file.is_file() else b""


def with_image_files(task: SourceTask, rootfs: Path) -> SourceTask:
    """The task with the files of its image that decide, which its sandboxes no longer see.

    Raises:
        DataError: one is not there, or they are too large to be carried along.
    """
    files = dict(task.hidden.files)
    size = 0
    for path, name in task.hidden.from_image.items():
        place = resolve(rootfs.resolve(), path)
        found = [place] if place.is_file() else sorted(place.rglob("*"))
        kept = [file for file in found if file.is_file() and not file.is_symlink()]
        if not kept:
            raise DataError(f"the image has no {path}, which decides")
        for file in kept:
            size += file.stat().st_size
            if size > MAX_IMAGE_TESTS_BYTES:
                raise DataError(f"{path} of the image is larger than {MAX_IMAGE_TESTS_BYTES} bytes")
            inside = "" if file == place else f"/{file.relative_to(place).as_posix()}"
            files[name + inside] = file.read_bytes().decode("utf-8", "surrogateescape")
    return replace(task, hidden=replace(task.hidden, files=files))


def copy_hard_ids(path: Path, out: Path) -> None:
    """A list of hard tasks that lies in the data goes along, where evaluation looks for it."""
    for name in HARD_FILES:
        if (path / name).is_file():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path / name, out / name)


def bad_rows(found: tuple[BadRow, ...]) -> list[Excluded]:
    """One entry per row that could not be read, with all that is wrong with it."""
    rows: dict[tuple[str, int], list[BadRow]] = {}
    for bad in found:
        rows.setdefault((bad.file, bad.row), []).append(bad)
    return [
        Excluded(
            task_id=problems[0].task_id or f"{Path(file).name}:{row}",
            reason=f"{file}, row {row}: "
            + "; ".join(f"column {bad.column}: {bad.problem}" for bad in problems),
        )
        for (file, row), problems in rows.items()
    ]


def slug(text: str) -> str:
    """A folder name for an id or an image."""
    return re.sub(r"[^A-Za-z0-9._-]+", "__", text).strip("._")[:MAX_NAME_CHARS] or "task"


def folder_name(task_id: str) -> str:
    """A folder of its own for every id: where letters had to go, a digest tells ids apart."""
    name = slug(task_id)
    digest = hashlib.sha256(task_id.encode("utf-8", "surrogatepass")).hexdigest()[:10]
    return name if name == task_id else f"{name}-{digest}"


def image_folder(task: SourceTask, images: Path) -> Path | None:
    """The unpacked image of a task: a folder named after the task, or after the image."""
    names = [slug(task.public.task_id)]
    if task.public.image is not None:
        names.append(slug(task.public.image.ref))
    return next((images / name for name in names if (images / name).is_dir()), None)


def _no_image(task: SourceTask, images: Path) -> str:
    image = task.public.image
    ref = image.ref if image is not None else "the set names none"
    return f"no unpacked image {images}/{slug(task.public.task_id)} (image: {ref})"


def _reference(task: SourceTask, folder: Path, commit: str) -> str:
    try:
        return reference_diff(task, folder, commit)
    except DataError as error:
        raise DataError(f"the reference fix does not apply to the base: {error}") from None


def reference_diff(task: SourceTask, folder: Path, commit: str) -> str:
    """The reference fix against the prepared base, tried on it; empty when the set has none.

    Raises:
        DataError: it does not apply.
    """
    gold = task.gold
    if gold is None or not gold.patch:
        return ""
    with tempfile.TemporaryDirectory(prefix="rlmix-reference-") as scratch:
        env = {
            "GIT_DIR": str(folder / "capture"),
            "GIT_INDEX_FILE": f"{scratch}/index",
            "GIT_OBJECT_DIRECTORY": scratch,
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(folder / "repo/.git/objects"),
        }
        git("read-tree", commit, cwd=folder, env=env)
        options = ["--cached", "--whitespace=nowarn", *(["-R"] if gold.is_reversed else [])]
        patch = gold.patch if gold.patch.endswith("\n") else gold.patch + "\n"
        git("apply", *options, "-", cwd=folder, env=env, stdin=patch.encode())
        diff = git(
            "diff", "--cached", "--binary", "--full-index", "--no-renames", "--no-ext-diff",
            "--no-textconv", "--no-color", commit, "--", cwd=folder, env=env,
        )  # fmt: skip
        return diff.decode("utf-8", "surrogateescape")
