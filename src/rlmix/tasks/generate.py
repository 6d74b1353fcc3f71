"""Builds one task from (split, seed, index): a repository with one or two real bugs.

Invariant: a built task was proven while it was built. Its hidden cases pass on the right code and
fail on the buggy code, on every partial fix, and on at least one plausible wrong fix of each bug.
The code that is executed for that is code this room wrote a moment before, never data from a file.
"""

from dataclasses import dataclass
from random import Random

from rlmix.core.errors import DataError
from rlmix.core.task import Commit, HiddenTask, PublicTask
from rlmix.tasks import issues
from rlmix.tasks.draft import Args, Draft
from rlmix.tasks.functions import (
    TEMPLATE_WEIGHTS,
    TEMPLATES,
    fixed_value,
    gap_of_two,
    read_fields,
    read_places,
)
from rlmix.tasks.kinds import EVAL_ONLY_KINDS, Site
from rlmix.tasks.names import NameSource
from rlmix.tasks.repos import Repository, file_text, lay_out, unified_diff

SPLITS = ("train", "eval")
HELD_OUT_FRAC = 0.18
"""Share of eval tasks whose bug is of a kind that train never shows."""
TWO_EDIT_FRAC = 0.22
FIXED_VALUE_FRAC = 0.1
"""Share of tasks whose wrong value lies outside the function and has to be looked up."""
KIND_WEIGHTS = {
    "missing_return": 0.2,
    "operator": 0.4,
    "constant": 0.7,
    "variable": 0.7,
    "off_by_one": 2.0,
    "boolean": 2.5,
    "swapped_arguments": 2.0,
    "default": 1.5,
}
"""Kinds that many templates offer are drawn less often than others; unnamed kinds weigh 1."""
NUM_CASES = 9
ATTEMPTS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """One change that the reference fix makes, and what somebody might do instead."""

    kind: str
    path: str
    line: int
    """1-based line in `path`."""
    start: int
    """Column of `old` in the buggy line."""
    old: str
    new: str
    wrong: tuple[str, ...]
    """Replacements for `old` that were proven wrong."""
    constant: str = ""
    """Module constant that the line defines; empty inside the function."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltTask:
    """A task with everything known about it; only `public` may reach a session."""

    public: PublicTask
    hidden: HiddenTask
    function: str
    function_line: int
    """1-based line of the `def` in the buggy tree."""
    edits: tuple[Edit, ...]
    decoys: tuple[Edit, ...]
    """Changes to fragments that are right as they are."""


class _Unproven(Exception):
    """This draw of functions, bugs and cases does not separate right from wrong."""


def _run(source: str, name: str, cases: list[Args]) -> list[object]:
    """Result of every call; the exception's class where a call fails; [] where nothing loads."""
    namespace: dict[str, object] = {}
    try:
        exec(compile(source, "<generated>", "exec", dont_inherit=True), namespace)
    except SyntaxError:
        return []
    results: list[object] = []
    for args in cases:
        try:
            value = namespace[name](*args)  # type: ignore[operator]
        except Exception as error:
            value = type(error)
        results.append(value if isinstance(value, int | str | type | None) else type(value))
    return results


def _source(draft: Draft, lines: list[str], constants: dict[str, int | str]) -> str:
    head = [f"{name} = {value}" for name, value in constants.items()]
    return "\n".join([*head, *draft.support, *lines]) + "\n"


def _with(lines: list[str], changes: dict[Site, str]) -> list[str]:
    """Right lines with the sites' fragments replaced; one site a line."""
    out = lines[:]
    for site, text in changes.items():
        if site.line >= 0:
            line = lines[site.line]
            out[site.line] = line[: site.start] + text + line[site.start + len(site.right) :]
    return out


def _variant(draft: Draft, changes: dict[Site, str]) -> str:
    constants: dict[str, int | str] = dict(draft.constants)
    constants.update({site.constant: text for site, text in changes.items() if site.constant})
    return _source(draft, _with(draft.lines, changes), constants)


