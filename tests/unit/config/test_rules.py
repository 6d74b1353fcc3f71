"""Single values: every key has a rule, and the names are those that the rooms implement."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from rlmix.config import names
from rlmix.config.keys import leaves
from rlmix.config.places import conf_dir
from rlmix.config.rules import RULES, check_value
from rlmix.config.schema.train import TrainConfig

FREE = {"pools.*.engine_args"}
"""Passed on to the engine as they are; `checks` looks at them."""


def test_every_key_but_switches_has_a_rule_and_every_rule_has_a_key() -> None:
    switches = (bool, bool | None)
    needing = {key.pattern for key in leaves(TrainConfig) if key.kind not in switches} - FREE
    assert set(RULES) == needing


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("loop.steps", [1, 10**6], [0, -3]),
        ("loop.group_size", [2], [1]),
        ("algo.top_p", [0.001, 1.0], [0.0, 1.01, float("nan")]),
        ("algo.top_k", [-1, 1, 4096], [0, -2]),
        ("algo.veto", [0.0, 1e-4], [1.0, -1e-4]),
        ("algo.sequence_mask", ["none", "opsm"], ["seq_mis", ""]),
        ("algo.average", ["tokens", "sequences"], ["prompts"]),
        ("algo.baseline", ["mean", "leave_one_out"], ["rloo"]),
        ("algo.temperature", [0.1], [0.0, float("inf"), float("nan")]),
        ("trainer.lr", [1e-9], [0.0, -1e-3, float("nan")]),
        ("trainer.beta1", [0.0, 0.999], [1.0, -0.1]),
        ("tasks.limit", [None, 1], [0]),
        ("run.name", [None, "x", "2026-08.29_a"], ["", "../x", ".hidden", "a b", "a" * 101]),
        ("run.dir", ["runs"], ["", "  "]),
        (
            "sandbox.servers",
            [[], ["http://10.0.0.7:7070"]],
            [["10.0.0.7:7070"], ["http://a/b"], ["http://a:70707"], ["http://a:0"]],
        ),
        ("sandbox.cpus", [None, 0.5], [0]),
        ("net.bind", ["127.0.0.1", "::1", "node"], ["localhost", "127.0.0.1:80", "nodes"]),
        ("launch.resources", [{}, {"a100": "a100_80g"}], [{"a100": ""}, {"a100": None}]),
        ("accelerators.*.compute_capability", ["9.0", "10.3", None], ["9", "sm90"]),
        ("pools.*.usd_per_hour", [None, 0, 2.5], [-1]),
        ("pools.*.memory_frac", [0.01, 0.99], [0.0, 1.0]),
        ("accelerators.*.usd_per_hour", [None, 0], [-1]),
        ("inventory.nodes.*.gpus", [1, 8], [0]),
    ],
)
def test_rules_accept_and_refuse(pattern: str, good: list[Any], bad: list[Any]) -> None:
    assert [list(check_value(pattern, pattern, value)) for value in good] == [[]] * len(good)
    assert all(list(check_value(pattern, pattern, value)) for value in bad)


def test_known_names_are_those_that_the_rooms_implement() -> None:
    from rlmix.algos.advantages import BASELINES, SCALES
    from rlmix.algos.corrections import CENTERED_KINDS, IMPORTANCE_KINDS
    from rlmix.algos.losses import AVERAGES
    from rlmix.algos.sequence_masks import SEQUENCE_MASKS
    from rlmix.engine.embedded import profile
    from rlmix.loop.specs import BUNDLED_SOURCES
    from rlmix.numerics.view_spec import VIEWS
    from rlmix.observe.sinks import SINKS
    from rlmix.router.dispatch import VIEWS as ROUTER_VIEWS
    from rlmix.router.groups import PLACEMENTS
    from rlmix.router.strategies import STRATEGIES
    from rlmix.sandbox.backend import AUTO, BACKENDS
    from rlmix.sandbox.containers import ENGINES
    from rlmix.tasks.source import SOURCES

    assert set(names.SCALES) == set(SCALES)
    assert set(names.BASELINES) == set(BASELINES)
    assert set(names.AVERAGES) == set(AVERAGES)
    assert set(names.SEQUENCE_MASKS) == set(SEQUENCE_MASKS)
    assert set(names.IMPORTANCE_KINDS) == set(IMPORTANCE_KINDS)
    assert set(names.CENTERED_KINDS) == set(CENTERED_KINDS)
    assert set(names.FORMATS) == set(VIEWS)
    assert set(names.ACTIVATION_FORMATS) == set(profile.ACTIVATIONS)
    assert set(names.KV_FORMATS) == set(profile.KV_FORMATS)
    kernels = profile.QUERY_FP8_BACKENDS + profile.QUERY_BF16_BACKENDS
    assert set(names.EMBEDDED_ATTENTIONS) == set(kernels)
    assert set(names.EMULATED) == set(profile.KERNELS) - {"cpu"}
    assert set(SINKS) == {"tensorboard", "wandb", "mlflow"}
    assert set(names.ROUTER_POLICIES) == set(STRATEGIES)
    assert set(names.ROUTER_VIEWS) == set(ROUTER_VIEWS)
    assert set(names.ROUTER_PLACEMENTS) == set(PLACEMENTS)
    assert set(names.SANDBOX_BACKENDS) == {AUTO, *BACKENDS}
    assert set(names.CONTAINER_BACKENDS) == set(ENGINES)
    assert names.BUNDLED_SOURCES == BUNDLED_SOURCES
    assert set(names.TASK_SOURCES) == set(SOURCES)


DESCRIBING = sorted(
    path
    for path in conf_dir().rglob("*.yaml")
    # These change values that are described where they are first set.
    if path.parent.name not in ("experiment", "pools")
    and (path.parent.name != "algo" or path.stem == "mis_sc")
    and not path.stem.startswith(("embedded_", "sglang", "b200_"))
)


@pytest.mark.parametrize("path", DESCRIBING, ids=lambda path: path.stem)
def test_every_value_in_yaml_has_a_comment_above(path: Path) -> None:
    lines = path.read_text().splitlines()
    described: set[str] = set()
    for above, line in itertools.pairwise(["", *lines]):
        match = re.match(r"\s*(\w+): \S", line)
        if match and match.group(1) not in described:
            assert above.lstrip().startswith("#"), f"{path.name}: {match.group(1)}"
            described.add(match.group(1))
