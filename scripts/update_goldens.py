"""Writes the golden plans that `tests/unit/plan/test_golden_plan.py` compares with.

Run it after a change that is meant to alter a plan, and read the difference before committing:

    .venv/bin/python scripts/update_goldens.py
"""

import json
from pathlib import Path

from rlmix.cli.train import compared, facts_of
from rlmix.config.compose import load_config
from rlmix.config.places import conf_dir
from rlmix.plan.build import build_plan

GOLDENS = Path(__file__).parents[1] / "tests" / "unit" / "plan" / "goldens"


def golden_texts() -> dict[str, str]:
    """File name -> text, for the default run and every experiment."""
    experiments = sorted(path.stem for path in (conf_dir() / "experiment").glob("*.yaml"))
    requests = {"default": []} | {name: [f"experiment={name}"] for name in experiments}
    return {f"{name}.json": plan_text(overrides) for name, overrides in requests.items()}


def plan_text(overrides: list[str]) -> str:
    """A plan as sorted JSON with the interpreter's path taken out."""
    config = load_config("train", overrides).config
    plan = compared(build_plan(config, facts=facts_of(config), python="python"), config, None)
    return json.dumps(plan.to_dict(), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    GOLDENS.mkdir(exist_ok=True)
    for name, text in golden_texts().items():
        (GOLDENS / name).write_text(text)
        print(GOLDENS / name)
