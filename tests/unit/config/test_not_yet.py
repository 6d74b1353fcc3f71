"""What a plan shows and a run refuses, each with one sentence."""

from rlmix.config.compose import load_config
from rlmix.config.not_yet import cannot_run_yet


def refused(*overrides: str) -> list[str]:
    return [str(problem) for problem in cannot_run_yet(load_config("train", overrides).config)]


def test_the_default_run_and_the_small_one_can_start() -> None:
    assert refused() == []
    assert refused("experiment=tiny") == []
    assert refused("experiment=exact") == []


def test_everything_that_only_a_plan_serves_is_told_at_once() -> None:
    lines = refused("experiment=qwen36_b200")
    assert [line.split(":")[0] for line in lines] == [
        "tasks.path=null",
        "trainer.device=b200",
    ]
    assert "make one with `rlmix tasks prepare mimo" in lines[0]
    assert all("arrive" in line and "this version" in line for line in lines[1:])
