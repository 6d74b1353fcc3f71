"""Rules between keys. Each function yields every fault that it finds; none stops at the first.

Pure: a typed configuration in, problems out. Rules of a single value are in `rules`.
"""

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec

from rlmix.config import names
from rlmix.config.problems import Problem, did_you_mean, shown
from rlmix.config.schema.pools import PoolConfig, records_experts
from rlmix.config.schema.train import TrainConfig
from rlmix.core.addresses import is_loopback

EXACT_TP = (1, 2, 4)
"""Processes among which the sums of exact mode can be split (`numerics.consistent.contract`)."""

EXACT_REFERENCE = ("weights=bf16", "activations=fp32", "kv=fp32")
"""If all pools have these formats, exact mode rounds nothing, on either side."""


def check_train(config: TrainConfig) -> Iterator[Problem]:
    """All problems between the keys of `conf/train.yaml`."""
    for check in CHECKS:
        yield from check(config)


def _check_pools(config: TrainConfig) -> Iterator[Problem]:
    if not config.pools:
        yield Problem(
            where="pools", what="there is none", hint="keep one, or choose pools=two or pools=six"
        )
    elif all(pool.replicas == 0 for pool in config.pools.values()):
        yield Problem(
            where="pools",
            what="every pool has 0 replicas, so nothing can sample",
            hint="set pools.NAME.replicas=1 for one of them",
        )
    for name, pool in config.pools.items():
        if not name.replace("_", "").replace("-", "").isalnum():
            yield Problem(
                where=f"pools.{name}",
                what="the name of a pool becomes part of file and metric names",
                allowed="use letters, digits, '_' and '-'",
            )
        yield from _check_accelerator(f"pools.{name}.accelerator", pool.accelerator, config)
        if pool.ep > 0 and pool.tp % pool.ep:
            yield Problem(
                where=f"pools.{name}.ep",
                what=f"got {pool.ep}, which does not divide pools.{name}.tp={pool.tp}",
                allowed="experts are split among the accelerators of a replica",
            )
        if pool.engine == "embedded":
            yield from _check_embedded(name, pool, config)
        yield from _check_urls(name, pool)


def _check_scaling(config: TrainConfig) -> Iterator[Problem]:
    """Growing is quicker than shrinking, and both know their bounds."""
    scaling, simulate = config.scaling, config.scaling.simulate
    if scaling.surplus_frac <= scaling.headroom_frac:
        yield Problem(
            where="scaling.surplus_frac",
            what=f"got {scaling.surplus_frac:g} with headroom_frac={scaling.headroom_frac:g}, so "
            "what was just ordered would go again",
            allowed="use more than scaling.headroom_frac",
        )
    for name, pool in config.pools.items():
        if pool.max_replicas is not None and pool.max_replicas < pool.min_replicas:
            yield Problem(
                where=f"pools.{name}.max_replicas",
                what=f"got {pool.max_replicas} with min_replicas={pool.min_replicas}",
                allowed=f"use {pool.min_replicas} or more, or null",
            )
    for key in ("trainer_accelerator", "against"):
        where = f"scaling.simulate.{key}"
        yield from _check_accelerator(where, getattr(simulate, key), config)
    if simulate.prompt_tokens >= simulate.context_tokens:
        yield Problem(
            where="scaling.simulate.prompt_tokens",
            what=f"got {simulate.prompt_tokens} with context_tokens={simulate.context_tokens}",
            allowed="a session's prompt is shorter than its mean context",
        )


def _check_urls(name: str, pool: PoolConfig) -> Iterator[Problem]:
    """Servers that run already: one for each replica, and only of an external pool."""
    where = f"pools.{name}.urls"
    if pool.engine != "sglang_external" and pool.urls:
        yield Problem(
            where=where,
            what=f"got {', '.join(pool.urls)} with engine={pool.engine}, which rlmix starts itself",
            hint=f"set pools.{name}.engine=sglang_external, or remove them",
        )
    elif pool.engine == "sglang_external" and len(set(pool.urls)) != pool.replicas:
        yield Problem(
            where=where,
            what=f"got {len(set(pool.urls))} different addresses for "
            f"pools.{name}.replicas={pool.replicas}",
            allowed="an external pool has one server for each replica",
        )


