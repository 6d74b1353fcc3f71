"""Function templates: each writes a short right function with the places a bug can sit in.

Every function has at most six lines, so that one look with five lines of context shows it whole.
"""

from collections.abc import Callable
from random import Random

from rlmix.tasks import slots
from rlmix.tasks.draft import Args, Draft
from rlmix.tasks.names import NameSource


def _small(rng: Random) -> int:
    return rng.randrange(0, 24)


def _numbers(*edges: int) -> Callable[[Random], list[int]]:
    """A list drawer whose lists hold the given edge values now and then."""

    def draw(rng: Random) -> list[int]:
        values = [_small(rng) for _ in range(rng.randrange(2, 5))]
        for edge in edges:
            values.insert(rng.randrange(len(values) + 1), edge)
        return values

    return draw


def sum_over_bound(rng: Random, names: NameSource) -> Draft:
    values, bound, value, total = names.words(4)
    draft = Draft(name=names.function())
    draft.add(f"def {draft.name}({values}, {bound}):")
    draft.add(f"    {total} = ", slots.start(rng, total))
    draft.add(f"    for {value} in {values}:")
    draft.add(f"        if {value} ", slots.comparison(rng, value, bound), f" {bound}:")
    draft.add(
        f"            {total} ", slots.accumulate(), " ", slots.variable(value, (bound, total))
    )
    draft.add("    ", slots.returned(total))

    def args(rng: Random) -> Args:
        edge = _small(rng)
        return (_numbers(edge)(rng), edge)

    draft.draw_args = args
    return draft


def three_terms(rng: Random, names: NameSource) -> Draft:
    first, second, third, total = names.words(4)
    draft = Draft(name=names.function())
    draft.add(f"def {draft.name}({first}, {second}, {third}):")
    one, two = slots.operator(rng, second), slots.operator(rng, third)
    draft.add(f"    {total} = {first} ", one, f" {second}")
    draft.add(f"    {total} = {total} ", two, " ", slots.variable(third, (first, second)))
    draft.add("    ", slots.returned(total))
    draft.draw_args = lambda rng: (_small(rng), _small(rng), _small(rng))
    return draft


def limit_with_default(rng: Random, names: NameSource) -> Draft:
    value, bound = names.words(2)
    draft = Draft(name=names.function())
    default = slots.default(rng, bound)
    draft.add(f"def {draft.name}({value}, {bound}=", default, "):")
    draft.add(f"    if {value} ", slots.comparison(rng, value, bound), f" {bound}:")
    draft.add("        return ", slots.variable(bound, (value,)))
    operator = rng.choice("+-*")
    role = slots.ROLE_OF_OPERATOR[operator]
    draft.add(f"    return {value} {operator} ", slots.number(rng, role))
    base = int(default.right)

    def args(rng: Random) -> Args:
        if rng.random() < 0.5:
            return (rng.choice((base - 1, base, base + 1, _small(rng))),)
        edge = _small(rng)
        return (rng.choice((edge - 1, edge, edge + 1, _small(rng))), edge)

    draft.draw_args = args
    return draft


def count_steps(rng: Random, names: NameSource) -> Draft:
    count, total, step = names.words(3)
    draft = Draft(name=names.function())
    draft.add(f"def {draft.name}({count}):")
    draft.add(f"    {total} = ", slots.start(rng, total))
    draft.add(f"    for {step} in range(", slots.range_end(rng, count), "):")
    operator = rng.choice("+*")
    number = slots.number(rng, slots.ROLE_OF_OPERATOR[operator])
    draft.add(f"        {total} ", slots.accumulate(), f" {step} {operator} ", number)
    draft.add("    ", slots.returned(total))
    draft.draw_args = lambda rng: (rng.randrange(1, 7),)
    return draft


def clean_text(rng: Random, names: NameSource) -> Draft:
    text, tail, head, extra = names.words(4)
    draft = Draft(name=names.function())
    draft.add(f"def {draft.name}({text}, {tail}, {head}):")
    draft.add(f"    {extra} = {text}.", slots.method(rng), "()")
    draft.add(f"    {extra} = {extra} + ", slots.variable(tail, (head, text)))
    draft.add("    ", slots.returned(extra))

    def args(rng: Random) -> Args:
        words = [" aB cD ", "x yZ", "Q r ", " mN"]
        rng.shuffle(words)
        return (words[0], words[1], words[2])

    draft.draw_args = args
    return draft


def two_tests(rng: Random, names: NameSource) -> Draft:
    first, second, gain = names.words(3)
    draft = Draft(name=names.function())
    low, high = rng.sample(range(2, 20), 2)
    draft.add(f"def {draft.name}({first}, {second}):")
    draft.add(f"    {gain} = {first} ", slots.operator(rng, second), f" {second}")
    draft.add(f"    if {first} > {low} ", slots.boolean(rng), f" {second} > {high}:")
    draft.add("        return ", slots.variable(gain, (first, second)))
    draft.add(f"    return {gain} - ", slots.number(rng, "cut"))
    draft.draw_args = lambda rng: (
        rng.choice((low - 1, low + 1, _small(rng))),
        rng.choice((high - 1, high + 1, _small(rng))),
    )
    return draft


