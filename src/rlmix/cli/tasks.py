"""`rlmix tasks prepare|check|pull`: repository tasks that cannot leak their fix, proved, staged."""

import asyncio
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlmix.cli.answer import Answer, answered
from rlmix.cli.options import AsJson
from rlmix.cli.tasks_pull import progress, pull
from rlmix.core.errors import ConfigError, DataError, ExitCode

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rlmix.core.task import HiddenTask, PublicTask
    from rlmix.tasks.gates import GateResult
    from rlmix.tasks.prepare.set import PreparedSet
    from rlmix.tasks.record import BadRow

Case = tuple["PublicTask", "HiddenTask", bytes, dict[str, str]]
"""A task's two halves, its reference fix, and the script that makes it where there is no diff."""

app = typer.Typer(help="Prepare repository tasks, and run their gates.", no_args_is_help=True)
app.command("pull")(pull)

MAX_SHOWN = 30
Source = Annotated[str, typer.Argument(metavar="SOURCE", help="generated, or a public set.")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Tasks to look at.")]
DEFAULT_RUNS = 2
GENERATED_S, COMMAND_S = 10.0, 600.0
"""Of a verdict on a generated task; of one command, where --timeout says nothing."""
MEMORY_MIB, DISK_MIB, PIDS = 2048, 1024, 256


@app.command("prepare")
@answered
def prepare(
    source: Source,
    path: Annotated[
        str | None,
        typer.Option("--path", help="Data of the set: a file, a folder, hf://OWNER/NAME, a URL."),
    ] = None,
    images: Annotated[
        Path | None, typer.Option("--images", help="Unpacked images, one folder per task.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the prepared set.")] = None,
    revision: Annotated[str, typer.Option("--revision", help="Pinned revision.")] = "local",
    limit: Limit = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse a set with a bad row; prepare nothing of it.")
    ] = False,
    as_json: AsJson = False,
) -> Answer:
    """Re-create repositories so that the fix cannot be found, and prove it."""
    from rlmix.tasks.prepare.set import prepare_set

    if source == "generated":
        raise ConfigError(
            "tasks prepare generated: generated repositories hold nothing but their base, so there "
            "is nothing to prepare; `rlmix tasks check generated` runs their gates"
        )
    if path is None or images is None or out is None:
        given = {"--path": path, "--images": images, "--out": out}
        missing = [name for name, value in given.items() if value is None]
        raise ConfigError(
            f"tasks prepare {source}: {' and '.join(missing)} missing; give the set's data with "
            "--path, unpacked images with --images, and a folder for the result with --out"
        )
    from rlmix.tasks.sources.hub import fetch, is_elsewhere

    data = fetch(path, revision=revision) if is_elsewhere(path) else Path(path)
    with progress("preparing") as step:
        done = prepare_set(
            source,
            data,
            images,
            out,
            revision=revision,
            limit=limit,
            is_strict=strict,
            on_task=step,
        )
    return Answer(
        document={
            "total": done.num_rows,
            "ok": len(done.done),
            "bad_rows": [_bad_row(one) for one in done.bad],
            "excluded": [_entry(one.task_id, one.reason) for one in done.excluded],
            "out": str(out),
        },
        view=lambda: _prepared_view(done, source, out),
        code=ExitCode.GOOD if done.done else ExitCode.CHECK_FAILED,
    )


