"""All commands in one place, and the process's exit code."""

import sys

import typer

from rlmix.cli import answer, diff_logprobs, doctor, eval, runs, scale, tasks, train
from rlmix.core.errors import ExitCode

app = typer.Typer(
    name="rlmix",
    help="Agentic-coding RL with one BF16 trainer and samplers on mixed accelerators.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("train")(train.train)
app.add_typer(eval.app, name="eval")
app.add_typer(scale.app, name="scale")
app.command("diff-logprobs")(diff_logprobs.diff_logprobs)
app.add_typer(runs.app, name="runs")
app.command("doctor")(doctor.doctor)
app.add_typer(tasks.app, name="tasks")


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except SystemExit as ending:
        # Typer tells a usage error on stderr; scripts that asked for JSON get their document.
        if ending.code == ExitCode.BAD_REQUEST and "--json" in sys.argv and not answer.is_given():
            print('{"error": "wrong usage, see stderr", "exit_code": 2}')
        raise
