"""`rlmix scale pools --tune`: what is refused, and the profile that can be chosen."""

from pathlib import Path
from typing import Any

import pytest

from rlmix.cli.scale import scale_pools
from rlmix.cli.scale_tune import chosen_knobs, settings_text, write_profile
from rlmix.config.compose import load_config
from rlmix.core.errors import ConfigError

DOCUMENT: dict[str, Any] = {
    "chosen": {"max_running": 24, "schedule-policy": "lpm"},
    "gain_frac": 0.12,
    "noise_frac": 0.03,
    "numerics_key": "h100/fp8/real",
    "load": {"sessions": 16},
}


def test_the_written_profile_is_chosen_by_name_and_changes_only_what_was_tuned(
    tmp_path: Path,
) -> None:
    path = write_profile(tmp_path, "h100_fp8", DOCUMENT, written_s=1_790_000_000.0)
    assert path == tmp_path / "tuned" / "h100_fp8.yaml"
    assert "+12.0 % tokens per USD" in path.read_text()
    assert not list(path.parent.glob("*.tmp*"))
    plain = load_config("train", ["experiment=qwen36_mixed"]).config
    tuned = load_config(
        "train", ["experiment=qwen36_mixed", "+tuned@pools.h100_fp8=h100_fp8"], extra_dir=tmp_path
    ).config
    assert tuned.pools["h100_fp8"].max_running == 24
    assert tuned.pools["h100_fp8"].engine_args == {"schedule-policy": "lpm"}
    assert tuned.pools["b200"] == plain.pools["b200"]
    assert tuned.pools["h100_fp8"].weights == plain.pools["h100_fp8"].weights


def test_knobs_that_the_pool_does_not_have_are_refused() -> None:
    known = {"max_running": [8], "schedule-policy": ["lpm"]}
    assert chosen_knobs(known, []) == known
    assert chosen_knobs(known, ["schedule-policy"]) == {"schedule-policy": ["lpm"]}
    with pytest.raises(ConfigError, match=r"--knob attention: this pool has max_running, sched"):
        chosen_knobs(known, ["attention"])


def test_settings_read_as_a_person_writes_them() -> None:
    assert settings_text({"max_running": 8, "disable-radix-cache": True}) == (
        "max_running=8, disable-radix-cache=True"
    )
    assert settings_text({}) == "as it is"


def test_the_command_has_its_options() -> None:
    import inspect

    names = inspect.signature(scale_pools).parameters
    assert {"tune", "knob", "load", "sessions", "limit"} <= set(names)
