"""The reward that the test script of a Harbor task leaves: `reward.txt` or `reward.json`."""

import json
import math

NAMES = ("reward.txt", "reward.json")
"""In `/logs/verifier`, in the order in which they are looked for."""
REWARD = "reward"


def parse_reward(name: str, content: bytes) -> float | None:
    """The number in a reward file; None when it holds none.

    Args:
        name: of NAMES. A text is one number. JSON is a number, or an object with a number under
            `reward`; an object without that name counts by its smallest number, so that every
            part of a task has to be solved.
    """
    try:
        if name == "reward.txt":
            value: object = float(content.decode().strip())
        else:
            value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict):
        value = value[REWARD] if REWARD in value else _least(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _least(values: dict[str, object]) -> object:
    numbers = [v for v in values.values() if isinstance(v, int | float) and not isinstance(v, bool)]
    return min(numbers) if numbers and len(numbers) == len(values) else None
