"""A function under construction: right lines, the sites in them, and how to call it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from rlmix.tasks.kinds import Site

Args = tuple[object, ...]


@dataclass(kw_only=True, slots=True)
class Slot:
    """A fragment of a line that is also a site."""

    kind: str
    right: str
    bugs: tuple[str, ...]
    sentences: tuple[str, ...]
    alternatives: tuple[str, ...] = ()


@dataclass(kw_only=True, slots=True)
class Draft:
    """Lines are collected in order; a `Slot` among the parts of a line becomes a `Site`."""

    name: str
    lines: list[str] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    draw_args: Callable[[Random], Args] = lambda rng: ()
    """Draws one tuple of call arguments, near the edges of the conditions."""
    support: list[str] = field(default_factory=list)
    """Lines of functions that this one calls; they live in the same file."""
    constants: dict[str, int] = field(default_factory=dict)
    """Module constants that this function reads."""

    def add(self, *parts: str | Slot) -> None:
        """Append one line made of plain text and slots."""
        text = ""
        for part in parts:
            if isinstance(part, str):
                text += part
                continue
            site = Site(
                kind=part.kind,
                line=len(self.lines),
                start=len(text),
                right=part.right,
                bugs=part.bugs,
                sentences=part.sentences,
                alternatives=part.alternatives,
            )
            self.sites.append(site)
            text += part.right
        self.lines.append(text)

    def add_constant_site(self, name: str, value: int, slot: Slot) -> None:
        """The value of module constant `name` is itself a site (line -1: not in the function)."""
        self.constants[name] = value
        self.sites.append(
            Site(
                kind=slot.kind,
                line=-1,
                start=len(name) + 3,
                right=slot.right,
                bugs=slot.bugs,
                sentences=slot.sentences,
                alternatives=slot.alternatives,
                constant=name,
            )
        )
