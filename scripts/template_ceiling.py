"""How far a fixed sequence of commands gets that never looks at what the tools answer.

A template is a chain of `sed -i '/def NAME(/,/^$/ s/PATTERN/TEXT/' *.py` followed by `submit`.
It may use the function name and the last number of the issue, and nothing that a tool printed.
The best chain is searched greedily on train tasks and scored on the held-out ones.

    python scripts/template_ceiling.py --tasks 400
"""

import argparse
import json
import re
import types
from collections.abc import Iterator

from rlmix.tasks.generate import BuiltTask, build_task

NUMBER = "{number}"
"""Stands for the last number in the issue; an operation with it is skipped when there is none."""


def operations() -> Iterator[tuple[str, str]]:
    """(pattern, replacement) of every single step, in Python's notation for sed's `s`."""
    for family in (("<", "<=", ">", ">="), ("==", "!="), ("and", "or"), ("upper", "lower")):
        for old in family:
            for new in family:
                if old != new:
                    yield (
                        rf" {re.escape(old)} " if old[0] in "<>=!ao" else old,
                        (f" {new} " if old[0] in "<>=!ao" else new),
                    )
    for family in (("max(", "min(", "sum(", "len("), (".strip(", ".lower(", ".upper(", ".title(")):
        for old in family:
            for new in family:
                if old != new:
                    yield re.escape(old), new
    for old in "+-*":
        for new in "+-*":
            if old != new:
                yield rf" {re.escape(old)} ", f" {new} "
    yield r"^    (\w+)$", r"    return \1"
    yield r"^(        +\w+ )= ", r"\1+= "
    yield r"range\((\w+)\)", r"range(\1 + 1)"
    yield r"range\((\w+) \+ 1\)", r"range(\1)"
    yield r"\((\w+), (\w+)\)$", r"(\2, \1)"
    yield r"^(    \w+ = (?:max|min|sum|len)\((\w+)\))$", rf"\1 if \2 else {NUMBER}"
    yield r"^(    \w+ =) \d+$", rf"\1 {NUMBER}"
    yield r"=\d+\):", rf"={NUMBER}):"
    yield r" \d+$", rf" {NUMBER}"
    yield r"([-+*]) \d+$", rf"\1 {NUMBER}"
    yield r"\[\d\]", rf"[{NUMBER}]"
    yield r"= (\w+) - (\w+)$", r"= \2 - \1"


def apply_chain(task: BuiltTask, chain: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """Files after the chain; each step changes the first match of every line of the function."""
    numbers = re.findall(r"\d+", task.public.issue)
    files = task.public.base_files()
    for path, text in files.items():
        if "/" in path:
            continue
        lines = text.split("\n")
        inside = False
        for row, line in enumerate(lines):
            inside = line.startswith(f"def {task.function}(") or (inside and line != "")
            if not inside:
                continue
            for pattern, new in chain:
                if NUMBER in new:
                    if not numbers:
                        continue
                    new = new.replace(NUMBER, numbers[-1])
                    new = re.sub(r"\\1(?=\d)", r"\\g<1>", new)
                lines[row] = re.sub(pattern, new, lines[row], count=1)
        files[path] = "\n".join(lines)
    return files


def passes(task: BuiltTask, files: dict[str, str]) -> bool:
    """Runs the hidden assertions in this process; the files are generated code with known edits."""
    import builtins

    loaded: dict[str, types.SimpleNamespace] = {}
    own = dict(vars(builtins))

    def load(name, *_):
        if name not in loaded:
            space: dict[str, object] = {"__builtins__": own}
            exec(compile(files[f"{name}.py"], name, "exec", dont_inherit=True), space)
            loaded[name] = types.SimpleNamespace(**space)
        return loaded[name]

    own["__import__"] = load
    space: dict[str, object] = {"__builtins__": own}
    try:
        for line in task.hidden.tests["test_hidden.py"].split("\n"):
            if line.startswith("from "):
                exec(line, space)
            elif line.startswith("        self.assertEqual("):
                call, wanted = eval(f"({line.strip().removeprefix('self.assertEqual(')}", space)
                if call != wanted:
                    return False
    except Exception:
        return False
    return True


def share(tasks: list[BuiltTask], chain: tuple[tuple[str, str], ...]) -> float:
    return sum(passes(task, apply_chain(task, chain)) for task in tasks) / len(tasks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=400)
    parser.add_argument("--max-steps", type=int, default=12)
    args = parser.parse_args()
    train = [build_task(split="train", seed=77, index=index) for index in range(args.tasks)]
    held_out = [build_task(split="eval", seed=0, index=index) for index in range(args.tasks)]
    chain: tuple[tuple[str, str], ...] = ()
    best = 0.0
    pool = list(dict.fromkeys(operations()))
    for _ in range(args.max_steps):
        scored = [(share(train, (*chain, step)), step) for step in pool if step not in chain]
        top, step = max(scored)
        if top <= best:
            break
        best, chain = top, (*chain, step)
    document = {
        "train": round(best, 4),
        "eval": round(share(held_out, chain), 4),
        "tasks": args.tasks,
        "chain": [f"s/{pattern}/{new}/" for pattern, new in chain],
    }
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
