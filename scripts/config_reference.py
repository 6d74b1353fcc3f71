"""Writes the table of keys in `docs/config.md` from the YAML and the schema.

    .venv/bin/python scripts/config_reference.py

A key's text is the comment above it in `conf/`, its value that of the default run; the test
`tests/unit/config/test_reference.py` holds the page up to date.
"""

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlmix.config.compose import load_config
from rlmix.config.keys import leaves
from rlmix.config.places import conf_dir
from rlmix.config.schema.train import TrainConfig

PAGE = Path(__file__).parents[1] / "docs" / "config.md"
BEGIN, END = "<!-- keys begin -->\n", "<!-- keys end -->\n"
SAMPLE_ENTRY = {"pools": "h100", "accelerators": "h100"}
"""Mapping -> the entry whose values stand for all."""


def comments(path: Path) -> dict[str, str]:
    """Key (its last name) -> comment above it, from one YAML file."""
    found: dict[str, str] = {}
    block: list[str] = []
    for line in path.read_text().splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            block.append(stripped.lstrip("# "))
            continue
        match = re.match(r"(\w+):", stripped)
        if match and block:
            found.setdefault(match.group(1), " ".join(block))
        block = []
    return found


def described() -> dict[str, str]:
    """Key pattern -> comment."""
    sources = {
        "model.": "model/tiny.yaml",
        "tasks.": "tasks/generated.yaml",
        "sandbox.": "sandbox/auto.yaml",
        "session.": "session/short.yaml",
        "algo.": "algo/mis_sc.yaml",
        "trainer.": "trainer/tiny.yaml",
        "weights.": "weights/folder.yaml",
        "pools.*.": "pool/embedded.yaml",
        "accelerators.*.": "accelerators/public.yaml",
        "inventory.": "inventory/qwen36_mixed.yaml",
        "router.": "router/shortest_delay.yaml",
        "scaling.": "scaling/default.yaml",
        "launch.": "launch/local.yaml",
        "sglang.": "sglang/default.yaml",
        "alarms.": "alarms/default.yaml",
        "observe.": "observe/default.yaml",
        "eval.": "eval/none.yaml",
        "diff.": "diff/default.yaml",
    }
    texts: dict[str, str] = {}
    root = comments(conf_dir() / "train.yaml")
    for key in leaves(TrainConfig):
        section = next((s for s in sources if key.pattern.startswith(s)), None)
        words = comments(conf_dir() / sources[section]) if section else root
        texts[key.pattern] = words[key.pattern.rsplit(".", 1)[-1]]
    return texts


def table() -> str:
    """The keys as Markdown, one section after the other."""
    values = asdict(load_config().config)
    lines = ["| key | default | meaning |", "| --- | --- | --- |"]
    for pattern, text in described().items():
        value = value_of(values, pattern)
        shown = {None: "null", True: "true", False: "false"}.get(value) if is_word(value) else value
        key = pattern.replace("*", "NAME")
        lines.append(f"| `{key}` | `{shown}` | {text.replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def value_of(values: Any, pattern: str) -> Any:
    """Value at a key pattern; a dash inside a mapping that is empty by default."""
    above = ""
    for name in pattern.split("."):
        if name == "*" and not values:
            return "-"
        values = values[SAMPLE_ENTRY[above] if name == "*" else name]
        above = name
    return values


def is_word(value: Any) -> bool:
    """True for what YAML writes as a word: null, true, false."""
    return value is None or isinstance(value, bool)


def page(text: str) -> str:
    """`docs/config.md` with the table as it should be."""
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}{table()}{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
