"""What the issue says about each bug: the behaviour that is wanted, never the place or the edit.

One function per bug kind; it returns paraphrases with the same meaning. The wanted fix can be
told from the sentence together with the code, not from the sentence alone.
"""

from random import Random

OPENINGS = ("Bug in {name}.", "{name} is wrong.", "Please fix {name}.")


def operator(right: str, operand: str) -> tuple[str, ...]:
    verb = {"+": "add", "-": "subtract", "*": "multiply by"}[right]
    return (f"It should {verb} the {operand}.", f"It has to {verb} the {operand}.")


def comparison(right: str, value: str, bound: str) -> tuple[str, ...]:
    where = {
        ">": f"above {bound} only",
        ">=": f"from {bound} up",
        "<": f"below {bound} only",
        "<=": f"up to {bound}",
        "==": f"equal to {bound} only",
        "!=": f"not equal to {bound}",
    }[right]
    return (f"It should take each {value} {where}.", f"The test is for each {value} {where}.")


def off_by_one(is_too_short: bool) -> tuple[str, ...]:
    if is_too_short:
        return ("It misses the last one.", "The last one is left out.")
    return ("It goes one too far.", "It takes one too many.")


def constant(role: str, value: int) -> tuple[str, ...]:
    return (f"The {role} should be {value}.", f"The {role} has to be {value}.")


def wrong_value(right: str) -> tuple[str, ...]:
    return (f"It reads the wrong value and should use {right}.", f"There it should use {right}.")


def missing_return() -> tuple[str, ...]:
    return ("It gives None.", "It gives nothing back.")


def wrong_order(first: str, second: str) -> tuple[str, ...]:
    return (
        f"It has {first} and {second} in the wrong order.",
        f"The order should be {first} and then {second}.",
    )


def default(parameter: str, value: int) -> tuple[str, ...]:
    return (f"The default {parameter} should be {value}.", f"By default {parameter} is {value}.")


def edge_case(values: str, result: int) -> tuple[str, ...]:
    return (
        f"It fails when {values} is empty and should give {result}.",
        f"For an empty {values} it should give {result}.",
    )


def method(right: str) -> tuple[str, ...]:
    wish = {
        "upper": "in upper case",
        "lower": "in lower case",
        "strip": "without spaces around it",
        "title": "in title case",
    }[right]
    return (f"The text should be {wish}.", f"It should give the text {wish}.")


def boolean(right: str) -> tuple[str, ...]:
    if right == "and":
        return ("Both tests must hold.", "It needs both tests to hold.")
    return ("One of the tests is enough.", "It needs just one of the tests to hold.")


def initial_value(total: str, value: int) -> tuple[str, ...]:
    return (f"The {total} should start at {value}.", f"It has to start at {value}.")


def accumulation() -> tuple[str, ...]:
    return ("It keeps just the last value.", "All but the last value are lost.")


def builtin(right: str, values: str) -> tuple[str, ...]:
    what = {"max": "largest", "min": "smallest", "sum": "sum", "len": "number"}[right]
    return (f"It should take the {what} of {values}.", f"It needs the {what} of {values}.")


def module_constant(value: int) -> tuple[str, ...]:
    return (f"The fixed value in it should be {value}.", f"Its fixed value has to be {value}.")


def compose(rng: Random, name: str, sentences: list[str]) -> str:
    """Whole issue text: an opening and one sentence a bug, in random order."""
    order = sentences[:]
    rng.shuffle(order)
    return " ".join([rng.choice(OPENINGS).format(name=name), *order])
