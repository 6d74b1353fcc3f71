"""`rlmix runs`: what ran, how it went, where its logs are."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlmix.cli.answer import Answer, answered
from rlmix.cli.options import AsJson, RunName, RunsDir
from rlmix.core.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from rich.console import RenderableType

app = typer.Typer(help="List, show, stop and report runs.", invoke_without_command=True)

ATTACH_EVERY_S = 0.5
"""How often a running run is asked what its live view shows."""

Process = Annotated[
    str | None, typer.Argument(metavar="PROCESS", help="Start of a process's name, e.g. router.")
]
Lines = Annotated[
    int, typer.Option("--lines", "-n", min=1, help="Last lines to print of a process's log.")
]
Output = Annotated[
    Path | None, typer.Option("--output", metavar="FILE", help="Write there instead of stdout.")
]
PoolName = Annotated[
    str | None, typer.Option("--pool", metavar="POOL", help="Logs of its replicas only.")
]
ReplicaName = Annotated[
    str | None,
    typer.Option("--replica", metavar="NAME", help="h100-0; with --pool its number is enough."),
]
Follow = Annotated[
    bool, typer.Option("--follow", "-f", help="Print new lines until the run has ended.")
]

Target = Annotated[
    Path | None, typer.Argument(metavar="DIR", help="Folder to make for a checkpoint's model.")
]
Step = Annotated[
    int | None,
    typer.Option("--step", min=1, help="Optimizer steps of the checkpoint; without: the newest."),
]


@app.callback()
def runs(context: typer.Context, directory: RunsDir = None, as_json: AsJson = False) -> None:
    """List, show, stop and report runs; without a command: list."""
    command = context.invoked_subcommand
    if command is None:
        list_runs(directory=directory, as_json=as_json)
    elif directory is not None or as_json:
        raise typer.BadParameter(
            f"options go behind the command: rlmix runs {command} --dir DIR --json"
        )


@app.command("list")
@answered
def list_runs(directory: RunsDir = None, as_json: AsJson = False) -> Answer:
    """All runs of a folder, newest first."""
    from rlmix.observe.runs import read_runs
    from rlmix.observe.runs_view import runs_table

    root = _root(directory)
    rows, unreadable = read_runs(root)
    return Answer(
        document={
            "dir": str(root),
            "runs": [row.to_dict() for row in rows],
            "unreadable": unreadable,
        },
        view=lambda: runs_table(rows, root=root, unreadable=unreadable),
    )


@app.command("show")
@answered
def show(run: RunName = None, directory: RunsDir = None, as_json: AsJson = False) -> Answer:
    """State, closing table, last events."""
    from rlmix.observe.runs import find_run, show_run
    from rlmix.observe.runs_view import run_view

    document = show_run(find_run(_root(directory), run))
    return Answer(document=document, view=lambda: run_view(document))


@app.command("logs")
@answered
def logs(
    run: RunName = None,
    process: Process = None,
    pool: PoolName = None,
    replica: ReplicaName = None,
    follow: Follow = False,
    lines: Lines = 40,
    directory: RunsDir = None,
    as_json: AsJson = False,
) -> Answer:
    """Where each process's log is; of PROCESS, a pool or a replica the end of it."""
    import time

    from rlmix.observe.log_follow import choose_logs
    from rlmix.observe.runs import find_run, read_tail
    from rlmix.observe.runs_view import logs_table

    path = find_run(_root(directory), run)
    chosen = choose_logs(path, process=process, pool=pool, replica=replica)
    if follow:
        if as_json:
            raise ConfigError("runs logs: --follow prints lines as they come; leave out --json")
        return _followed(path, process=process, pool=pool, replica=replica, lines=lines)
    if process is None and pool is None and replica is None:
        return Answer(
            document={"run": path.name, "logs": [log.to_dict() for log in chosen]},
            view=lambda: logs_table(chosen, now_s=time.time()),
        )
    tails = {log.process: read_tail(log.path, num_lines=lines) for log in chosen}

    def view() -> "RenderableType":
        from rich.text import Text

        blocks = [f"==> {log.path} <==\n" + "\n".join(tails[log.process]) for log in chosen]
        return Text("\n\n".join(blocks))

    return Answer(
        document={
            "run": path.name,
            "logs": [{**log.to_dict(), "tail": tails[log.process]} for log in chosen],
        },
        view=view,
    )


