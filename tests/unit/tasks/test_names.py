"""Train and eval names are disjoint, and every piece occurs on both sides."""

from random import Random

from rlmix.tasks.names import (
    CONSTANT_HEADS,
    FILE_ENDS,
    NOUNS,
    VERBS,
    NameSource,
    pair_split,
)


def test_every_piece_occurs_in_both_splits_so_that_eval_needs_no_unknown_piece():
    for heads, tails in ((VERBS, NOUNS), (NOUNS, FILE_ENDS), (CONSTANT_HEADS, NOUNS)):
        for split in ("train", "eval"):
            pairs = [
                (first, second)
                for first in range(len(heads))
                for second in range(len(tails))
                if pair_split(first, second) == split
            ]
            assert {second for _, second in pairs} >= set(range(len(tails))) or split == "eval"
            assert {first for first, _ in pairs} == set(range(len(heads)))


def test_names_drawn_for_the_two_splits_never_meet():
    drawn = {}
    for split in ("train", "eval"):
        names = [NameSource(Random(f"{split}{seed}"), split) for seed in range(300)]
        drawn[split] = {
            name
            for source in names
            for name in (source.function(), source.file(), source.constant())
        }
    assert len(drawn["train"]) > 200
    assert drawn["train"].isdisjoint(drawn["eval"])


def test_a_task_never_gets_the_same_name_twice():
    source = NameSource(Random(3), "eval")
    names = [source.function() for _ in range(100)]
    assert len(set(names)) == 100
