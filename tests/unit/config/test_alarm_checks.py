"""Rules about `alarms`: names as the rules have them, and quarantine only where a pool is named."""

import dataclasses

import pytest

from rlmix.algos.alarms import RULES
from rlmix.config import names
from rlmix.config.compose import load_config
from rlmix.config.schema.alarms import AlarmsConfig
from rlmix.core.errors import ConfigError
from rlmix.loop.alarms import alarm_rules


def test_every_rule_has_a_limit_and_an_action_and_the_names_agree() -> None:
    assert set(names.ALARMS) == set(RULES)
    per_pool = {name for name, kind in RULES.items() if kind.is_per_pool}
    assert set(names.POOL_ALARMS) == per_pool
    keys = {field.name for field in dataclasses.fields(AlarmsConfig)}
    assert {f"{name}_{part}" for name in RULES for part in ("limit", "action")} <= keys
    rules = alarm_rules(load_config("train", ["alarms.k3_limit=0.125"]).config.alarms, {})
    assert set(rules.rules) == set(RULES)
    assert rules.rules["k3"].limit == 0.125
    assert {rule.action for rule in rules.rules.values()} == {"event"}


def test_quarantine_is_refused_for_alarms_about_the_whole_run() -> None:
    for name in names.ALARMS:
        request = [f"alarms.{name}_action=quarantine"]
        if name in names.POOL_ALARMS:
            assert load_config("train", request).config.alarms
            continue
        with pytest.raises(ConfigError, match=f"alarms.{name}_action: got 'quarantine', but"):
            load_config("train", request)


def test_a_rule_needs_a_past_as_long_as_its_patience() -> None:
    with pytest.raises(ConfigError) as refused:
        load_config("train", ["alarms.window=4", "alarms.patience=5", "alarms.ess_action=panic"])
    text = str(refused.value)
    assert "alarms.window: got 4, less than alarms.patience=5" in text
    assert "use 5 or more" in text
    assert "alarms.ess_action: got 'panic'; use one of event, quarantine, stop" in text
