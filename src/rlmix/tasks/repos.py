"""Lays functions out into the files of a small repository with a history.

Invariant: the layout never looks at the bug; the buggy and the fixed tree differ only in the
edited lines.
"""

from dataclasses import dataclass
from random import Random

from rlmix.tasks.draft import Draft
from rlmix.tasks.names import NameSource


@dataclass(frozen=True, kw_only=True, slots=True)
class Repository:
    """Right source files, and where the target function and its constants ended up."""

    files: dict[str, list[str]]
    """Path -> lines without line ends."""
    target_file: str
    target_line: int
    """0-based line of the target's `def`."""
    constant_places: dict[str, tuple[str, int]]
    """Constant -> (file, 0-based line)."""
    homes: dict[str, str]
    """Function name -> file."""


def _header(drafts: list[Draft], imports: list[tuple[str, str]]) -> list[str]:
    lines = [f"from {path.removesuffix('.py')} import {name}" for path, name in imports]
    own = [f"{name} = {value}" for draft in drafts for name, value in draft.constants.items()]
    return lines + own


def lay_out(rng: Random, names: NameSource, target: Draft, fillers: list[Draft]) -> Repository:
    """Spread target and fillers over one to three files, one function after the other."""
    num_files = min(rng.choices((1, 2, 3), (2, 5, 3))[0], 1 + len(fillers))
    paths = [names.file() for _ in range(num_files)]
    homes: dict[str, list[Draft]] = {path: [] for path in paths}
    target_file = rng.choice(paths)
    homes[target_file].append(target)
    waiting = fillers[:]
    for path in paths:
        if not homes[path]:
            homes[path].append(waiting.pop())
    for draft in waiting:
        home = homes[rng.choice(paths)]
        home.insert(rng.randrange(len(home) + 1), draft)

    moved = rng.choice(paths) if target.constants else target_file
    files: dict[str, list[str]] = {}
    places: dict[str, tuple[str, int]] = {}
    target_line = 0
    for path in paths:
        owners = [draft for draft in homes[path] if draft is not target]
        imports: list[tuple[str, str]] = []
        if path == moved:
            owners.append(target)
        elif path == target_file:
            imports = [(moved, name) for name in target.constants]
        lines = _header(owners, imports)
        for name in target.constants:
            if path == moved:
                wanted = f"{name} = {target.constants[name]}"
                places[name] = (path, lines.index(wanted))
        for draft in homes[path]:
            if lines:
                lines += [""] * rng.choice((1, 2))
            if draft.support:
                lines += [*draft.support, ""]
            if draft is target:
                target_line = len(lines)
            lines += draft.lines
        files[path] = lines
    return Repository(
        files=files,
        target_file=target_file,
        target_line=target_line,
        constant_places=places,
        homes={draft.name: path for path, drafts in homes.items() for draft in drafts},
    )


def file_text(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"


def unified_diff(path: str, before: list[str], after: list[str]) -> str:
    """Git-style diff of one file whose line count did not change; context of one line."""
    changed = [number for number in range(len(before)) if before[number] != after[number]]
    out = [f"diff --git a/{path} b/{path}", f"--- a/{path}", f"+++ b/{path}"]
    hunks: list[list[int]] = []
    for number in changed:
        if hunks and number - hunks[-1][-1] <= 2:
            hunks[-1].append(number)
        else:
            hunks.append([number])
    for hunk in hunks:
        first, last = max(hunk[0] - 1, 0), min(hunk[-1] + 1, len(before) - 1)
        size = last - first + 1
        out.append(f"@@ -{first + 1},{size} +{first + 1},{size} @@")
        number = first
        while number <= last:
            if before[number] == after[number]:
                out.append(" " + before[number])
                number += 1
                continue
            end = number
            while end <= last and before[end] != after[end]:
                end += 1
            out += ["-" + before[row] for row in range(number, end)]
            out += ["+" + after[row] for row in range(number, end)]
            number = end
    return "\n".join(out) + "\n"