def _check_embedded(name: str, pool: PoolConfig, config: TrainConfig) -> Iterator[Problem]:
    """What the embedded engine's command line does not take, in this one place."""
    if pool.accelerator in config.accelerators and pool.accelerator not in names.EMULATED:
        yield Problem(
            where=f"pools.{name}.accelerator",
            what=f"got {shown(pool.accelerator)}, which the embedded engine does not emulate",
            allowed=f"it emulates {', '.join(names.EMULATED)}",
        )
    if pool.attention not in names.EMBEDDED_ATTENTIONS:
        yield Problem(
            where=f"pools.{name}.attention",
            what=f"got {shown(pool.attention)}, which the embedded engine does not reproduce",
            allowed=f"it takes {', '.join(names.EMBEDDED_ATTENTIONS)}",
        )
    if pool.tp > 1 and config.numerics.consistency != "exact":
        yield Problem(
            where=f"pools.{name}.tp",
            what=f"got {pool.tp}, and an embedded replica is one process",
            allowed="use 1",
            hint=f"for more throughput raise pools.{name}.replicas; several processes share a "
            "replica with numerics.consistency=exact only",
        )
    elif pool.tp not in EXACT_TP:
        yield Problem(
            where=f"pools.{name}.tp",
            what=f"got {pool.tp}, with which exact sums cannot be the same as in one process",
            allowed=f"use {', '.join(map(str, EXACT_TP))}",
        )
    if pool.engine_args:
        yield Problem(
            where=f"pools.{name}.engine_args",
            what=f"got {', '.join(map(str, pool.engine_args))}, and the embedded engine takes "
            "no further arguments",
            hint="remove them",
        )


def _check_exact(config: TrainConfig) -> Iterator[Problem]:
    """Exact mode takes differences of order away, not those of formats."""
    if config.numerics.consistency != "exact":
        return
    embedded = [name for name, pool in config.pools.items() if pool.engine == "embedded"]
    if embedded and config.trainer.device != "cpu":
        yield Problem(
            where="numerics.consistency",
            what=f"got exact with trainer.device={config.trainer.device}, but "
            f"{', '.join(embedded)} compute on this machine's CPU, and two kinds of machine do "
            "not add alike",
            hint="set trainer.device=cpu, or numerics.consistency=native",
        )
    pools = config.pools.items()
    if pools and all(_formats(pool) == EXACT_REFERENCE for _, pool in pools):
        return
    others = [
        f"{name} ({', '.join(found)})"
        for name, pool in pools
        if (found := [part for part in _formats(pool) if not part.endswith("=bf16")])
    ]
    if others:
        yield Problem(
            where="numerics.consistency",
            what=f"got exact, but these pools compute in other formats than the trainer: "
            f"{', '.join(others)}",
            hint="set weights, activations and kv of these pools to bf16 (experiment=exact does it "
            "for the default pools), or numerics.consistency=native",
        )


def _formats(pool: PoolConfig) -> tuple[str, ...]:
    return tuple(f"{key}={getattr(pool, key)}" for key in ("weights", "activations", "kv"))


def _check_accelerator(where: str, name: str, config: TrainConfig) -> Iterator[Problem]:
    if name not in config.accelerators:
        yield Problem(
            where=where,
            what=f"got {shown(name)}",
            allowed=f"accelerators has {', '.join(config.accelerators)}",
            hint=did_you_mean(name, config.accelerators),
        )


def _check_sampling(config: TrainConfig) -> Iterator[Problem]:
    algo = config.algo
    truncates = algo.top_p < 1.0 or algo.top_k > 0
    if truncates and not algo.replay:
        cut = f"algo.top_p={algo.top_p}" if algo.top_p < 1.0 else f"algo.top_k={algo.top_k}"
        yield Problem(
            where="algo.replay",
            what=f"got false with {cut}: the trainer would score tokens on another support than "
            "the one they were drawn from",
            hint="set algo.replay=true, or algo.top_p=1 algo.top_k=-1",
        )
    if algo.centering and not truncates and algo.head_k == 0:
        yield Problem(
            where="algo.head_k",
            what="got 0 with algo.centering=true: nothing records the tokens that centering "
            "sums over",
            hint="set algo.head_k=64, or sample with top_p or top_k, or algo.centering=false",
        )
    is_known = algo.importance in names.IMPORTANCE_KINDS
    if algo.centering and is_known and algo.importance not in names.CENTERED_KINDS:
        yield Problem(
            where="algo.centering",
            what=f"got true with algo.importance={algo.importance}, whose weight depends on more "
            "than the ratio, so its expectation is not defined",
            allowed=f"centering goes with {', '.join(names.CENTERED_KINDS)}",
            hint="set algo.centering=false",
        )
    if is_known and algo.low > algo.high:
        yield Problem(
            where="algo.low",
            what=f"got {algo.low} above algo.high={algo.high}, so no ratio is trusted",
            hint="set algo.low below algo.high",
        )
    has_low = algo.sequence_mask in ("product", "geometric")
    if has_low and algo.sequence_low > algo.sequence_high:
        yield Problem(
            where="algo.sequence_low",
            what=f"got {algo.sequence_low} above algo.sequence_high={algo.sequence_high}, so that "
            "every session would be dropped",
            hint="set algo.sequence_low below algo.sequence_high",
        )


