"""Composes YAML and KEY=VALUE arguments into a typed, checked configuration.

The only file that imports hydra and omegaconf. Invariant: what `load_config` returns has passed
every rule; what it raises names every fault of the request, not only the first.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from rlmix.config.accelerators import quoted_accelerator, use_known_accelerators
from rlmix.config.checks import check_train
from rlmix.config.keys import Key, UnknownKey, described, lookup
from rlmix.config.overrides import (
    Groups,
    Override,
    check_entries,
    check_override,
    unknown_key,
)
from rlmix.config.places import conf_dir
from rlmix.config.problems import Problem, as_error, shown
from rlmix.config.rules import check_value
from rlmix.config.schema.train import TrainConfig
from rlmix.core.errors import ConfigError

ROOTS: Mapping[str, type] = {"train": TrainConfig}
"""Primary config -> its type."""

_COMPOSING = (HydraException, OmegaConfBaseException, AttributeError, ValueError)
"""What composing raises when the request or a YAML file is at fault."""

SHARED_BY_POOLS = (
    "accelerators", "experiment", "inventory", "model", "net", "numerics", "pools:", "pools=",
    "run", "session", "trainer",
)  # fmt: skip
"""Sections without which no pool can be judged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedConfig:
    """A configuration that has passed every check."""

    config: TrainConfig
    choices: dict[str, str | None]
    """Group -> chosen file."""


@dataclass(frozen=True, slots=True)
class _Composed:
    node: DictConfig
    choices: dict[str, str | None]


def load_config(
    name: str = "train",
    overrides: Sequence[str] = (),
    *,
    extra_dir: Path | None = None,
    judge: Callable[[TrainConfig], Iterable[str]] | None = None,
) -> LoadedConfig:
    """Compose the primary config `name`.

    Args:
        overrides: KEY=VALUE arguments in Hydra's grammar.
        extra_dir: a folder with the user's own YAML, searched after the shipped one.
        judge: what else is wrong with a configuration, asked about the sound part of a request
            that is refused, so that its lines come in the same answer.
    Raises:
        ConfigError: lists every problem of the request.
    """
    root = ROOTS[name]
    if extra_dir is not None and not extra_dir.is_dir():
        raise ConfigError(f"--conf-dir {extra_dir}: no such folder; give one that holds YAML")
    extra = [extra_dir.resolve()] if extra_dir else []
    groups = _groups([conf_dir(), *extra])
    problems: list[Problem] = []
    sound: list[Override] = []
    for text in map(quoted_accelerator, overrides):
        parsed = _parse(text)
        if isinstance(parsed, Problem):
            problems.append(parsed)
        elif faults := list(check_override(parsed, root=root, groups=groups)):
            problems += faults
        else:
            sound.append(parsed)
    ConfigStore.instance().store(group="schema", name=name, node=root)
    composer = _Composer(name=name, root=root, groups=groups, extra=extra)
    composed, faults = composer.compose_sound(sound)
    problems += faults
    if composed is not None:
        problems += _check_values(composed.node, root=root)
        missing = OmegaConf.missing_keys(composed.node)
        problems += [_missing(key) for key in sorted(missing)]
        if not missing:
            config = OmegaConf.to_object(composed.node)
            assert isinstance(config, TrainConfig)
            use_known_accelerators(config)
            problems += check_train(config)
            if not problems:
                return LoadedConfig(config=config, choices=composed.choices)
            if judge is not None and (part := _sound_part(config, problems)):
                lines = (line.partition(": ") for line in judge(part))
                problems += [Problem(where=where, what=what) for where, _, what in lines]
    raise as_error(problems)


def _sound_part(config: TrainConfig, problems: Sequence[Problem]) -> TrainConfig | None:
    """The configuration without the pools that a problem is about; None when a section that all
    pools depend on has one, or no pool is left."""
    wheres = [re.sub(r"^[+~]+|^pool@", "", problem.where) for problem in problems]
    if any(where.startswith(SHARED_BY_POOLS) for where in wheres):
        return None
    broken = {where.split(".")[1].split("=")[0] for where in wheres if where.startswith("pools.")}
    pools = {name: pool for name, pool in config.pools.items() if name not in broken}
    return replace(config, pools=pools) if pools else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Composer:
    name: str
    root: type
    groups: Groups
    extra: Sequence[Path]

    def compose(self, overrides: Sequence[Override]) -> _Composed:
        texts = [override.text for override in overrides]
        texts += [f"hydra.searchpath=['file://{folder}']" for folder in self.extra]
        with initialize_config_dir(
            version_base="1.3", config_dir=str(conf_dir()), job_name="rlmix"
        ):
            node = compose(config_name=self.name, overrides=texts, return_hydra_config=True)
        choices = {
            group: choice
            for group, choice in node.hydra.runtime.choices.items()
            if not group.startswith("hydra/")
        }
        with open_dict(node):
            del node["hydra"]
        OmegaConf.resolve(node)
        return _Composed(node, choices)

    def compose_sound(
        self, overrides: Sequence[Override]
    ) -> tuple[_Composed | None, list[Problem]]:
        """Compose; when that fails, find out which arguments are at fault and apply the others,
        so that problems in what they set are told as well."""
        try:
            return self.compose(overrides), []
        except _COMPOSING as error:
            whole = _fault(f"{self.name}.yaml", error, root=self.root)
        problems: list[Problem] = []
        choices: list[Override] = []
        for override in overrides:
            if override.chooses_file(self.groups):
                try:
                    self.compose([*choices, override])
                    choices.append(override)
                except _COMPOSING as error:
                    problems.append(_fault(override.text, error, root=self.root))
        try:
            composed = self.compose(choices)
        except _COMPOSING:
            return None, problems or [whole]
        entries = _entries(composed.node, self.root)
        for override in overrides:
            if override.chooses_file(self.groups):
                continue
            faults = list(check_entries(override, root=self.root, entries=entries))
            problems += faults or _assign(composed.node, override, root=self.root)
        return composed, problems or [whole]