@app.command("check")
@answered
def check(
    source: Source,
    path: Annotated[
        Path | None, typer.Option("--path", help="Prepared set; generated needs none.")
    ] = None,
    limit: Limit = None,
    runs: Annotated[int, typer.Option("--runs", min=1, help="Runs of each gate.")] = DEFAULT_RUNS,
    seed: Annotated[int, typer.Option("--seed", help="Of generated tasks.")] = 0,
    timeout_s: Annotated[
        float | None, typer.Option("--timeout", min=0.1, help="Seconds of one verdict.")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Tasks at a time.")] = 2,
    backend: Annotated[
        str, typer.Option("--backend", help="Sandboxes, as sandbox.backend.")
    ] = "auto",
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail for what preparation excluded, too.")
    ] = False,
    as_json: AsJson = False,
) -> Answer:
    """Run the gates: the reference always earns 1, no change always 0. Writes what fails."""
    cases = list(_cases(source, path, seed=seed, limit=limit))
    with progress("checking", total=len(cases)) as step:
        results = asyncio.run(
            _check_all(cases, runs=runs, timeout_s=timeout_s, jobs=jobs, backend=backend, step=step)
        )
    excluded = [result for result in results if not result.is_ok]
    listed = _earlier(path) if path is not None else []
    if path is not None:
        _write_exclusions(path, results)
    return Answer(
        document={
            "total": len(results) + len(listed),
            "ok": len(results) - len(excluded),
            "weak": sum(result.is_ok and result.is_weak for result in results),
            "excluded": [
                *listed,
                *(_entry(result.task_id, result.reason) for result in excluded),
            ],
            "programs": _programs(cases),
            "runs": sum(result.num_runs for result in results),
        },
        view=lambda: _checked_view(results, listed, source),
        code=_check_code(
            num_ok=len(results) - len(excluded), excluded=excluded, listed=listed, strict=strict
        ),
    )


def _cases(source: str, path: Path | None, *, seed: int, limit: int | None) -> "Iterator[Case]":
    """Each task to check, with its reference."""
    from rlmix.tasks.prepared import PreparedSource
    from rlmix.tasks.source import open_source
    from rlmix.tasks.sources.read import PUBLIC_SETS

    if source == "generated":
        if path is not None:
            raise ConfigError(f"--path {path}: generated tasks come from no folder; leave it out")
        made = open_source("generated", split="train", seed=seed, limit=limit or 50)
        for task_id in made.task_ids():
            hidden = made.hidden(task_id)
            yield made.public(task_id), hidden, hidden.reference_diff.encode(), {}
        return
    if source not in PUBLIC_SETS:
        allowed = ", ".join(sorted((*PUBLIC_SETS, "generated")))
        raise ConfigError(f"tasks check {source}: unknown set; allowed: {allowed}")
    if path is None:
        raise ConfigError(
            f"tasks check {source}: give the prepared set with --path DIR (made by `rlmix tasks "
            f"prepare {source}`)"
        )
    left = limit
    for split in ("train", "eval"):  # A failed task may have been mended, so all are tried.
        found = PreparedSource(path, name=source, split=split, limit=left, with_failed=True)
        for task_id in found.task_ids():
            yield (
                found.public(task_id),
                found.hidden(task_id),
                found.reference(task_id),
                found.script(task_id),
            )
        left = None if left is None else left - len(found.task_ids())
        if left is not None and left <= 0:
            return


async def _check_all(
    cases: "list[Case]",
    *,
    runs: int,
    timeout_s: float | None,
    jobs: int,
    backend: str,
    step: Any,
) -> "list[GateResult]":
    from rlmix.sandbox.backend import open_backend
    from rlmix.sandbox.protocol import SandboxLimits
    from rlmix.tasks.gates import check_task

    limits = SandboxLimits(
        memory_mib=MEMORY_MIB,
        pids=PIDS,
        disk_mib=DISK_MIB,
        output_chars=4000,
        command_timeout_s=timeout_s or COMMAND_S,
    )
    room = asyncio.Semaphore(jobs)
    with tempfile.TemporaryDirectory(prefix="rlmix-check-") as scratch:
        sandboxes = await open_backend(
            backend, limits, Path(scratch), f"check{os.getpid()}", has_images=True
        )

        async def one(case: "Case") -> "GateResult":
            public, hidden, reference, script = case
            async with room:
                step(public.task_id)
                return await check_task(
                    public,
                    hidden,
                    reference,
                    sandboxes,
                    runs=runs,
                    timeout_s=timeout_s or public.verify_s or GENERATED_S,
                    script=script,
                )

        try:
            return list(await asyncio.gather(*map(one, cases)))
        finally:
            await sandboxes.close()


