"""A source is a fixed, ordered, deterministic set of tasks."""

import pytest

from rlmix.core.errors import ConfigError, DataError
from rlmix.tasks.source import open_source


def test_ids_are_stable_and_the_limit_cuts_them():
    source = open_source("generated", split="eval", seed=3, limit=2)
    assert source.task_ids() == ("generated/eval/3/0", "generated/eval/3/1")
    assert len(open_source("generated", split="eval", seed=3).task_ids()) == 400


def test_public_and_hidden_halves_belong_together_and_do_not_leak():
    source = open_source("generated", split="train", seed=0, limit=20)
    for task_id in source.task_ids():
        public, hidden = source.public(task_id), source.hidden(task_id)
        assert public.task_id == hidden.task_id == task_id
        assert not set(hidden.tests) & set(public.base_files())
        assert hidden.reference_diff.startswith("diff --git a/")


def test_unknown_source_split_limit_and_id_are_refused():
    with pytest.raises(ConfigError, match="generated"):
        open_source("genrated", split="train", seed=0)
    with pytest.raises(ConfigError, match="train, eval"):
        open_source("generated", split="test", seed=0)
    with pytest.raises(ConfigError, match="1 or more"):
        open_source("generated", split="train", seed=0, limit=0)
    with pytest.raises(DataError, match="generated/train/0/0"):
        open_source("generated", split="train", seed=0).public("generated/eval/0/1")
