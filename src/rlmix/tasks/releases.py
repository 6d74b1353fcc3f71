"""Public benchmarks as they are released: task trees, tables with scripts beside them, the hub.

A release is read as it lies there, without preparing it: enough for a plan (tasks, images, limits).
Its tasks can be judged where their repositories lie in it (`environment/repository`, as in the
bundled benchmark); all others need `rlmix tasks prepare`.

Invariant: what the release lists with a checksum is verified before anything of it is used.
"""

import hashlib
import json
import re
from dataclasses import asdict
from pathlib import Path

from rlmix.core.errors import ConfigError, DataError
from rlmix.core.task import Commit, HiddenTask, PublicTask
from rlmix.tasks.prepared import hidden_task
from rlmix.tasks.record import ImageRef, SourceTask
from rlmix.tasks.sources.read import ReadSet, read_set

HUB = "hub"
HUB_SETS = {"swe_bench_pro": "ScaleAI/SWE-bench_Pro", "swe_bench_pro_v2": "ScaleAI/SWE-bench_Pro"}
"""Where the rows of a set are published, by its name here."""
HUB_TIMEOUT_S = 10.0
SUM_FILES = ("SHA256SUMS", "v2/SHA256SUMS")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
REPOSITORY = "environment/repository"


def fetch(name: str) -> tuple[Path, str]:
    """A local copy of a published set, and its revision; fetched only when it is not there.

    Raises:
        ConfigError: the set is not published there, or the network does not answer.
    """
    if name not in HUB_SETS:
        raise ConfigError(
            f"eval.path={HUB}: {name} is not fetched; allowed: {', '.join(HUB_SETS)}, or give "
            "eval.path a folder"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        folder = snapshot_download(
            HUB_SETS[name], repo_type="dataset", etag_timeout=HUB_TIMEOUT_S, max_workers=2
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        said = str(error).strip().split("\n")[0][:150]
        raise ConfigError(
            f"eval.path={HUB}: {HUB_SETS[name]} cannot be fetched and is not in the cache "
            f"({type(error).__name__}: {said}); go online, or give eval.path a local copy"
        ) from None
    return Path(folder), Path(folder).name


def read_release(name: str, path: Path, *, revision: str = "local") -> tuple[ReadSet, str]:
    """(tasks and bad rows, checksum) of a release.

    V2 comes as a tree of task folders or as a table with the columns of v1.

    Raises:
        ConfigError: nothing there.
        DataError: a listed file is damaged, or no row can be used.
    """
    if not path.exists():
        raise ConfigError(f"eval.path={path}: not there; give a prepared set, a release, or {HUB}")
    root = path if path.is_dir() else path.parent
    sums = verify_listed(root)
    is_table = name == "swe_bench_pro_v2" and next(root.rglob("task.toml"), None) is None
    try:
        found = read_set("swe_bench_pro" if is_table else name, path, revision=revision)
    except DataError as error:
        raise DataError(str(error).replace("tasks.path=", "eval.path=")) from None
    if not found.tasks:
        raise DataError(
            f"eval.path={path}: none of its {found.num_rows} rows can be used, e.g. "
            f"{found.bad[0].sentence()}"
        )
    digest = hashlib.sha256(sums)
    for task in sorted(found.tasks, key=lambda task: task.public.task_id):
        digest.update(json.dumps(asdict(task), sort_keys=True).encode("utf-8", "surrogatepass"))
    return found, digest.hexdigest()


def verify_listed(root: Path) -> bytes:
    """Compare the files that a release lists with their sums; returns the list, empty for none.

    Raises:
        DataError: a listed file is missing or changed.
    """
    lists = [root / name for name in SUM_FILES if (root / name).is_file()]
    for file in lists:
        try:
            lines = file.read_text(encoding="utf-8-sig").splitlines()
        except UnicodeDecodeError:
            raise DataError(f"{file}: no list of sums; fetch the release anew") from None
        for line in lines:
            digest, _, name = line.partition(" ")
            if line.strip() and not (_SHA256.fullmatch(digest) and name.strip()):
                raise DataError(
                    f"{file}: {line[:80]!r} is no line of SHA-256 and name; fetch the release anew"
                )
            listed = file.parent / name.lstrip(" *")
            if not name:
                continue
            if not listed.is_file():
                raise DataError(f"{listed}: missing, and {file} lists it")
            if hashlib.sha256(listed.read_bytes()).hexdigest() != digest.lower():
                raise DataError(f"{listed}: not the file that {file} lists")
    return b"".join(file.read_bytes() for file in lists)


def public_of(task: SourceTask, folder: Path | None) -> PublicTask:
    """What may be seen of a task; without a repository when the release holds none."""
    files = {}
    if folder is not None and folder.is_dir():
        files = {
            path.relative_to(folder).as_posix(): _text(path)
            for path in sorted(folder.rglob("*"))
            if path.is_file() and "__pycache__" not in path.parts
        }
    return PublicTask(
        task_id=task.public.task_id,
        split="eval",
        issue=task.public.prompt,
        history=(Commit(message="start", files=files),) if files else (),
        tags={"language": task.public.language},
    )


def _text(path: Path) -> str:
    with path.open(encoding="utf-8", newline="") as stream:  # Line ends stay as they are.
        try:
            return stream.read()
        except UnicodeDecodeError:
            raise DataError(
                f"{path}: no UTF-8 text; repositories with binary files need `rlmix tasks prepare`"
            ) from None


def hidden_of(task: SourceTask) -> HiddenTask:
    """What decides a task, from its record."""
    return hidden_task({**asdict(task.hidden), "task_id": task.public.task_id})


def image_name(image: ImageRef | dict[str, str] | None) -> str:
    """`name:tag`, with `@digest` where the set pins one; empty for none."""
    if image is None:
        return ""
    ref, digest = (
        (image.ref, image.digest)
        if isinstance(image, ImageRef)
        else (image["ref"], image.get("digest", ""))
    )
    return f"{ref}@{digest}" if digest else ref
