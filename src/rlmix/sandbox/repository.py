"""Builds a task's repository with real git, once per process, as a folder that sandboxes copy.

A template folder holds `repo` (work tree and .git of the agent's copy) and `capture` (a git folder
of ours: configuration and attributes that make git record raw bytes). Both are never written
again; sandboxes see them read-only.

Invariant: the object store holds the history's own objects and nothing else, and the same history
always gives the same base commit.
"""

import asyncio
import hashlib
import os
import shutil
import subprocess
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from rlmix.core.errors import DataError, SandboxError
from rlmix.core.task import Commit, PreparedRepository, Repository

FIRST_COMMIT_UNIX_S = 1_700_000_000
COMMIT_GAP_S = 86_400
"""Fixed dates: a commit id must not depend on when it was made."""
MAX_TEMPLATES = 64
"""Kept per process; sessions of one group come together, so few are in use at once."""
_GIT_TIMEOUT_S = 60.0

_CAPTURE_CONFIG = """[core]
\trepositoryformatversion = 0
\tfilemode = true
\tbare = false
\tsymlinks = true
\tignorecase = false
\tautocrlf = false
\tsafecrlf = false
\tcompression = 0
\tattributesfile = /dev/null
\texcludesfile = /dev/null
\tquotepath = true
\tfsmonitor = false
\thookspath = /dev/null
[add]
\tignoreErrors = false
[gc]
\tauto = 0
"""
_CAPTURE_ATTRIBUTES = "* -text -filter -ident -working-tree-encoding !eol !diff !merge\n"
"""The highest rank of attributes: no .gitattributes of a work tree can convert or hide bytes."""

_BUILD = """set -e
umask 022
git init -q --template= -b main repo
cd repo
fast="-c core.fsync=none -c core.logAllRefUpdates=false"
git $fast -c fastimport.unpackLimit=1 fast-import --quiet
git $fast read-tree -u --reset main
read -r head <.git/refs/heads/main
printf '%s' "$head"
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RepositoryTemplate:
    """A built repository on disk."""

    path: Path
    base_commit: str
    prepared: PreparedRepository | None = None
    """What it was copied from; None for a history."""

    @property
    def has_machine(self) -> bool:
        """It needs files outside of the repository that are not this machine's."""
        return self.prepared is not None and bool(self.prepared.rootfs or self.prepared.writable)


def fast_import_stream(history: tuple[Commit, ...]) -> bytes:
    """The history in git's fast-import language.

    Raises:
        DataError: no commit, or a path that leaves the repository or names `.git`.
    """
    if not history:
        raise DataError("task: history is empty; a repository needs at least one commit")
    out: list[bytes] = []
    for number, commit in enumerate(history):
        when = f"{FIRST_COMMIT_UNIX_S + number * COMMIT_GAP_S} +0000"
        message = commit.message.encode()
        out.append(b"commit refs/heads/main\n")
        out.append(f"committer Developer <developer@localhost> {when}\n".encode())
        out.append(b"data %d\n%s\n" % (len(message), message))
        for path, text in commit.files.items():
            data = text.encode()
            out.append(b"M 100644 inline %s\n" % checked_path(path).encode())
            out.append(b"data %d\n%s\n" % (len(data), data))
    return b"".join(out)


def checked_path(path: str) -> str:
    """`path` itself when it is a plain relative path below the repository's root."""
    parts = path.split("/")
    bad = any(part in ("", ".", "..") or part.lower() == ".git" for part in parts)
    if bad or path.startswith('"') or "\n" in path or "\0" in path:
        raise DataError(
            f"task: path {path!r} is not allowed; give a relative path without '..', '.git', "
            "empty parts or line ends"
        )
    return path


class TemplateStore:
    """Templates of one process, by content. Oldest unused ones are removed."""

    def __init__(self, folder: Path, *, max_templates: int = MAX_TEMPLATES) -> None:
        self._folder = folder
        self._max_templates = max_templates
        self._known: OrderedDict[str, asyncio.Task[RepositoryTemplate]] = OrderedDict()
        self._users: dict[Path, int] = {}

    async def get(self, repository: Repository) -> RepositoryTemplate:
        """The template of a repository; concurrent callers share one build."""
        if isinstance(repository, PreparedRepository):
            stream = repr(repository).encode("utf-8", "surrogateescape")
        else:
            stream = fast_import_stream(repository)
        key = hashlib.sha256(stream).hexdigest()[:24]
        task = self._known.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = asyncio.create_task(self._build(key, repository), name=f"template {key}")
            self._known[key] = task
        self._known.move_to_end(key)
        template = await asyncio.shield(task)
        self._trim()
        return template

    def hold(self, template: RepositoryTemplate) -> None:
        self._users[template.path] = self._users.get(template.path, 0) + 1

    def let_go(self, template: RepositoryTemplate) -> None:
        left = self._users.pop(template.path) - 1
        if left:
            self._users[template.path] = left

    async def close(self) -> None:
        await asyncio.gather(*self._known.values(), return_exceptions=True)

    def _trim(self) -> None:
        for key, task in list(self._known.items()):
            if len(self._known) <= self._max_templates:
                return
            if not task.done() or task.cancelled() or task.exception():
                continue
            path = task.result().path
            if path not in self._users:
                del self._known[key]
                shutil.rmtree(path, ignore_errors=True)

    async def _build(self, key: str, repository: Repository) -> RepositoryTemplate:
        path = self._folder / key
        if isinstance(repository, PreparedRepository):
            return await asyncio.to_thread(copy_prepared, path, repository)
        return await asyncio.to_thread(build_template, path, fast_import_stream(repository))


def copy_prepared(path: Path, prepared: PreparedRepository) -> RepositoryTemplate:
    """A prepared repository as a template in the new folder `path`. Blocks.

    Files are linked where the disk is the same: nobody writes to a template.
    """
    shutil.rmtree(path, ignore_errors=True)
    source = Path(prepared.folder)
    try:
        for name in ("repo", "capture", "overlay"):
            if name == "overlay" and not (source / name).is_dir():
                continue
            shutil.copytree(source / name, path / name, symlinks=True, copy_function=_link)
        path.chmod(0o755)
    except (OSError, shutil.Error) as error:
        raise SandboxError(
            f"sandbox: the prepared repository {source} cannot be copied to {path}: {error}; run "
            "`rlmix tasks prepare` again, or put it where this machine can read it"
        ) from None
    return RepositoryTemplate(path=path, base_commit=prepared.commit, prepared=prepared)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def write_capture(folder: Path) -> None:
    """The git folder that diffs are taken and applied with: our configuration, raw bytes. Readable
    by every user, because a sandbox runs as one of its own."""
    for name in ("", "info", "objects", "refs"):
        (folder / name).mkdir()
        (folder / name).chmod(0o755)
    texts = {
        "HEAD": "ref: refs/heads/none\n",
        "config": _CAPTURE_CONFIG,
        "info/attributes": _CAPTURE_ATTRIBUTES,
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o644)


def build_template(path: Path, stream: bytes) -> RepositoryTemplate:
    """Run git in the new folder `path`. Blocks."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    path.chmod(0o755)
    write_capture(path / "capture")
    env = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(path),
        "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
    }
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", _BUILD],
            cwd=path,
            env=env,
            input=stream,
            capture_output=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        text = getattr(error, "stderr", b"") or b""
        raise SandboxError(
            f"sandbox: git could not build a task's repository in {path}: {error}; "
            f"{text.decode(errors='replace').strip()}"
        ) from None
    return RepositoryTemplate(path=path, base_commit=done.stdout.decode())