def _draw_draft(rng: Random, names: NameSource, *, held_out: bool) -> tuple[Draft, list[Site]]:
    """A function and the sites to break in it."""
    if held_out:
        draft = rng.choice((read_fields, read_places, gap_of_two))(rng, names)
        first = next(site for site in draft.sites if site.kind in EVAL_ONLY_KINDS)
    elif rng.random() < FIXED_VALUE_FRAC:
        draft = fixed_value(rng, names)
        return draft, [next(site for site in draft.sites if site.constant)]
    else:
        draft = rng.choices(TEMPLATES, TEMPLATE_WEIGHTS)[0](rng, names)
        first = _draw_site(rng, [site for site in draft.sites if _usable(site)])
    chosen = [first]
    if not first.constant and rng.random() < TWO_EDIT_FRAC * 1.25:
        others = [site for site in draft.sites if _usable(site) and site.line != first.line]
        if others:
            chosen.append(_draw_site(rng, others))
    return draft, sorted(chosen, key=lambda site: site.line)


def _draw_site(rng: Random, sites: list[Site]) -> Site:
    return rng.choices(sites, [KIND_WEIGHTS.get(site.kind, 1.0) for site in sites])[0]


def _usable(site: Site) -> bool:
    return site.kind not in EVAL_ONLY_KINDS and not site.constant


def _edit(site: Site, *, old: str, new: str, wrong: tuple[str, ...], repo: Repository) -> Edit:
    if site.constant:
        path, line = repo.constant_places[site.constant]
    else:
        path, line = repo.target_file, repo.target_line + site.line
    return Edit(
        kind=site.kind,
        path=path,
        line=line + 1,
        start=site.start,
        old=old,
        new=new,
        wrong=wrong,
        constant=site.constant,
    )


def _draw_cases(rng: Random, draft: Draft, count: int) -> tuple[list[Args], list[object]]:
    cases = [draft.draw_args(rng) for _ in range(count)]
    wanted = _run(_variant(draft, {}), draft.name, cases)
    good = [
        (args, value)
        for args, value in zip(cases, wanted, strict=True)
        if not isinstance(value, type) and value is not None
    ]
    return [args for args, _ in good], [value for _, value in good]


def _prove(
    draft: Draft, bugs: dict[Site, str], cases: list[Args], wanted: list[object]
) -> dict[Site, tuple[str, ...]]:
    """Wrong fixes of each bug that the cases catch; raises where something wrong passes."""
    if _run(_variant(draft, bugs), draft.name, cases) == wanted:
        raise _Unproven
    proven: dict[Site, tuple[str, ...]] = {}
    for site, bug in bugs.items():
        if len(bugs) > 1 and _run(_variant(draft, {site: bug}), draft.name, cases) == wanted:
            raise _Unproven
        proven[site] = tuple(
            text
            for text in site.wrong_fixes(bug)
            if _run(_variant(draft, {site: text}), draft.name, cases) != wanted
        )
        if not proven[site] and site.wrong_fixes(bug):
            raise _Unproven
    return proven


def _is_addressable(line: str, site: Site, bug: str) -> bool:
    """True when the first match of the bug's text in the buggy line is the bug itself."""
    buggy = line[: site.start] + bug + line[site.start + len(site.right) :]
    return bug == "" or buggy.find(bug) == site.start


def _test_file(functions: list[tuple[str, str, list[Args], list[object]]]) -> str:
    """unittest module: the first entry is the target, the rest must not have been harmed."""
    out = ["import unittest", ""]
    out += [f"from {path.removesuffix('.py')} import {name}" for path, name, _, _ in functions]
    out += ["", "", "class TestWanted(unittest.TestCase):"]
    for position, (_, name, cases, wanted) in enumerate(functions):
        out.append(f"    def test_{'target' if position == 0 else f'other_{position}'}(self):")
        out += [
            f"        self.assertEqual({name}({', '.join(map(repr, args))}), {value!r})"
            for args, value in zip(cases, wanted, strict=True)
        ]
        out.append("")
    return "\n".join(out)