def _groups(folders: Sequence[Path]) -> dict[str, list[str]]:
    """Group -> its files, over all folders; one in a folder of a group is `FOLDER/NAME`."""
    groups: dict[str, set[str]] = {}
    for folder in folders:
        for path in folder.glob("*/**/*.yaml"):
            group, *name = path.relative_to(folder).with_suffix("").parts
            groups.setdefault(group, set()).add("/".join(name))
    return {group: sorted(files) for group, files in groups.items()}


def _parse(text: str) -> Override | Problem:
    if text.lstrip("+~").startswith(("hydra.", "hydra/", "hydra@")):
        return Problem(
            where=text,
            what="rlmix composes without a Hydra application, so this has no effect",
            hint="leave it out; --conf-dir adds a folder of YAML",
        )
    try:
        parsed = OverridesParser.create().parse_override(text)
    except HydraException:
        is_pair = "=" in text or text.startswith("~")
        return Problem(
            where=text,
            what="cannot be read",
            hint="quote the value once more: KEY='\"VALUE\"'" if is_pair else "write KEY=VALUE",
        )
    if parsed.is_sweep_override():
        return Problem(
            where=text,
            what="several values for one key; rlmix starts one run at a time",
            hint="loop over the values in your shell",
        )
    actions = {OverrideType.CHANGE: "set", OverrideType.DEL: "delete"}
    value = parsed.value()
    return Override(
        text=text,
        key=parsed.key_or_group,
        package=parsed.package,
        action=actions.get(parsed.type, "add") if parsed.type else "set",
        value=value.text if isinstance(value, QuotedString) else value,
    )


def _entries(node: DictConfig, root: type) -> dict[str, list[str]]:
    """Path of each mapping -> names of its entries."""
    entries: dict[str, list[str]] = {}

    def walk(value: Any, path: str) -> None:
        key = lookup(root, path)
        if not isinstance(value, dict) or not isinstance(key, Key):
            return
        if key.is_mapping:
            entries[path] = list(value)
        for name, inner in value.items():
            walk(inner, f"{path}.{name}")

    for name, value in OmegaConf.to_container(node, throw_on_missing=False).items():  # type: ignore[union-attr]
        walk(value, str(name))
    return entries


def _assign(node: DictConfig, override: Override, *, root: type) -> list[Problem]:
    """Set one value in place; its type, or what it refers to, is what can still be wrong."""
    above, _, name = override.key.rpartition(".")
    if override.action == "delete":
        with open_dict(node):
            del OmegaConf.select(node, above)[name]
        return []
    before = OmegaConf.select(node, override.key)
    try:
        is_new = override.action == "add"
        OmegaConf.update(node, override.key, override.value, force_add=is_new)
        OmegaConf.select(node, override.key)
        return []
    except InterpolationResolutionError as error:
        OmegaConf.update(node, override.key, before)
        return [Problem(where=override.text, what=str(error).splitlines()[0])]
    except _COMPOSING as error:
        key = lookup(root, override.key)
        if not isinstance(key, Key):
            return [_fault(override.text, error, root=root)]
        expected = f"use {described(key.kind)}"
        return [Problem(where=override.key, what=f"got {shown(override.value)}", allowed=expected)]


def _check_values(node: DictConfig, *, root: type) -> Iterator[Problem]:
    """Apply the rule of every single value that is there."""

    def walk(value: Any, path: str) -> Iterator[Problem]:
        key = lookup(root, path)
        if isinstance(value, dict):
            for name, inner in value.items():
                yield from walk(inner, f"{path}.{name}")
        elif value != "???" and isinstance(key, Key):
            yield from check_value(key.pattern, path, value)

    for name, value in OmegaConf.to_container(node, throw_on_missing=False).items():  # type: ignore[union-attr]
        yield from walk(value, str(name))


def _missing(key: str) -> Problem:
    return Problem(where=key, what="no value", hint=f"add {key}=VALUE, or set it in YAML")


def _fault(where: str, error: BaseException, *, root: type) -> Problem:
    """A composing error, told by the key that it is about when there is one."""
    for link in _chain(error):
        path = getattr(link, "full_key", None)
        if not isinstance(link, OmegaConfBaseException) or not path:
            continue
        key = lookup(root, path)
        if isinstance(key, UnknownKey):
            return unknown_key(f"{where}: {path}", key, path=path, root=root)
        said = str(link).strip().splitlines()[0]
        return Problem(where=f"{where}: {path}", what=said, allowed=f"use {described(key.kind)}")
    lines = dict.fromkeys(str(link).strip().splitlines()[0] for link in _chain(error) if str(link))
    return Problem(where=where, what=" because ".join(lines) or type(error).__name__)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Hydra hides the reason behind its own error, with and without `raise ... from`."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__