def call_with_pair(rng: Random, names: NameSource) -> Draft:
    first, second, left, right = names.words(4)
    draft = Draft(name=names.function())
    inner = names.function()
    factor = rng.randrange(2, 6)
    draft.support = [
        f"def {inner}({left}, {right}):",
        f"    return {left} - {right} * {factor}",
    ]
    draft.add(f"def {draft.name}({first}, {second}):")
    pair = slots.ordered_pair("swapped_arguments", first, second, ", ")
    draft.add(f"    {left} = {inner}(", pair, ")")
    operator = slots.operator(rng, second)
    draft.add(f"    {left} = {left} ", operator, f" {second}")
    draft.add("    ", slots.returned(left))
    draft.draw_args = lambda rng: (_small(rng), _small(rng))
    return draft


def pick_of_list(rng: Random, names: NameSource) -> Draft:
    values, best, extra = names.words(3)
    draft = Draft(name=names.function())
    draft.add(f"def {draft.name}({values}, {extra}):")
    draft.add(f"    {best} = ", slots.builtin(rng, values), f"({values})", _guard(rng, values))
    draft.add(f"    {best} = {best} ", slots.operator(rng, extra), f" {extra}")
    draft.add("    ", slots.returned(best))

    def args(rng: Random) -> Args:
        return ([] if rng.random() < 0.3 else _numbers()(rng), _small(rng))

    draft.draw_args = args
    return draft


def _guard(rng: Random, values: str) -> slots.Slot:
    return slots.empty_case(rng, values)


def skip_equal(rng: Random, names: NameSource) -> Draft:
    values, skipped, value, total = names.words(4)
    draft = Draft(name=names.function())
    draft.add(f"def {draft.name}({values}, {skipped}):")
    draft.add(f"    {total} = ", slots.start(rng, total))
    draft.add(f"    for {value} in {values}:")
    draft.add(f"        if {value} ", slots.equality(rng, value, skipped), f" {skipped}:")
    draft.add(f"            {total} ", slots.accumulate(), " ", slots.number(rng, "extra"))
    draft.add("    ", slots.returned(total))

    def args(rng: Random) -> Args:
        edge = _small(rng)
        return (_numbers(edge, edge + 1, edge - 1)(rng), edge)

    draft.draw_args = args
    return draft


def fixed_value(rng: Random, names: NameSource) -> Draft:
    value, extra, total = names.words(3)
    draft = Draft(name=names.function())
    constant = names.constant()
    module_value = slots.module_value(rng)
    draft.add_constant_site(constant, int(module_value.right), module_value)
    draft.add(f"def {draft.name}({value}, {extra}):")
    draft.add(f"    {total} = {value} {rng.choice('+-*')} {constant}")
    draft.add(f"    {total} = {total} ", slots.operator(rng, extra), f" {extra}")
    draft.add("    ", slots.returned(total))
    draft.draw_args = lambda rng: (_small(rng) + 1, _small(rng))
    return draft


def read_fields(rng: Random, names: NameSource) -> Draft:
    row, first, second, third, total = names.words(5)
    draft = Draft(name=names.function())
    draft.add(f"def {draft.name}({row}):")
    draft.add(f'    {total} = {row}["', slots.key(first, (third,)), '"]')
    operator = slots.operator(rng, second)
    draft.add(f"    {total} = {total} ", operator, f' {row}["{second}"]')
    draft.add("    ", slots.returned(total))
    draft.draw_args = lambda rng: ({name: _small(rng) for name in (first, second, third)},)
    return draft


def read_places(rng: Random, names: NameSource) -> Draft:
    values, extra, total = names.words(3)
    draft = Draft(name=names.function())
    draft.add(f"def {draft.name}({values}, {extra}):")
    draft.add(f"    {total} = {values}[", slots.index(rng), "]")
    draft.add(f"    {total} = {total} ", slots.operator(rng, extra), f" {extra}")
    draft.add("    ", slots.returned(total))
    draft.draw_args = lambda rng: (rng.sample(range(24), 4), _small(rng))
    return draft


def gap_of_two(rng: Random, names: NameSource) -> Draft:
    first, second, total = names.words(3)
    draft = Draft(name=names.function())
    draft.add(f"def {draft.name}({first}, {second}):")
    draft.add(f"    {total} = ", slots.ordered_pair("swapped_operands", first, second, " - "))
    number = slots.number(rng, "factor")
    draft.add(f"    {total} = {total} * ", number)
    draft.add("    ", slots.returned(total))
    draft.draw_args = lambda rng: (_small(rng), _small(rng))
    return draft


TEMPLATES: tuple[Callable[[Random, NameSource], Draft], ...] = (
    sum_over_bound,
    three_terms,
    limit_with_default,
    count_steps,
    clean_text,
    two_tests,
    call_with_pair,
    pick_of_list,
    skip_equal,
    fixed_value,
    read_fields,
    read_places,
    gap_of_two,
)
TEMPLATE_WEIGHTS = (2, 1, 3, 3, 3, 3, 2, 5, 2, 0.5, 0.5, 0.5, 0.5)
"""How often each is drawn as the target, so that no bug kind is rare."""