def _followed(
    path: Path, *, process: str | None, pool: str | None, replica: str | None, lines: int
) -> Answer:
    """Print the last lines, then what comes; Ctrl-C leaves the run alone."""
    from rlmix.observe.log_follow import Follower, choose_logs
    from rlmix.observe.log_follow import follow as follow_lines
    from rlmix.observe.runs import LogFile, is_over, read_tail

    def choose() -> list[LogFile]:
        return choose_logs(path, process=process, pool=pool, replica=replica)

    follower = Follower(choose)
    for log in choose():
        for line in read_tail(log.path, num_lines=lines):
            typer.echo(f"{log.process}: {line}")
    num_lines = 0
    try:
        for name, line in follow_lines(follower, is_over=lambda: is_over(path)):
            typer.echo(f"{name}: {line}")
            num_lines += 1
    except KeyboardInterrupt:
        pass
    return Answer(
        document={"run": path.name, "followed_lines": num_lines},
        view=lambda: f"{path.name}: {num_lines} lines followed",
    )


@app.command("attach")
@answered
def attach(run: RunName = None, directory: RunsDir = None, as_json: AsJson = False) -> Answer:
    """The live view of a run that another terminal started; Ctrl-C leaves the run alone."""
    import time

    from rlmix.observe.live import LiveView, open_console
    from rlmix.observe.live_state import state_from_dict
    from rlmix.observe.manifest import read_manifest
    from rlmix.observe.runs import find_run, show_run
    from rlmix.observe.runs_view import run_view
    from rlmix.scaling.control import ControlClient

    path = find_run(_root(directory), run)
    read_manifest(path)  # A run of a newer format is said to be one, not to be lost.
    client = ControlClient.of_run(path)
    state = state_from_dict(client.view())
    try:
        with LiveView(open_console(is_json=as_json)) as live:
            while True:
                live.update(state)
                time.sleep(ATTACH_EVERY_S)
                state = state_from_dict(client.view())
    except (KeyboardInterrupt, ConfigError):
        pass
    document = show_run(path)
    return Answer(document=document, view=lambda: run_view(document))


@app.command("stop")
@answered
def stop(run: RunName = None, directory: RunsDir = None, as_json: AsJson = False) -> Answer:
    """Ask a run to end after its step, with a checkpoint, and wait until it has."""
    from rlmix.observe.runs import find_run
    from rlmix.observe.runs import stop as stop_run

    result = stop_run(find_run(_root(directory), run))
    return Answer(
        document=result.to_dict(),
        view=lambda: result.message,
        code=ExitCode.GOOD if result.is_stopped else ExitCode.CHECK_FAILED,
    )


@app.command("report")
@answered
def report(run: RunName = None, directory: RunsDir = None, as_json: AsJson = False) -> Answer:
    """Write report.html of a run again."""
    from rlmix.observe.report import write_report
    from rlmix.observe.runs import find_run

    path = find_run(_root(directory), run)
    written = write_report(path)
    return Answer(document={"run": path.name, "report": str(written)}, view=lambda: str(written))


@app.command("export")
@answered
def export(
    run: RunName = None,
    target: Target = None,
    step: Step = None,
    output: Output = None,
    directory: RunsDir = None,
    as_json: AsJson = False,
) -> Answer:
    """With DIR the model of a checkpoint, as a Hugging Face folder; without it the metrics of a run
    as CSV, one line per optimizer step."""
    from rlmix.observe.runs import export_metrics, find_run

    path = find_run(_root(directory), run)
    if target is not None:
        return _export_model(path, target, step, output)
    if step is not None:
        raise typer.BadParameter("--step chooses a model; name a folder for it: RUN DIR")
    text = export_metrics(path)
    if output is not None:
        output.write_text(text)
        return Answer(
            document={"run": path.name, "csv": str(output)}, view=lambda: f"wrote {output}"
        )
    return Answer(document={"run": path.name, "csv": text}, view=lambda: text.rstrip("\n"))


def _export_model(run: Path, target: Path, step: int | None, output: Path | None) -> Answer:
    if output is not None:
        raise typer.BadParameter("--output is for the metrics; a model goes to DIR")
    from rlmix.loop.export import export_run

    exported = export_run(run, step=step, target=target)
    return Answer(
        document={
            "run": run.name,
            "step": exported.step,
            "folder": str(exported.folder),
            "bytes": exported.num_bytes,
        },
        view=lambda: f"wrote step {exported.step} of {run.name} to {exported.folder}",
    )


def _root(directory: Path | None) -> Path:
    if directory is not None:
        return directory
    from rlmix.config.places import default_runs_dir

    return default_runs_dir()
