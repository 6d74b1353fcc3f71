"""Which keys exist, read from the schema's types.

Invariant: a key is known exactly when the schema declares it. Hydra's `+` adds entries to the
mappings (`pools`, `accelerators`, `engine_args`) and nothing else.
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlmix.config.problems import close_names


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """A declared key."""

    pattern: str
    """Dotted path with `*` in place of the names of mapping entries."""
    kind: Any
    """Type of the value; a dataclass for a section, a mapping type for a mapping."""
    entries: tuple[tuple[str, str], ...] = ()
    """(path of the mapping, name of the entry in it), outermost first."""

    @property
    def is_mapping(self) -> bool:
        return _entry_type(self.kind) is not None

    @property
    def is_free(self) -> bool:
        """True inside a mapping that takes any key."""
        return self.kind is Any

    @property
    def is_leaf(self) -> bool:
        return not dataclasses.is_dataclass(self.kind) and not self.is_mapping


@dataclass(frozen=True, kw_only=True, slots=True)
class UnknownKey:
    """Where a path leaves the schema."""

    parent: str
    """The last known section, empty for the root."""
    name: str
    known: tuple[str, ...]
    """What the parent declares; empty when the parent is a single value."""


def lookup(root: type, path: str) -> Key | UnknownKey:
    """Follow a dotted path through the schema."""
    kind: Any = root
    pattern: list[str] = []
    walked: list[str] = []
    entries: list[tuple[str, str]] = []
    for name in path.split("."):
        entry_type = _entry_type(kind)
        if entry_type is not None:
            entries.append((".".join(walked), name))
            pattern.append("*")
            kind = entry_type
        elif kind is Any:
            pattern.append(name)
        elif name in (fields := _fields(kind)):
            pattern.append(name)
            kind = fields[name]
        else:
            return UnknownKey(parent=".".join(walked), name=name, known=tuple(fields))
        walked.append(name)
    return Key(pattern=".".join(pattern), kind=kind, entries=tuple(entries))


def leaves(root: type, prefix: str = "") -> Iterator[Key]:
    """Every single value that the schema declares, mapping entries as `*`."""
    for name, kind in _fields(root).items():
        pattern = f"{prefix}{name}"
        entry_type = _entry_type(kind)
        if dataclasses.is_dataclass(kind):
            yield from leaves(kind, f"{pattern}.")  # type: ignore[arg-type]
        elif entry_type is not None and dataclasses.is_dataclass(entry_type):
            yield from leaves(entry_type, f"{pattern}.*.")  # type: ignore[arg-type]
        else:
            yield Key(pattern=pattern, kind=kind)


def likely_key(root: type, unknown: UnknownKey, path: str) -> str:
    """The key that was probably meant, in full; empty when nothing is close.

    Looks among the siblings first (where one made of the initials comes before one that is spelt
    alike: `lr` for `learning_rate`), then for the same last name in another section, then for a
    similar path anywhere.
    """
    above = f"{unknown.parent}." if unknown.parent else ""
    initials = "".join(word[:1] for word in unknown.name.split("_"))
    is_abbreviated = len(initials) > 1 and initials in unknown.known
    siblings = [initials] if is_abbreviated else close_names(unknown.name, unknown.known)
    if siblings:
        # What followed the misspelt section is kept when it exists under the right one.
        rest = path.removeprefix(f"{above}{unknown.name}")
        whole = f"{above}{siblings[0]}{rest}"
        return whole if isinstance(lookup(root, whole), Key) else f"{above}{siblings[0]}"
    patterns = [key.pattern for key in leaves(root)]
    last = path.rsplit(".", 1)[-1]
    same_name = [p for p in patterns if p.rsplit(".", 1)[-1] == last]
    found = same_name or close_names(path, patterns)
    return found[0].replace("*", "NAME") if found else ""


def described(kind: Any) -> str:
    """What a value of this type looks like, for a message."""
    options = [option for option in _options(kind) if option is not type(None)]
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    text = " or ".join(names.get(option, "a mapping") for option in options)
    return f"{text}, or null" if len(options) < len(_options(kind)) else text


@functools.cache
def _fields(kind: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(kind):
        return {}
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _entry_type(kind: Any) -> Any | None:
    """T of `dict[str, T]`; None for other types."""
    return typing.get_args(kind)[1] if typing.get_origin(kind) is dict else None


def _options(kind: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return typing.get_args(kind) if is_union else (kind,)
