"""What a plan shows and a run refuses, each with one sentence."""

from rlmix.config.compose import load_config
from rlmix.config.not_yet import cannot_run_yet


def refused(*overrides: str) -> list[str]:
    return [str(problem) for problem in cannot_run_yet(load_config("train", overrides).config)]


def test_the_default_run_and_the_small_one_can_start() -> None:
    assert refused() == []
    assert refused("experiment=tiny") == []
    assert refused("experiment=exact") == []


def test_a_set_that_is_not_prepared_is_refused_with_the_commands_that_prepare_it() -> None:
    (line,) = refused("experiment=qwen36_b200")
    assert line.startswith("tasks.path=null: ")
    assert "make one with `rlmix tasks prepare mimo" in line