def _check_code(*, num_ok: int, excluded: list[Any], listed: list[Any], strict: bool) -> ExitCode:
    """A set of which nothing is left has failed, whoever excluded it."""
    is_good = num_ok and not excluded and not (strict and listed)
    return ExitCode.GOOD if is_good else ExitCode.CHECK_FAILED


def _programs(cases: "list[Case]") -> dict[str, int]:
    """How many tasks run with whose programs."""
    found: dict[str, int] = {}
    for public, _, _, _ in cases:
        has_image = public.prepared is not None and bool(public.prepared.rootfs)
        whose = "the image's" if has_image else "this machine's"
        found[whose] = found.get(whose, 0) + 1
    return found


def _earlier(path: Path) -> list[dict[str, str]]:
    """What preparation excluded."""
    import json

    file = path / "excluded.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    rows = [json.loads(line) for line in lines if line]
    return [_entry(row["task_id"], row["reason"]) for row in rows]


def _entry(task_id: str, reason: str) -> dict[str, str]:
    """Names of files in it may hold bytes that are no UTF-8, which no document can."""
    from rlmix.observe.jsonl import valid_text

    return {"id": valid_text(task_id), "reason": valid_text(reason)}


def _bad_row(bad: "BadRow") -> dict[str, object]:
    from rlmix.observe.jsonl import valid_text

    return {
        "file": valid_text(bad.file),
        "row": bad.row,
        "column": bad.column,
        "problem": valid_text(bad.problem),
    }


def _write_exclusions(path: Path, results: "list[GateResult]") -> None:
    """`gates.jsonl` beside the set: every task that was ever checked, with what was found last."""
    import json

    file, part = path / "gates.jsonl", path / "gates.jsonl.part"
    lines = file.read_text().splitlines() if file.is_file() else []
    found = {row["task_id"]: row for row in map(json.loads, filter(None, lines))}
    found |= {result.task_id: asdict(result) for result in results}
    try:
        part.write_text("".join(json.dumps(row) + "\n" for row in found.values()))
        part.replace(file)
    except OSError as error:
        raise DataError(
            f"--path {path}: what the gates found cannot be written there ({error.strerror}); give "
            "a copy that you may write to"
        ) from None


def _table(title: str, rows: list[tuple[str, ...]], total: int) -> "RenderableType":
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    head = Text(title)
    if not rows:
        return head
    table = Table("task", "why it is not used")
    for row in rows[:MAX_SHOWN]:
        table.add_row(*map(escape, row))
    if total > MAX_SHOWN:
        table.add_row("...", f"{total - MAX_SHOWN} more, see --json")
    return Group(head, table)


def _prepared_view(done: "PreparedSet", source: str, out: Path) -> "RenderableType":
    unread = len({(bad.file, bad.row) for bad in done.bad})
    said = f" ({unread} rows cannot be read)" if unread else ""
    title = (
        f"{source}: {len(done.done)} of {done.num_rows} tasks prepared in {out}{said}. Next: "
        f"rlmix tasks check {source} --path {out}"
    )
    rows = [tuple(_entry(one.task_id, one.reason).values()) for one in done.excluded]
    return _table(title, rows, len(rows))


def _checked_view(
    results: "list[GateResult]", listed: list[dict[str, str]], source: str
) -> "RenderableType":
    good = [result for result in results if result.is_ok]
    weak = sum(result.is_weak for result in good)
    title = f"{source}: {len(good)} of {len(results)} tasks pass their gates ({weak} weakly)"
    rows: list[tuple[str, ...]] = [(one["id"], one["reason"]) for one in listed]
    bad = [result for result in results if not result.is_ok]
    rows += [tuple(_entry(result.task_id, result.reason).values()) for result in bad]
    return _table(title, rows, len(rows))
