"""Demonstration sessions for the warm start, and where their spread comes from.

A clean session looks, edits what the issue asks for, and submits. The spread replaces decisions
with plausible wrong ones: guessing before looking, a wrong replacement, a fragment that was right,
a wrong line, and submitting when half is done. Every wrong decision stays one that the context
tells apart from the right one, so that learning from rewards has something to sharpen.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from rlmix.tasks.generate import BuiltTask, Edit
from rlmix.tasks.shell_model import ShellAnswer, ShellModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """How often a demonstration decides wrongly. All fields are probabilities."""

    guess_frac: float
    """Sessions that edit without having seen the code of the function."""
    wrong_fix_frac: float
    """Edits that put a plausible wrong text in the right place."""
    wrong_place_frac: float
    """Edits that change a fragment that was right."""
    half_done_frac: float
    """Two-edit sessions that submit after the first edit."""
    slip_frac: float
    """Sessions with a failed edit (wrong line or file) that is noticed and mended."""


CLEAN = Spread(
    guess_frac=0.0, wrong_fix_frac=0.0, wrong_place_frac=0.0, half_done_frac=0.0, slip_frac=0.15
)
SUBMIT_AT_ONCE_FRAC = 0.75
"""Last edits that carry `&& submit` instead of leaving it to a turn of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoTurn:
    command: str
    exit_code: int
    output: str
    is_learned: bool = True
    """False for a slip: the policy learns to mend it, not to make it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    task_id: str
    issue: str
    turns: tuple[DemoTurn, ...]
    files: Mapping[str, str]
    """Working tree at the end."""


def sed_command(*, line: int | None, old: str, new: str, path: str) -> str:
    """`sed -i` that replaces the first `old` (literal; empty means the line's end) by `new`."""
    where = "" if line is None else str(line)
    pattern = old.replace("*", "\\*") if old else "$"
    return f"sed -i '{where}s/{pattern}/{new}/' {path}"


def look_command(function: str) -> str:
    return f'grep -HnA5 "def {function}(" *.py'


class _Session:
    def __init__(self, task: BuiltTask) -> None:
        self.shell = ShellModel(files=task.public.base_files())
        self.turns: list[DemoTurn] = []

    def do(self, command: str, *, is_learned: bool = True) -> ShellAnswer:
        answer = self.shell.run(command)
        self.turns.append(
            DemoTurn(
                command=command,
                exit_code=answer.exit_code,
                output=answer.output,
                is_learned=is_learned,
            )
        )
        return answer

    def last(self, rng: Random, command: str) -> None:
        """The final edit, with `submit` in the same command or in the next."""
        if rng.random() < SUBMIT_AT_ONCE_FRAC:
            self.do(f"{command} && submit")
        else:
            self.do(command)
            self.do("submit")


def _command(edit: Edit, *, new: str | None = None, line: int | None = None) -> str:
    return sed_command(
        line=edit.line if line is None else line,
        old=edit.old,
        new=edit.new if new is None else new,
        path=edit.path,
    )


def _decided(rng: Random, task: BuiltTask, edit: Edit, spread: Spread) -> str:
    """The command for one edit: right, or wrong in one of the ways of the spread."""
    chance = rng.random()
    if chance < spread.wrong_fix_frac and edit.wrong:
        return _command(edit, new=rng.choice(edit.wrong))
    chance -= spread.wrong_fix_frac
    if 0 <= chance < spread.wrong_place_frac and task.decoys:
        return _command(rng.choice(task.decoys))
    return _command(edit)


def _slip(rng: Random, session: _Session, edit: Edit) -> None:
    """A failed edit and what shows it: an error for a wrong file, else a look at the line."""
    if rng.random() < 0.3:
        wrong_path = edit.path.replace("_", "", 1)
        command = sed_command(line=edit.line, old=edit.old, new=edit.new, path=wrong_path)
        session.do(command, is_learned=False)
        return
    lines = session.shell.files[edit.path].split("\n")
    near = [line for line in range(edit.line - 2, edit.line + 3) if 0 < line < len(lines)]
    harmless = [line for line in near if edit.old and edit.old not in lines[line - 1]]
    if not harmless:
        return
    session.do(_command(edit, line=rng.choice(harmless)), is_learned=False)
    session.do(f"sed -n {edit.line}p {edit.path}")


def _guess(rng: Random, session: _Session, task: BuiltTask) -> None:
    """Edits after no look, or after a look at the `def` line only."""
    edit = task.edits[-1]
    if rng.random() < 0.5:
        session.last(rng, sed_command(line=None, old=edit.old, new=edit.new, path="*.py"))
        return
    session.do(f'grep -Hn "def {task.function}(" *.py')
    line = task.function_line + rng.randrange(1, 5)
    session.last(rng, _command(edit, line=line))


def demonstrate(task: BuiltTask, *, rng: Random, spread: Spread) -> Demonstration:
    """One session on `task`; deterministic in (task, rng state, spread)."""
    session = _Session(task)
    if rng.random() < spread.guess_frac:
        _guess(rng, session, task)
    else:
        session.do(look_command(task.function))
        edits = list(task.edits)
        if len(edits) > 1 and rng.random() < spread.half_done_frac:
            edits = [edits[0]]
        for edit in edits:
            if edit.constant:
                session.do(f'grep -Hn "{edit.constant} =" *.py')
        slips = rng.random() < spread.slip_frac
        for position, edit in enumerate(edits):
            if slips and position == len(edits) - 1:
                _slip(rng, session, edit)
            command = _decided(rng, task, edit, spread)
            if position == len(edits) - 1:
                session.last(rng, command)
            else:
                session.do(command)
    return Demonstration(
        task_id=task.public.task_id,
        issue=task.public.issue,
        turns=tuple(session.turns),
        files=session.shell.files,
    )
