"""What a single value may be: one line per key.

A test holds that every key of the schema which is neither a switch nor free text has a rule here.
Rules between keys are in `checks`.
"""

import ipaddress
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlmix.config import names
from rlmix.config.problems import Problem, did_you_mean, shown
from rlmix.core.addresses import LAST_PORT, NODE, is_port, is_server


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    allowed: str
    """As it ends the sentence `got 'x'; ...`."""
    accepts: Callable[[Any], bool]
    known: Sequence[str] = ()
    """Names to offer when the value looks like one of them."""


def one_of(known: Sequence[str]) -> Rule:
    return Rule(
        allowed=f"use {'one of ' if len(known) > 1 else ''}{', '.join(known)}",
        accepts=known.__contains__,
        known=known,
    )


def at_least(low: float) -> Rule:
    return Rule(allowed=f"use {low} or more", accepts=lambda v: low <= v < math.inf)


def above(low: float) -> Rule:
    return Rule(allowed=f"use a number above {low}", accepts=lambda v: low < v < math.inf)


def within(low: float, high: float, *, low_open: bool = False, high_open: bool = False) -> Rule:
    def accepts(value: float) -> bool:
        return (value > low if low_open else value >= low) and (
            value < high if high_open else value <= high
        )

    start = f"above {low}" if low_open else f"{low} or more"
    end = f"below {high}" if high_open else f"at most {high}"
    return Rule(allowed=f"use a number {start} and {end}", accepts=accepts)


def or_null(rule: Rule) -> Rule:
    return Rule(allowed=f"{rule.allowed}, or null", accepts=lambda v: v is None or rule.accepts(v))


def _is_host_and_port(text: str) -> bool:
    found = re.fullmatch(r"[^\s/@]+:(\d+)", text)
    return found is not None and is_port(found[1])


def _is_address(value: str) -> bool:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return value == NODE
    return True


TEXT = Rule(allowed="use text that is not empty", accepts=lambda v: bool(v.strip()))
FILE_NAME = Rule(
    allowed="use letters, digits, '.', '_' and '-', starting with a letter or digit, at most "
    "100 characters",
    accepts=lambda v: re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", v) is not None,
)
ADDRESS = Rule(
    allowed="use an IP address, such as 127.0.0.1, or node for each machine's own",
    accepts=_is_address,
)
COMMIT = Rule(
    allowed="use the 40 hexadecimal digits of a commit; branches and tags move",
    accepts=lambda v: re.fullmatch(r"[0-9a-f]{40}", v) is not None,
)
RESOURCES = Rule(
    allowed="map accelerators to names of Ray resources",
    accepts=lambda v: all(isinstance(name, str) and name.strip() for name in v.values()),
)
VERSION = Rule(
    allowed='use text such as "9.0"', accepts=lambda v: re.fullmatch(r"\d+\.\d+", v) is not None
)

PLACE = Rule(
    allowed="use a folder or an address without a password; credentials come in the environment",
    accepts=lambda v: bool(v.strip()) and re.search(r"://[^/\s]*:[^/\s]*@", v) is None,
)
CLUSTER = Rule(
    allowed=f"use auto, or HOST:PORT of the head of a Ray cluster, a port from 1 to {LAST_PORT}",
    accepts=lambda v: v == "auto" or _is_host_and_port(v),
)
SERVERS = Rule(
    allowed="use a list of addresses such as http://10.0.0.7:7070, without a path",
    accepts=lambda v: all(
        is_server(one) and re.fullmatch(r"https?://[^/\s@]+/?", one) is not None for one in v
    ),
)
VARIABLE = Rule(
    allowed="use the name of an environment variable: letters, digits and '_'",
    accepts=lambda v: re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", v) is not None,
)

