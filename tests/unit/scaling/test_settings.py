"""Keys that a running run takes."""

import pytest

from rlmix.config.compose import load_config
from rlmix.core.errors import ConfigError
from rlmix.scaling.settings import check_live, get_setting, live_keys, put_settings, still_wanted


@pytest.fixture
def config():
    return load_config("train", ["experiment=tiny"]).config


def test_settings_are_put_in_and_what_they_were_comes_back(config):
    given = {"loop.sessions_per_step": 16, "scaling.auto": True, "pools.a100.max_replicas": 3}
    before = put_settings(config, given)
    assert before == {
        "loop.sessions_per_step": 8, "scaling.auto": False, "pools.a100.max_replicas": None,
    }  # fmt: skip
    assert {key: get_setting(config, key) for key in given} == given


def test_every_named_key_is_one_of_the_configuration(config):
    for key in live_keys():
        get_setting(config, key.replace("NAME", "a100"))
        check_live(key.replace("NAME", "a100"), config.pools)


@pytest.mark.parametrize(
    "key", ["algo.top_p", "pools.a100.weights", "pools.x.max_replicas", "scaling.simulate.hours"]
)
def test_what_was_built_into_the_run_is_refused_and_nothing_is_changed(config, key):
    with pytest.raises(ConfigError, match="a running run does not take it"):
        put_settings(config, {"scaling.auto": True, key: 1})
    assert config.scaling.auto is False


def test_a_resumed_run_keeps_settings_unless_it_was_given_other_values(config):
    kept = {
        "loop.sessions_per_step": {"from": 8, "to": 16},
        "scaling.drain_s": {"from": 1, "to": 2},
        "pools.gone.max_replicas": {"from": None, "to": 2},
    }
    assert dict(still_wanted(config, kept)) == {"loop.sessions_per_step": 16}
