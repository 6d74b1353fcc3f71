"""Rules between keys, each broken once on an otherwise sound configuration."""

import copy
import functools
from typing import Any

import pytest

from rlmix.config.checks import check_train
from rlmix.config.compose import load_config
from rlmix.config.schema.train import TrainConfig

SETTINGS = (
    "loop.sessions_per_step=128 loop.group_size=8 loop.max_staleness=4 weights.keep=6 "
    "weights.publish_every=1 algo.low=0.5 algo.high=5.0 algo.top_p=0.97 algo.top_k=64 "
    "session.max_turn_tokens=64 session.max_context_tokens=512 session.time_limit_s=60 "
    "sandbox.command_timeout_s=10 trainer.micro_batch_tokens=4096 pools=six algo=mis_sc"
)
"""The numbers that the tests below break, whatever the defaults are."""


@functools.cache
def sound_config() -> TrainConfig:
    return load_config("train", SETTINGS.split()).config


def broken(**values: Any) -> list[str]:
    """Problems of a sound configuration with `section__key=value` changed."""
    config = copy.deepcopy(sound_config())
    for path, value in values.items():
        section, key = path.split("__")
        setattr(getattr(config, section), key, value)
    return [str(problem) for problem in check_train(config)]


def test_a_sound_configuration_has_no_problem() -> None:
    assert broken() == []


def test_sessions_that_do_not_fill_groups_are_refused_with_the_next_numbers() -> None:
    (line,) = broken(loop__sessions_per_step=30)
    assert line == (
        "loop.sessions_per_step: got 30, no multiple of loop.group_size=8; use 24 or 32"
    )
    (line,) = broken(loop__sessions_per_step=5)
    assert line.endswith("use 8")


@pytest.mark.parametrize(("top_p", "top_k"), [(0.9, -1), (1.0, 64), (0.9, 64)])
def test_truncated_sampling_needs_replay(top_p: float, top_k: int) -> None:
    (line,) = broken(algo__top_p=top_p, algo__top_k=top_k, algo__replay=False)
    assert line.startswith("algo.replay: got false with algo.top_")


def test_untruncated_sampling_needs_no_replay_but_a_head_for_centering() -> None:
    untruncated = {"algo__top_p": 1.0, "algo__top_k": -1, "algo__replay": False}
    assert broken(**untruncated) == []
    (line,) = broken(**untruncated, algo__head_k=0)
    assert line.startswith("algo.head_k: got 0 with algo.centering=true")
    assert broken(**untruncated, algo__head_k=0, algo__centering=False) == []


@pytest.mark.parametrize("kind", ["ppo", "gspo", "seq_tis"])
def test_centering_is_refused_where_it_is_not_defined(kind: str) -> None:
    (line,) = broken(algo__importance=kind)
    assert line.startswith(f"algo.centering: got true with algo.importance={kind}")
    assert broken(algo__importance=kind, algo__centering=False) == []


def test_a_kind_that_nobody_knows_is_one_problem_and_says_nothing_about_centering() -> None:
    assert broken(algo__importance="foo") == []


def test_bounds_that_trust_no_ratio_are_refused() -> None:
    (line,) = broken(algo__low=6.0)
    assert line.startswith("algo.low: got 6.0 above algo.high=5.0")


def test_bounds_that_drop_every_session_are_refused_where_they_act() -> None:
    crossed = {"algo__sequence_low": 3.0, "algo__sequence_high": 2.0}
    (line,) = broken(**crossed, algo__sequence_mask="product")
    assert line.startswith("algo.sequence_low: got 3.0 above algo.sequence_high=2.0")
    assert broken(**crossed, algo__sequence_mask="opsm") == []


def test_versions_are_kept_as_long_as_sessions_may_use_them() -> None:
    (line,) = broken(loop__max_staleness=6)
    assert line.endswith("use 7 or more")
    assert line.startswith("weights.keep: got 6")
    assert broken(loop__max_staleness=5) == []


def test_publishing_more_rarely_than_staleness_allows_is_refused() -> None:
    assert broken(weights__publish_every=5) == []
    (line,) = broken(weights__publish_every=6)
    assert line.startswith("weights.publish_every: got 6")
    assert line.endswith("use 5 or less")


def test_limits_of_sessions_fit_into_each_other() -> None:
    lines = broken(
        session__max_turn_tokens=512,
        sandbox__command_timeout_s=61.0,
        trainer__micro_batch_tokens=511,
    )
    assert [line.split(":")[0] for line in lines] == [
        "session.max_turn_tokens",
        "sandbox.command_timeout_s",
        "trainer.micro_batch_tokens",
    ]


def test_a_task_is_sampled_at_least_k_times() -> None:
    (line,) = broken(eval__k=4, eval__n=3)
    assert line == (
        "eval.n: got 3, and pass@4 needs as many samples of a task; use 4 or more; or set eval.k=3"
    )
    assert broken(eval__k=1, eval__n=8) == []


