"""Answers the few commands that demonstrations use the way real bash, grep and sed do.

Demonstrations are made by the thousand, so their tool output cannot come from real processes.
Tests compare this model with real bash on the demonstrations' own commands.
"""

import re
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class ShellAnswer:
    exit_code: int
    output: str
    submitted: bool = False


_LOOK = re.compile(r'grep -(Hn|n|HnA(\d)) "([^"]*)" (\S+)')
_SHOW = re.compile(r"sed -n (\d+)p (\S+)")
_EDIT = re.compile(r"sed -i '(\d*)s/((?:[^/\\]|\\.)*)/((?:[^/\\]|\\.)*)/' (\S+)")


@dataclass(kw_only=True, slots=True)
class ShellModel:
    """A folder of text files and the commands `grep`, `sed -n`, `sed -i` and `submit`."""

    files: dict[str, str]
    """Path -> text. Files below `tests/` are there but not matched by `*.py`."""
    is_submitted: bool = field(default=False)

    def run(self, command: str) -> ShellAnswer:
        """Runs a chain joined by ` && `; stops at the first failure."""
        output, code = "", 0
        for part in command.split(" && "):
            answer = self._one(part.strip())
            output += answer.output
            code = answer.exit_code
            if answer.submitted:
                self.is_submitted = True
            if code != 0 or answer.submitted:
                break
        return ShellAnswer(exit_code=code, output=output, submitted=self.is_submitted)

    def _paths(self, pattern: str) -> list[str]:
        if pattern == "*.py":
            return sorted(path for path in self.files if "/" not in path)
        return [pattern]

    def _one(self, part: str) -> ShellAnswer:
        if part == "submit":
            return ShellAnswer(exit_code=0, output="", submitted=True)
        if match := _LOOK.fullmatch(part):
            return self._look(match)
        if match := _SHOW.fullmatch(part):
            return self._show(int(match[1]), match[2])
        if match := _EDIT.fullmatch(part):
            return self._edit(match)
        word = part.split(" ")[0]
        return ShellAnswer(exit_code=127, output=f"bash: line 1: {word}: command not found\n")

    def _look(self, match: re.Match[str]) -> ShellAnswer:
        num_after = int(match[2] or 0)
        paths = self._paths(match[4])
        missing = [path for path in paths if path not in self.files]
        if missing:
            text = f"grep: {missing[0]}: No such file or directory\n"
            return ShellAnswer(exit_code=2, output=text)
        with_path = match[1].startswith("H") or len(paths) > 1
        out: list[str] = []
        for path in paths:
            lines = self.files[path].split("\n")[:-1]
            hits = [row for row, line in enumerate(lines) if match[3] in line]
            last = -1
            for hit in hits:
                for row in range(max(hit, last + 1), min(hit + num_after, len(lines) - 1) + 1):
                    if num_after and out and (last < 0 or row > last + 1):
                        out.append("--")
                    mark = ":" if row in hits else "-"
                    head = f"{path}{mark}" if with_path else ""
                    out.append(f"{head}{row + 1}{mark}{lines[row]}")
                    last = row
        text = "".join(line + "\n" for line in out)
        return ShellAnswer(exit_code=0 if out else 1, output=text)

    def _show(self, number: int, path: str) -> ShellAnswer:
        if path not in self.files:
            text = f"sed: can't read {path}: No such file or directory\n"
            return ShellAnswer(exit_code=2, output=text)
        lines = self.files[path].split("\n")[:-1]
        shown = lines[number - 1] + "\n" if 1 <= number <= len(lines) else ""
        return ShellAnswer(exit_code=0, output=shown)

    def _edit(self, match: re.Match[str]) -> ShellAnswer:
        paths = self._paths(match[4])
        if paths[0] not in self.files:
            text = f"sed: can't read {paths[0]}: No such file or directory\n"
            return ShellAnswer(exit_code=2, output=text)
        old, new = match[2], match[3].replace("\\*", "*")
        for path in paths:
            lines = self.files[path].split("\n")[:-1]
            rows = range(len(lines)) if match[1] == "" else [int(match[1]) - 1]
            for row in rows:
                if 0 <= row < len(lines):
                    lines[row] = _substitute(old, new, lines[row])
            self.files[path] = "".join(line + "\n" for line in lines)
        return ShellAnswer(exit_code=0, output="")


def _substitute(old: str, new: str, line: str) -> str:
    """First match only. Knows `$`, `\\*` and a literal OLD; anything else matches nothing."""
    if old == "$":
        return line + new
    literal = old.replace("\\*", "*")
    if old == "" or literal not in line:
        return line
    return line.replace(literal, new, 1)
