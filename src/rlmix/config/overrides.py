"""What a KEY=VALUE argument may touch. Pure: arguments come in parsed, problems go out.

A key that a group of files under `conf/` bears chooses a file (`algo=grpo`); every other key sets
one value, adds an entry to a mapping (`+`), or removes one (`~`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlmix.config.keys import Key, UnknownKey, likely_key, lookup
from rlmix.config.problems import Problem, close_names, did_you_mean

Groups = Mapping[str, Sequence[str]]
"""Group -> names of its files."""

ROOT_GROUPS = ("experiment",)
"""Groups whose files may set keys of any section."""

ADD_HINTS = {
    "pools": "add a pool with +pool@pools.{name}=embedded_h100, or another file of pool",
    "accelerators": "add an accelerator in a YAML file of your own (docs/adding.md)",
    "inventory.nodes": "list your machines in a YAML file of your own, as in "
    "conf/inventory/qwen36_mixed.yaml: inventory=FILE --conf-dir DIR",
}
"""Mapping -> how an entry is added; Hydra cannot add a typed entry key by key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Override:
    """One parsed argument."""

    text: str
    """As it was written."""
    key: str
    package: str | None
    """PATH of `group@PATH=file`."""
    action: str
    """`set`, `add` (`+`, `++`) or `delete` (`~`)."""
    value: Any

    def chooses_file(self, groups: Groups) -> bool:
        return self.key in groups or self.package is not None


def check_override(override: Override, *, root: type, groups: Groups) -> Iterator[Problem]:
    """Problems that can be told without composing."""
    if override.chooses_file(groups):
        yield from _check_choice(override, root=root, groups=groups)
    else:
        yield from _check_key(override, root=root, groups=groups)


def check_entries(
    override: Override, *, root: type, entries: Mapping[str, Sequence[str]]
) -> Iterator[Problem]:
    """Problems that need to know which entries the mappings have.

    Args:
        entries: path of a mapping -> names in it, as composed.
    """
    key = lookup(root, override.key)
    if not isinstance(key, Key) or not key.entries:
        return
    for mapping, name in key.entries:
        known = entries.get(mapping, ())
        if name in known or (key.is_free and override.action == "add"):
            continue
        hint = did_you_mean(name, known) or ADD_HINTS.get(mapping, "").format(name=name)
        yield Problem(
            where=override.text,
            what=f"{mapping} has no {name!r}",
            allowed=f"it has {', '.join(known) or 'nothing'}",
            hint=hint or f"add it with +{override.text}",
        )
        return
    if not key.is_free:
        yield from _check_plus(override)


def _check_choice(override: Override, *, root: type, groups: Groups) -> Iterator[Problem]:
    where, key, value = override.text, override.key, override.value
    if key not in groups:
        yield Problem(
            where=where,
            what=f"no group {key!r}",
            allowed=f"groups: {', '.join(sorted(groups))}",
            hint=did_you_mean(key, groups),
        )
        return
    target = override.package or key
    if key not in ROOT_GROUPS and not _is_section(root, target):
        yield Problem(
            where=where,
            what=f"a file of {key!r} needs a place, and {target!r} is none",
            hint=f"write {key}@pools.NAME={value}" if key == "pool" else "",
        )
        return
    if override.action == "delete":
        return
    if value is None:
        yield Problem(where=where, what="null chooses no file", hint="leave this argument out")
    elif not isinstance(value, str):
        yield Problem(
            where=where,
            what=f"{key} is chosen by the name of a file",
            allowed=f"files: {', '.join(groups[key])}",
            hint=f"set single values with {key}.KEY=VALUE",
        )
    elif value not in groups[key]:
        yield Problem(
            where=where,
            what=f"no file {value!r} in group {key}",
            allowed=f"files: {', '.join(groups[key])}",
            hint=did_you_mean(value, groups[key]),
        )


def _check_key(override: Override, *, root: type, groups: Groups) -> Iterator[Problem]:
    found = lookup(root, override.key)
    if isinstance(found, UnknownKey):
        yield unknown_key(override.text, found, path=override.key, root=root, groups=groups)
    elif override.action == "delete":
        if not (found.entries and override.key == ".".join(found.entries[-1])):
            yield Problem(
                where=override.text,
                what="only entries of pools, accelerators and engine_args can be removed",
            )
    elif not found.is_leaf:
        yield Problem(
            where=override.text,
            what=f"{override.key} is a section, not a value",
            hint=f"set one of its keys: {override.key}.KEY=VALUE",
        )
    elif not found.entries:
        yield from _check_plus(override)


def _check_plus(override: Override) -> Iterator[Problem]:
    """A single `+` adds, and a declared key is always there."""
    if override.text.startswith("+") and not override.text.startswith("++"):
        yield Problem(
            where=override.text,
            what=f"{override.key} is there already",
            hint=f"leave the + out: {override.text[1:]}",
        )


def unknown_key(
    where: str, unknown: UnknownKey, *, path: str, root: type, groups: Groups | None = None
) -> Problem:
    """What to say about a key that the schema does not declare.

    Args:
        where: as the user wrote it.
        path: the whole dotted key.
        groups: group names to offer for a key without a dot.
    """
    likely = likely_key(root, unknown, path)
    if not likely and "." not in path and (near := close_names(path, groups or {})):
        likely = near[0]
    if unknown.known:
        inside = f"{unknown.parent} has" if unknown.parent else "known are"
        allowed = f"{inside} {', '.join(unknown.known)}"
    else:
        allowed = f"{unknown.parent} is a single value"
    hint = f"did you mean {likely}?" if likely else ""
    return Problem(where=where, what="no such key", allowed=allowed, hint=hint)


def _is_section(root: type, path: str) -> bool:
    found = lookup(root, path)
    return isinstance(found, Key) and not found.is_leaf