def _check_routing(config: TrainConfig) -> Iterator[Problem]:
    replays = config.algo.routing_replay
    for name, pool in config.pools.items():
        if pool.record_experts and not replays:
            yield Problem(
                where=f"pools.{name}.record_experts",
                what="got true with algo.routing_replay=false, so nobody asks for the record",
                hint=f"set algo.routing_replay=true, or pools.{name}.record_experts=null",
            )
    if replays and not any(
        records_experts(pool, routing_replay=True) for pool in config.pools.values()
    ):
        yield Problem(
            where="algo.routing_replay",
            what="got true, but record_experts=false for every pool, so there is nothing to replay",
            hint="set it to null for a pool, or algo.routing_replay=false",
        )


def _check_model(config: TrainConfig) -> Iterator[Problem]:
    """Models of the Hub are pinned; nothing else has a revision."""
    path, revision = config.model.path, config.model.revision
    is_remote = path.startswith("hf://")
    if is_remote and revision is None:
        yield Problem(
            where="model.revision",
            what=f"got null with model.path={path}, whose newest commit may be another tomorrow",
            hint="set the 40 digits of a commit",
        )
    elif revision is not None and not is_remote:
        yield Problem(
            where="model.revision",
            what=f"got {revision} with model.path={path}, which has no revisions",
            hint="set it to null, or model.path=hf://OWNER/NAME",
        )


def _check_launch(config: TrainConfig) -> Iterator[Problem]:
    """A cluster is joined, and its machines must reach each other."""
    launch = config.launch
    if launch.backend == "local":
        return
    if launch.address is None:
        yield Problem(
            where="launch.address",
            what=f"got null with launch.backend={launch.backend}, which joins a Ray cluster",
            hint="set launch.address=auto on a machine of the cluster, or launch=local",
        )
    if is_loopback(config.net.bind):
        yield Problem(
            where="net.bind",
            what=f"got {config.net.bind} with launch.backend={launch.backend}, so that servers "
            "could not be reached from the cluster's other machines",
            hint="set net.bind=node",
        )


def _check_loop(config: TrainConfig) -> Iterator[Problem]:
    loop, weights = config.loop, config.weights
    if loop.group_size > 0 and loop.sessions_per_step % loop.group_size:
        lower = loop.sessions_per_step // loop.group_size * loop.group_size
        near = [n for n in (lower, lower + loop.group_size) if n > 0]
        yield Problem(
            where="loop.sessions_per_step",
            what=f"got {loop.sessions_per_step}, no multiple of loop.group_size={loop.group_size}",
            allowed=f"use {' or '.join(map(str, near))}",
        )
    if weights.keep < loop.max_staleness + 1:
        yield Problem(
            where="weights.keep",
            what=f"got {weights.keep}, but sessions may use versions up to "
            f"loop.max_staleness={loop.max_staleness} behind the newest",
            allowed=f"use {loop.max_staleness + 1} or more",
        )
    if weights.publish_every > loop.max_staleness + 1:
        yield Problem(
            where="weights.publish_every",
            what=f"got {weights.publish_every}, so that every session would be older than "
            f"loop.max_staleness={loop.max_staleness} allows before a new version is there",
            allowed=f"use {loop.max_staleness + 1} or less",
        )