def test_unisolated_sandboxes_need_to_be_allowed_by_name() -> None:
    (line,) = broken(sandbox__backend="unisolated")
    assert "sandbox.allow_unisolated=true" in line
    assert broken(sandbox__backend="unisolated", sandbox__allow_unisolated=True) == []


def test_weak_sandboxes_are_for_the_bundled_tasks_unless_allowed() -> None:
    assert broken(sandbox__backend="weak") == []
    (line,) = broken(sandbox__backend="weak", sandbox__allow_weak=False)
    assert "set sandbox.allow_weak=true" in line


def test_engines_need_an_image_and_remote_needs_servers() -> None:
    (line,) = broken(sandbox__backend="podman")
    assert line.startswith("sandbox.image: got null, and sandbox.backend=podman starts an image")
    assert broken(sandbox__backend="podman", sandbox__image="python:3.11") == []
    (line,) = broken(sandbox__backend="remote")
    assert line.startswith("sandbox.servers: got an empty list")
    assert broken(sandbox__backend="remote", sandbox__servers=["http://10.0.0.7:7070"]) == []


def test_a_run_needs_a_pool_and_a_replica() -> None:
    config = copy.deepcopy(sound_config())
    for pool in config.pools.values():
        pool.replicas = 0
    (problem,) = check_train(config)
    assert str(problem).startswith("pools: every pool has 0 replicas")
    config.pools.clear()
    (problem,) = check_train(config)
    assert str(problem).startswith("pools: there is none")


def test_pools_are_checked_one_by_one() -> None:
    config = copy.deepcopy(sound_config())
    config.pools["h100"].accelerator = "h10"
    config.pools["h200"].tp = 2
    config.pools["a100"].engine_args = {"page_size": 1}
    config.pools["b/200"] = config.pools.pop("b200")
    config.accelerators["l40s"] = config.accelerators["h100"]
    config.pools["b300"].accelerator = "l40s"
    assert [str(problem) for problem in check_train(config)] == [
        "pools.b300.accelerator: got 'l40s', which the embedded engine does not emulate; it "
        "emulates b300, b200, h200, h100, a100, rtx_pro_6000",
        "pools.h200.tp: got 2, and an embedded replica is one process; use 1; "
        "for more throughput raise pools.h200.replicas; several processes share a replica with "
        "numerics.consistency=exact only",
        "pools.h100.accelerator: got 'h10'; accelerators has b300, b200, h200, h100, a100, "
        "rtx_pro_6000, ascend_910c, cpu, l40s; did you mean h100?",
        "pools.a100.engine_args: got page_size, and the embedded engine takes no further "
        "arguments; remove them",
        "pools.b/200: the name of a pool becomes part of file and metric names; use letters, "
        "digits, '_' and '-'",
    ]


def test_a_sink_whose_package_is_absent_is_refused_with_the_install_command() -> None:
    lines = broken(observe__wandb=True, observe__mlflow=True)
    from importlib.util import find_spec

    absent = [name for name in ("wandb", "mlflow") if find_spec(name) is None]
    assert [line.rsplit(": ", 1)[1] for line in lines] == [
        f"pip install 'rlmix[{name}]'" for name in absent
    ]


def with_pools(replays: bool, **changes: Any) -> list[str]:
    """Problems with `algo.routing_replay` and keys of the pools h100 (and all others, by `all`)."""
    config = copy.deepcopy(sound_config())
    config.algo.routing_replay = replays
    for name, values in changes.items():
        for pool in config.pools.values() if name == "all" else [config.pools[name]]:
            for key, value in values.items():
                setattr(pool, key, value)
    return [str(problem) for problem in check_train(config)]


def test_a_record_that_nobody_asks_for_and_a_replay_of_nothing_are_refused() -> None:
    assert with_pools(True) == with_pools(True, h100={"record_experts": False}) == []
    (line,) = with_pools(False, h100={"record_experts": True})
    assert line.startswith("pools.h100.record_experts: got true with algo.routing_replay=false")
    (line,) = with_pools(True, all={"record_experts": False})
    assert line.startswith("algo.routing_replay: got true, but record_experts=false for every pool")


def test_scaling_that_would_take_back_what_it_ordered_is_refused() -> None:
    assert broken(scaling__surplus_frac=0.1, scaling__headroom_frac=0.1) == [
        "scaling.surplus_frac: got 0.1 with headroom_frac=0.1, so what was just ordered would go "
        "again; use more than scaling.headroom_frac"
    ]
    config = copy.deepcopy(sound_config())
    config.pools["h100"].min_replicas, config.pools["h100"].max_replicas = 3, 2
    config.scaling.simulate.against = "b999"
    config.scaling.simulate.prompt_tokens = config.scaling.simulate.context_tokens
    where = [problem.where for problem in check_train(config)]
    assert where == [
        "pools.h100.max_replicas", "scaling.simulate.against", "scaling.simulate.prompt_tokens",
    ]  # fmt: skip
