"""Slots that the function templates share: each pairs code fragments with issue sentences."""

from random import Random

from rlmix.tasks import issues
from rlmix.tasks.draft import Slot

ORDER_COMPARISONS = ("<", "<=", ">", ">=")
NUMERIC_OPERATORS = ("+", "-", "*")
ROLE_OF_OPERATOR = {"+": "extra", "-": "cut", "*": "factor"}


def _others(pool: tuple[str, ...], right: str) -> tuple[str, ...]:
    return tuple(text for text in pool if text != right)


def operator(rng: Random, operand: str, pool: tuple[str, ...] = NUMERIC_OPERATORS) -> Slot:
    right = rng.choice(pool)
    return Slot(
        kind="operator",
        right=right,
        bugs=_others(NUMERIC_OPERATORS, right),
        sentences=issues.operator(right, operand),
    )


def comparison(rng: Random, value: str, bound: str) -> Slot:
    right = rng.choice(ORDER_COMPARISONS)
    return Slot(
        kind="comparison",
        right=right,
        bugs=_others(ORDER_COMPARISONS, right),
        sentences=issues.comparison(right, value, bound),
    )


def equality(rng: Random, value: str, bound: str) -> Slot:
    right = rng.choice(("==", "!="))
    return Slot(
        kind="comparison",
        right=right,
        bugs=_others(("==", "!="), right),
        sentences=issues.comparison(right, value, bound),
        alternatives=(">", "<"),
    )


def number(rng: Random, role: str, kind: str = "constant") -> Slot:
    """A literal number; wrong ones differ from it and from each other."""
    right, *wrong = rng.sample(range(2, 20), 4)
    return Slot(
        kind=kind,
        right=str(right),
        bugs=(str(wrong[0]),),
        sentences=issues.constant(role, right),
        alternatives=(str(wrong[1]), str(wrong[2])),
    )


def variable(right: str, others: tuple[str, ...]) -> Slot:
    return Slot(kind="variable", right=right, bugs=others, sentences=issues.wrong_value(right))


def returned(value: str) -> Slot:
    """`return value`, or the bare value as the bug."""
    return Slot(
        kind="missing_return",
        right=f"return {value}",
        bugs=(value,),
        sentences=issues.missing_return(),
        alternatives=(f"print {value}", f"yield {value}"),
    )


def default(rng: Random, parameter: str) -> Slot:
    right, *wrong = rng.sample(range(2, 20), 4)
    return Slot(
        kind="default",
        right=str(right),
        bugs=(str(wrong[0]),),
        sentences=issues.default(parameter, right),
        alternatives=(str(wrong[1]), str(wrong[2])),
    )


def empty_case(rng: Random, values: str) -> Slot:
    """A guard at the end of a return line; the bug is its absence."""
    result = rng.randrange(0, 10)
    wrong = rng.choice([number for number in range(10) if number != result])
    return Slot(
        kind="edge_case",
        right=f" if {values} else {result}",
        bugs=("",),
        sentences=issues.edge_case(values, result),
        alternatives=(f" if {values} else {wrong}", f" or {result}"),
    )


def method(rng: Random) -> Slot:
    pool = ("upper", "lower", "strip", "title")
    right = rng.choice(pool)
    return Slot(
        kind="method", right=right, bugs=_others(pool, right), sentences=issues.method(right)
    )


def boolean(rng: Random) -> Slot:
    right = rng.choice(("and", "or"))
    return Slot(
        kind="boolean",
        right=right,
        bugs=_others(("and", "or"), right),
        sentences=issues.boolean(right),
        alternatives=("!=",),
    )


def start(rng: Random, total: str) -> Slot:
    right = rng.randrange(0, 4)
    wrong = [number for number in range(6) if number != right]
    rng.shuffle(wrong)
    return Slot(
        kind="initial_value",
        right=str(right),
        bugs=(str(wrong[0]),),
        sentences=issues.initial_value(total, right),
        alternatives=(str(wrong[1]), str(wrong[2])),
    )


def accumulate() -> Slot:
    return Slot(
        kind="accumulation",
        right="+=",
        bugs=("=",),
        sentences=issues.accumulation(),
        alternatives=("-=", "=="),
    )


def builtin(rng: Random, values: str) -> Slot:
    pool = ("max", "min", "sum", "len")
    right = rng.choice(pool)
    return Slot(
        kind="builtin",
        right=right,
        bugs=_others(pool, right),
        sentences=issues.builtin(right, values),
    )


def range_end(rng: Random, count: str) -> Slot:
    if rng.random() < 0.5:
        right, bugs, is_too_short = f"{count} + 1", (count, f"{count} - 1"), True
    else:
        right, bugs, is_too_short = count, (f"{count} + 1", f"{count} + 2"), False
    return Slot(
        kind="off_by_one",
        right=right,
        bugs=bugs[:1],
        sentences=issues.off_by_one(is_too_short),
        alternatives=bugs[1:],
    )


def ordered_pair(kind: str, first: str, second: str, join: str) -> Slot:
    """Two names in order, e.g. the arguments of a call or the operands of a subtraction."""
    return Slot(
        kind=kind,
        right=f"{first}{join}{second}",
        bugs=(f"{second}{join}{first}",),
        sentences=issues.wrong_order(first, second),
        alternatives=(f"{first}{join}{first}", f"{second}{join}{second}"),
    )


def key(right: str, others: tuple[str, ...]) -> Slot:
    return Slot(kind="wrong_key", right=right, bugs=others, sentences=issues.wrong_value(right))


def index(rng: Random) -> Slot:
    right, *wrong = rng.sample(range(4), 3)
    return Slot(
        kind="wrong_index",
        right=str(right),
        bugs=(str(wrong[0]),),
        sentences=issues.constant("place", right),
        alternatives=(str(wrong[1]),),
    )


def module_value(rng: Random) -> Slot:
    right, *wrong = rng.sample(range(2, 40), 4)
    return Slot(
        kind="module_constant",
        right=str(right),
        bugs=(str(wrong[0]),),
        sentences=issues.module_constant(right),
        alternatives=(str(wrong[1]), str(wrong[2])),
    )