def _check_sessions(config: TrainConfig) -> Iterator[Problem]:
    session, sandbox = config.session, config.sandbox
    if sandbox.backend == "unisolated" and not sandbox.allow_unisolated:
        yield Problem(
            where="sandbox.backend",
            what="got 'unisolated', which runs a model's commands with your rights",
            hint="set sandbox.allow_unisolated=true if that is what you want",
        )
    is_bundled = config.tasks.source in names.BUNDLED_SOURCES
    if sandbox.backend == "weak" and not (
        is_bundled if sandbox.allow_weak is None else sandbox.allow_weak
    ):
        yield Problem(
            where="sandbox.backend",
            what=f"got 'weak' for tasks.source={config.tasks.source}, whose code is not ours",
            hint="set sandbox.allow_weak=true if Landlock is enough for you",
        )
    has_images = config.tasks.source in names.PREPARED_SOURCES
    if sandbox.backend in names.CONTAINER_BACKENDS and sandbox.image is None and not has_images:
        yield Problem(
            where="sandbox.image",
            what=f"got null, and sandbox.backend={sandbox.backend} starts an image",
            hint="name one that has bash, git and this Python",
        )
    if sandbox.backend == "remote" and not sandbox.servers:
        yield Problem(
            where="sandbox.servers",
            what="got an empty list, and sandbox.backend=remote asks servers",
            hint="start `python -m rlmix.sandbox.server` and list its URL",
        )
    if session.max_turn_tokens >= session.max_context_tokens:
        yield Problem(
            where="session.max_turn_tokens",
            what=f"got {session.max_turn_tokens}, which leaves no room for a prompt in "
            f"session.max_context_tokens={session.max_context_tokens}",
            allowed=f"use less than {session.max_context_tokens}",
        )
    if sandbox.command_timeout_s > session.time_limit_s:
        yield Problem(
            where="sandbox.command_timeout_s",
            what=f"got {sandbox.command_timeout_s:g} s, longer than a whole session "
            f"(session.time_limit_s={session.time_limit_s:g})",
            allowed=f"use {session.time_limit_s:g} or less",
        )
    if config.trainer.micro_batch_tokens < session.max_context_tokens:
        yield Problem(
            where="trainer.micro_batch_tokens",
            what=f"got {config.trainer.micro_batch_tokens}, but one session may have "
            f"session.max_context_tokens={session.max_context_tokens}",
            allowed=f"use {session.max_context_tokens} or more",
        )


def _check_trainer(config: TrainConfig) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.device != "cpu":
        yield from _check_accelerator("trainer.device", trainer.device, config)
    elif trainer.offload:
        yield Problem(
            where="trainer.offload",
            what="got true with trainer.device=cpu, where everything is in main memory already",
            hint="set trainer.offload=false",
        )
    if trainer.offload and trainer.ranks == 1:
        yield Problem(
            where="trainer.offload",
            what="got true with one rank, but shards alone can be kept elsewhere than the model",
            hint="set trainer.ranks=2 or more, or trainer.offload=false",
        )
    if trainer.packing == "documents" and config.numerics.consistency == "exact":
        yield Problem(
            where="trainer.packing",
            what="got documents with numerics.consistency=exact, whose operators take rows",
            hint="set trainer.packing=rows",
        )


def _check_inventory(config: TrainConfig) -> Iterator[Problem]:
    for name, node in config.inventory.nodes.items():
        yield from _check_accelerator(
            f"inventory.nodes.{name}.accelerator", node.accelerator, config
        )


def _check_alarms(config: TrainConfig) -> Iterator[Problem]:
    alarms = config.alarms
    for name in names.ALARMS:
        if getattr(alarms, f"{name}_action") == "quarantine" and name not in names.POOL_ALARMS:
            yield Problem(
                where=f"alarms.{name}_action",
                what="got 'quarantine', but this alarm is about the whole run and names no pool",
                allowed="use event or stop",
                hint=f"alarms that can quarantine: {', '.join(names.POOL_ALARMS)}",
            )
    if alarms.window < alarms.patience:
        yield Problem(
            where="alarms.window",
            what=f"got {alarms.window}, less than alarms.patience={alarms.patience}, so that no "
            "rule would ever have a past",
            allowed=f"use {alarms.patience} or more",
        )


def _check_sinks(config: TrainConfig) -> Iterator[Problem]:
    sinks = {"wandb": config.observe.wandb, "mlflow": config.observe.mlflow}
    for name, is_wanted in sinks.items():
        if is_wanted and find_spec(name) is None:
            yield Problem(
                where=f"observe.{name}",
                what=f"got true, but the package {name} is not installed",
                hint=f"install it with: pip install 'rlmix[{name}]'",
            )


def _check_eval(config: TrainConfig) -> Iterator[Problem]:
    if config.eval.every_steps % config.weights.publish_every:
        yield Problem(
            where="eval.every_steps",
            what=f"got {config.eval.every_steps}, and versions are published every "
            f"{config.weights.publish_every} steps",
            allowed="use a multiple of weights.publish_every, or 0",
        )
    if config.eval.n < config.eval.k:
        yield Problem(
            where="eval.n",
            what=f"got {config.eval.n}, and pass@{config.eval.k} needs as many samples of a task",
            allowed=f"use {config.eval.k} or more",
            hint=f"or set eval.k={config.eval.n}",
        )


CHECKS: Sequence[Callable[[TrainConfig], Iterator[Problem]]] = (
    _check_pools,
    _check_exact,
    _check_sampling,
    _check_routing,
    _check_model,
    _check_launch,
    _check_loop,
    _check_sessions,
    _check_trainer,
    _check_inventory,
    _check_scaling,
    _check_alarms,
    _check_sinks,
    _check_eval,
)