def _attempt(rng: Random, *, task_id: str, split: str) -> BuiltTask:
    names = NameSource(rng, split)
    held_out = split == "eval" and rng.random() < HELD_OUT_FRAC
    target, sites = _draw_draft(rng, names, held_out=held_out)
    bugs = {site: rng.choice(site.bugs) for site in sites}
    for site, bug in bugs.items():
        if not site.constant and not _is_addressable(target.lines[site.line], site, bug):
            raise _Unproven
    cases, wanted = _draw_cases(rng, target, NUM_CASES)
    proven = _prove(target, bugs, cases, wanted)

    fillers = [rng.choice(TEMPLATES)(rng, names) for _ in range(rng.randrange(1, 4))]
    repo = lay_out(rng, names, target, fillers)
    tested = [(repo.target_file, target.name, cases, wanted)]
    for filler in fillers:
        tested.append((repo.homes[filler.name], filler.name, *_draw_cases(rng, filler, 2)))

    edits = tuple(
        _edit(site, old=bug, new=site.right, wrong=proven[site], repo=repo)
        for site, bug in bugs.items()
    )
    right_files, buggy_files = repo.files, {path: rows[:] for path, rows in repo.files.items()}
    for edit in edits:
        row = right_files[edit.path][edit.line - 1]
        end = edit.start + len(edit.new)
        buggy_files[edit.path][edit.line - 1] = row[: edit.start] + edit.old + row[end:]
    taken = {site.line for site in bugs}
    decoys = tuple(
        _edit(site, old=site.right, new=text, wrong=(), repo=repo)
        for site in target.sites
        if _usable(site) and site.line not in taken
        for text in site.bugs[:1]
        if _is_addressable(target.lines[site.line], site, site.right)
    )

    first_end = repo.target_line
    early = dict(buggy_files)
    rows = buggy_files[repo.target_file]
    early[repo.target_file] = rows[:first_end] + rows[first_end + len(target.lines) :]
    visible = _test_file([(path, name, c[:1], w[:1]) for path, name, c, w in tested[1:]])
    history = (
        Commit(
            message="Start",
            files={path: file_text(lines) for path, lines in early.items()},
        ),
        Commit(
            message=f"Add {target.name}",
            files={
                repo.target_file: file_text(rows),
                "tests/test_visible.py": visible,
            },
        ),
    )
    difficulty = "hard" if len(edits) > 1 else "look" if edits[0].constant else "plain"
    public = PublicTask(
        task_id=task_id,
        split=split,
        issue=issues.compose(rng, target.name, [rng.choice(site.sentences) for site in bugs]),
        history=history,
        tags={
            "kind": "+".join(edit.kind for edit in edits),
            "difficulty": difficulty,
            "num_edits": str(len(edits)),
            "num_files": str(len(repo.files)),
            "held_out_kind": str(held_out).lower(),
        },
    )
    diff = "".join(
        unified_diff(path, buggy_files[path], right_files[path])
        for path in right_files
        if buggy_files[path] != right_files[path]
    )
    hidden = HiddenTask(
        task_id=task_id,
        tests={"test_hidden.py": _test_file(tested)},
        required_tests=(
            "test_hidden.TestWanted.test_target",
            *(f"test_hidden.TestWanted.test_other_{n}" for n in range(1, len(tested))),
        ),
        reference_diff=diff,
    )
    return BuiltTask(
        public=public,
        hidden=hidden,
        function=target.name,
        function_line=repo.target_line + 1,
        edits=edits,
        decoys=decoys,
    )


def build_task(*, split: str, seed: int, index: int) -> BuiltTask:
    """The task number `index` of a split; the same arguments always give the same task."""
    if split not in SPLITS:
        raise DataError(f"tasks: split={split!r}; allowed: {', '.join(SPLITS)}")
    rng = Random(f"rlmix-generated/{split}/{seed}/{index}")
    task_id = f"generated/{split}/{seed}/{index}"
    for _ in range(ATTEMPTS):
        try:
            return _attempt(rng, task_id=task_id, split=split)
        except _Unproven:
            continue
    raise DataError(f"tasks: no provable task for {task_id} in {ATTEMPTS} draws")
