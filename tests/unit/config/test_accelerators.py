"""One accelerator under the names that clouds, drivers and Ray give it."""

import pytest

from rlmix.config.compose import load_config
from rlmix.core.accelerators import canonical
from rlmix.core.errors import ConfigError

KNOWN = ("b300", "b200", "h200", "h100", "a100", "rtx_pro_6000", "ascend_910c")


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("H100!", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("A100-80G", "a100"),
        ("A100-80GB", "a100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("RTX-PRO-6000", "rtx_pro_6000"),
        ("rtx pro 6000", "rtx_pro_6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx_pro_6000"),
        ("B200", "b200"),
        ("NVIDIA B300", "b300"),
        ("Ascend910C", "ascend_910c"),
        ("a100", "a100"),
        ("A100-40G", None),
        ("H20", None),
        ("", None),
    ],
)
def test_a_chip_is_known_by_its_other_names(said: str, meant: str | None) -> None:
    assert canonical(said, KNOWN) == meant


def test_names_that_a_user_defined_win_over_aliases() -> None:
    assert canonical("A100-80GB", ("a100", "a100_80gb")) == "a100_80gb"
    assert canonical("L40S", ("l40s",)) == "l40s"
    assert canonical("H100!", ("b200",)) is None


def test_pools_and_the_trainer_take_aliases_and_the_plan_has_one_name() -> None:
    config = load_config(
        "train",
        ["pools.h100.accelerator=H100!", "pools.a100.accelerator=A100-80G", "trainer.device=B200"],
    ).config
    assert config.pools["h100"].accelerator == "h100"
    assert config.pools["a100"].accelerator == "a100"
    assert config.trainer.device == "b200"
    assert load_config("train", ["trainer.device=cpu"]).config.trainer.device == "cpu"


def test_an_unknown_chip_is_answered_with_the_known_ones_everywhere() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(
            "train",
            [
                "inventory=qwen36_mixed",
                "inventory.nodes.h100.accelerator=H20",
                "pools.h100.accelerator=H20",
                "trainer.device=v100",
            ],
        )
    lines = str(caught.value).splitlines()[1:]
    assert [line.split(":")[0].strip() for line in lines] == [
        "pools.h100.accelerator",
        "trainer.device",
        "inventory.nodes.h100.accelerator",
    ]
    assert all("accelerators has b300, b200, h200, h100, a100" in line for line in lines)