RULES: dict[str, Rule] = {
    "run.name": or_null(FILE_NAME),
    "run.dir": TEXT,
    "run.seed": at_least(0),
    "model.path": TEXT,
    "model.revision": or_null(COMMIT),
    "tasks.source": one_of(names.TASK_SOURCES),
    "tasks.path": or_null(PLACE),
    "tasks.limit": or_null(at_least(1)),
    "tasks.seed": at_least(0),
    "sandbox.backend": one_of(names.SANDBOX_BACKENDS),
    "sandbox.image": or_null(TEXT),
    "sandbox.servers": SERVERS,
    "sandbox.cpus": or_null(above(0)),
    "sandbox.command_timeout_s": above(0),
    "sandbox.memory_mib": at_least(64),
    "sandbox.pids": at_least(8),
    "sandbox.disk_mib": at_least(8),
    "sandbox.output_chars": at_least(40),
    "session.max_turns": at_least(1),
    "session.max_turn_tokens": at_least(1),
    "session.max_context_tokens": at_least(2),
    "session.time_limit_s": above(0),
    "session.workers": at_least(1),
    "session.concurrency": at_least(1),
    "algo.importance": one_of(names.IMPORTANCE_KINDS),
    "algo.low": at_least(0),
    "algo.high": above(0),
    "algo.sequence_mask": one_of(names.SEQUENCE_MASKS),
    "algo.sequence_low": at_least(0),
    "algo.sequence_high": above(0),
    "algo.veto": within(0, 1, high_open=True),
    "algo.average": one_of(names.AVERAGES),
    "algo.baseline": one_of(names.BASELINES),
    "algo.scale": one_of(names.SCALES),
    "algo.top_p": within(0, 1, low_open=True),
    "algo.top_k": Rule(
        allowed="use 1 or more, or -1 to keep every token", accepts=lambda v: v == -1 or v >= 1
    ),
    "algo.temperature": above(0),
    "algo.head_k": at_least(0),
    "algo.alarm_head_k": at_least(0),
    "algo.alarm_head_frac": within(0, 1),
    "loop.steps": at_least(1),
    "loop.sessions_per_step": at_least(1),
    "loop.group_size": at_least(2),
    "loop.max_staleness": at_least(0),
    "loop.eval_tasks": at_least(0),
    "loop.checkpoint_every": at_least(1),
    "loop.min_step_s": at_least(0),
    "trainer.ranks": at_least(1),
    "trainer.device": TEXT,
    "trainer.lr": above(0),
    "trainer.optimizer": one_of(names.OPTIMIZERS),
    "trainer.beta1": within(0, 1, high_open=True),
    "trainer.beta2": within(0, 1, high_open=True),
    "trainer.weight_decay": at_least(0),
    "trainer.grad_clip": at_least(0),
    "trainer.warmup_steps": at_least(0),
    "trainer.micro_batch_tokens": at_least(1),
    "trainer.packing": one_of(names.PACKINGS),
    "trainer.threads": at_least(1),
    "trainer.keep_checkpoints": at_least(1),
    "weights.publish_every": at_least(1),
    "weights.keep": at_least(1),
    "weights.pause": one_of(names.PAUSE_MODES),
    "weights.transport": one_of(names.WEIGHT_TRANSPORTS),
    "weights.store": or_null(PLACE),
    "weights.full_every": at_least(1),
    "weights.staging": or_null(TEXT),
    "weights.max_parallel_pulls": at_least(1),
    "weights.bucket_mib": at_least(1),
    "pools.*.accelerator": TEXT,
    "pools.*.engine": one_of(names.ENGINES),
    "pools.*.replicas": at_least(0),
    "pools.*.min_replicas": at_least(0),
    "pools.*.max_replicas": or_null(at_least(0)),
    "pools.*.weights": one_of(names.FORMATS),
    "pools.*.scope": or_null(one_of(names.VIEW_SCOPES)),
    "pools.*.activations": one_of(names.ACTIVATION_FORMATS),
    "pools.*.kv": one_of(names.KV_FORMATS),
    "pools.*.attention": one_of(names.ATTENTIONS),
    "pools.*.linear_attention": one_of(names.LINEAR_ATTENTIONS),
    "pools.*.state": one_of(names.STATE_FORMATS),
    "pools.*.moe": TEXT,
    "pools.*.tp": at_least(1),
    "pools.*.ep": at_least(1),
    "pools.*.max_running": at_least(1),
    "pools.*.memory_frac": within(0, 1, low_open=True, high_open=True),
    "pools.*.canary_tolerance_nats": above(0),
    "pools.*.usd_per_hour": or_null(at_least(0)),
    "pools.*.urls": SERVERS,
    "accelerators.*.memory_gb": above(0),
    "accelerators.*.bandwidth_tb_s": above(0),
    "accelerators.*.bf16_tflops": above(0),
    "accelerators.*.fp8_tflops": or_null(above(0)),
    "accelerators.*.nvfp4_tflops": or_null(above(0)),
    "accelerators.*.compute_capability": or_null(VERSION),
    "accelerators.*.link": TEXT,
    "accelerators.*.ray_label": TEXT,
    "accelerators.*.usd_per_hour": or_null(at_least(0)),
    "accelerators.*.price_source": TEXT,
    "accelerators.*.market_usd_per_hour": or_null(at_least(0)),
    "accelerators.*.market_source": or_null(TEXT),
    "inventory.nodes.*.accelerator": TEXT,
    "inventory.nodes.*.gpus": at_least(1),
    "inventory.nodes.*.count": at_least(1),
    "inventory.nodes.*.usd_per_hour": or_null(at_least(0)),
    "plan.against": or_null(FILE_NAME),
    "router.policy": one_of(names.ROUTER_POLICIES),
    "router.speeds": one_of(names.ROUTER_SPEEDS),
    "router.view": one_of(names.ROUTER_VIEWS),
    "router.placement": one_of(names.ROUTER_PLACEMENTS),
    "router.break_affinity_s": above(0),
    "router.staleness_s": at_least(0),
    "router.ramp_s": at_least(0),
    "router.admit_batches": at_least(1),
    "router.shards": at_least(1),
    "router.max_waiting": at_least(1),
    "router.queue_timeout_s": above(0),
    "router.request_timeout_s": above(0),
    "router.idle_expiry_s": above(0),
    "scaling.budget_usd_per_hour": or_null(at_least(0)),
    "scaling.headroom_frac": at_least(0),
    "scaling.surplus_frac": at_least(0),
    "scaling.out_delay_s": at_least(0),
    "scaling.in_delay_s": at_least(0),
    "scaling.in_cold_starts": at_least(0),
    "scaling.zero_delay_s": at_least(0),
    "scaling.swap_payback_s": or_null(above(0)),
    "scaling.most_changes": at_least(1),
    "scaling.every_s": above(0),
    "scaling.drain_s": at_least(0),
    "scaling.wait_high_frac": within(0, 1),
    "scaling.kv_high_frac": above(0),
    "scaling.queued_high_frac": at_least(0),
    "scaling.reprefill_high_frac": within(0, 1),
    "scaling.simulate.hours": above(0),
    "scaling.simulate.warm_up_frac": within(0, 1, high_open=True),
    "scaling.simulate.context_tokens": at_least(1),
    "scaling.simulate.prompt_tokens": at_least(1),
    "scaling.simulate.output_tokens": at_least(1),
    "scaling.simulate.observation_tokens": at_least(0),
    "scaling.simulate.tool_s": at_least(0),
    "scaling.simulate.turns_spread": at_least(0),
    "scaling.simulate.trainer_gpus": at_least(1),
    "scaling.simulate.trainer_accelerator": TEXT,
    "scaling.simulate.trainer_step_s": or_null(above(0)),
    "scaling.simulate.burst_factor": at_least(1),
    "scaling.simulate.max_sessions": at_least(1),
    "scaling.simulate.batch_frac": within(0, 0.1),
    "scaling.simulate.max_running": or_null(at_least(1)),
    "scaling.simulate.prices": one_of(names.PRICES),
    "scaling.simulate.cold_start_s": above(0),
    "scaling.simulate.losses_per_day": at_least(0),
    "scaling.simulate.against": TEXT,
    "numerics.consistency": one_of(names.CONSISTENCIES),
    "net.bind": ADDRESS,
    "sglang.python": or_null(TEXT),
    "sglang.api_key_env": VARIABLE,
    "sglang.admin_key_env": VARIABLE,
    "alarms.patience": at_least(1),
    "alarms.min_tokens": at_least(1),
    "alarms.head_min_tokens": at_least(1),
    "alarms.window": at_least(1),
    "alarms.tail_ratio_limit": above(0),
    "alarms.ess_limit": within(0, 1),
    "alarms.masked_limit": within(0, 1),
    "alarms.k3_limit": at_least(0),
    "alarms.entropy_limit": within(0, 1),
    "alarms.non_finite_limit": within(0, 1),
    "alarms.pool_drift_limit": above(1),
    "alarms.pool_drift_min_nats": at_least(0),
    "alarms.pool_drift_format_gap": at_least(1),
    "alarms.pool_masked_limit": within(0, 1),
    "alarms.pool_k3_limit": at_least(0),
    "alarms.pool_tolerance_limit": above(0),
    **{f"alarms.{name}_action": one_of(names.ALARM_ACTIONS) for name in names.ALARMS},
    "alarms.release_after_steps": at_least(0),
    "alarms.last_pool": one_of(names.LAST_POOL),
    "diff.sessions": at_least(1),
    "diff.session_tokens": at_least(1),
    "diff.tolerance_nats": above(0),
    "diff.least_share": within(0, 1, high_open=True),
    "diff.order_ratio_low": above(0),
    "diff.order_ratio_high": above(0),
    "diff.order_correlation": within(0, 1),
    "diff.rounding_error": above(0),
    "diff.slope": above(0),
    "diff.slope_fit": within(0, 1),
    "diff.setting": above(0),
    "diff.weight": above(0),
    "diff.grid": within(0, 1),
    "diff.tile": at_least(2),
    "eval.data": or_null(one_of(names.BENCHMARKS)),
    "eval.path": or_null(TEXT),
    "eval.subset": TEXT,
    "eval.limit": or_null(at_least(1)),
    "eval.k": at_least(1),
    "eval.n": at_least(1),
    "eval.checkpoint": or_null(TEXT),
    "eval.replicas": at_least(1),
    "eval.concurrency": at_least(1),
    "eval.endpoint_model": or_null(TEXT),
    "eval.every_steps": at_least(0),
    "launch.backend": one_of(names.LAUNCH_BACKENDS),
    "launch.address": or_null(CLUSTER),
    "launch.place_timeout_s": above(0),
    "launch.resources": RESOURCES,
    "launch.max_parallel_boots": at_least(1),
    "launch.boot_timeout_s": above(0),
    "launch.update_timeout_s": above(0),
    "launch.stall_timeout_s": above(0),
    "launch.loads_every_s": above(0),
    "launch.max_restarts": at_least(0),
    "launch.restart_window_s": above(0),
    "launch.restart_delay_s": at_least(0),
}
"""Key pattern -> rule; `*` stands for the name of a mapping's entry."""


def check_value(pattern: str, where: str, value: Any) -> Iterator[Problem]:
    """At most one problem of one value.

    Args:
        pattern: the key as in `RULES`.
        where: the key as the user writes it.
    """
    rule = RULES.get(pattern)
    if rule is None or rule.accepts(value):
        return
    hint = did_you_mean(value, rule.known) if isinstance(value, str) else ""
    yield Problem(where=where, what=f"got {shown(value)}", allowed=rule.allowed, hint=hint)
