"""From the checked configuration to what each process of a run is told. Pure."""

import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlmix.config.schema.train import TrainConfig
from rlmix.loop.stream import Ticket
from rlmix.sandbox.protocol import SandboxLimits
from rlmix.sessions.spec import SessionSpec
from rlmix.sessions.worker import WorkerSpec
from rlmix.trainer.spec import AlgoSpec, OptimizerSpec, TrainerSpec

NUM_VERDICTS = 4
"""At once in one worker. With fewer, sessions pile up before the verdict, engines run with small
batches meanwhile, and small batches cost more per token."""

LEASE_MARGIN_S = 300.0
"""Longer than a session: recording its diff, and a verdict that waits for its turn."""
LONGEST_VERDICT_S = 3600.0
"""No public set gives the tests of a task more than 3,000 s; generated ones stay in the margin."""
BUNDLED_SOURCES = ("generated",)
"""Tasks whose code came with rlmix; a test holds this equal to `config.names`."""
VERDICT_TIMEOUT_S = 20.0
"""For the hidden tests of one task, which take about 0.05 s; a longer run is the agent's doing."""


def trainer_spec(
    config: TrainConfig, *, checkpoints: Path, store: Path, views: Sequence[str], remote: str
) -> TrainerSpec:
    algo, trainer = config.algo, config.trainer
    return TrainerSpec(
        algo=AlgoSpec(
            importance=algo.importance,
            low=algo.low,
            high=algo.high,
            centering=algo.centering,
            sequence_mask=algo.sequence_mask,
            sequence_low=algo.sequence_low,
            sequence_high=algo.sequence_high,
            veto=algo.veto,
            average=algo.average,
            replay=algo.replay,
            routing_replay=algo.routing_replay,
            temperature=algo.temperature,
        ),
        optimizer=OptimizerSpec(
            name=trainer.optimizer,
            lr=trainer.lr,
            beta1=trainer.beta1,
            beta2=trainer.beta2,
            weight_decay=trainer.weight_decay,
            grad_clip=trainer.grad_clip,
            warmup_steps=trainer.warmup_steps,
        ),
        micro_batch_tokens=trainer.micro_batch_tokens,
        threads=trainer.threads,
        seed=config.run.seed,
        checkpoints_dir=str(checkpoints),
        keep_checkpoints=trainer.keep_checkpoints,
        weights_store=str(store),
        remote_store=remote,
        full_every=config.weights.full_every,
        keep_versions=config.weights.keep,
        views=tuple(views),
        pool_views={name: pool.weights for name, pool in config.pools.items()},
        numerics=_numerics(config),
        packing=trainer.packing,
        recomputes=trainer.recompute,
        offloads=trainer.offload,
        ranks=trainer.ranks,
        device=trainer.device,
        host=config.net.bind,
    )


def _numerics(config: TrainConfig) -> str:
    """How the trainer computes: as the pools do in exact mode, which share one format."""
    if config.numerics.consistency == "native":
        return "native"
    is_rounded = any(pool.activations == "bf16" for pool in config.pools.values())
    return "exact" if is_rounded else "exact_fp32"


def worker_spec(
    config: TrainConfig,
    *,
    run_id: str,
    router_url: str,
    router_token: str | None,
    model_dir: Path,
    scratch: Path,
) -> WorkerSpec:
    sandbox = config.sandbox
    return WorkerSpec(
        run_id=run_id,
        router_url=router_url,
        router_token=router_token,
        engine_timeout_s=config.router.request_timeout_s,
        model_dir=str(model_dir),
        sandbox_backend=sandbox.backend,
        sandbox_limits=SandboxLimits(
            memory_mib=sandbox.memory_mib,
            pids=sandbox.pids,
            disk_mib=sandbox.disk_mib,
            output_chars=sandbox.output_chars,
            command_timeout_s=sandbox.command_timeout_s,
            cpus=sandbox.cpus,
            lease_s=config.session.time_limit_s
            + LEASE_MARGIN_S
            + (0 if config.tasks.source in BUNDLED_SOURCES else LONGEST_VERDICT_S),
        ),
        sandbox_image=sandbox.image,
        has_images=config.tasks.source not in BUNDLED_SOURCES,
        sandbox_servers=tuple(sandbox.servers),
        scratch_dir=str(scratch),
        allow_weak=(
            config.tasks.source in BUNDLED_SOURCES
            if sandbox.allow_weak is None
            else sandbox.allow_weak
        ),
        allow_unisolated=sandbox.allow_unisolated,
        num_verdicts=NUM_VERDICTS,
        verdict_timeout_s=VERDICT_TIMEOUT_S,
    )


def training_session(
    config: TrainConfig,
    ticket: Ticket,
    member: int,
    *,
    attempt: int,
    run_id: str,
    experts_shape: tuple[int, int] | None,
) -> SessionSpec:
    """Member `member` of a group; a retried session has a name and seeds of its own.

    Args:
        experts_shape: layers and experts per token that the trainer replays; None: it does not.
    """
    suffix = f"{ticket.group_id}.{member}" + (f"r{attempt}" if attempt else "")
    spec = _session(
        config,
        session_id=f"{run_id}.{suffix}",
        group_id=ticket.group_id,
        task_id=ticket.task_id,
        split="train",
        seed=_seed(config.run.seed, suffix),
    )
    return replace(spec, experts_shape=experts_shape)


def eval_session(
    config: TrainConfig, task_id: str, *, arm: str, attempt: int, run_id: str
) -> SessionSpec:
    """One held-out task. The seed does not depend on the arm, so that arms are paired."""
    return _session(
        config,
        session_id=f"{run_id}.eval.{arm}.{task_id.replace('/', '-')}"
        + (f"r{attempt}" if attempt else ""),
        group_id=f"eval.{arm}",
        task_id=task_id,
        split="eval",
        seed=_seed(config.run.seed, f"eval/{task_id}/{attempt}"),
    )


def _session(
    config: TrainConfig, *, session_id: str, group_id: str, task_id: str, split: str, seed: int
) -> SessionSpec:
    algo, session = config.algo, config.session
    is_truncated = algo.top_p < 1.0 or algo.top_k > 0
    record = "support" if is_truncated else "head" if algo.centering else "none"
    return SessionSpec(
        session_id=session_id,
        group_id=group_id,
        task_id=task_id,
        source=config.tasks.source,
        source_path=config.tasks.path,
        split=split,
        source_seed=config.tasks.seed,
        seed=seed,
        temperature=algo.temperature,
        top_p=algo.top_p,
        top_k=algo.top_k,
        record=record,
        head_k=algo.head_k if record == "head" else 0,
        alarm_head_k=algo.alarm_head_k if record == "support" and split == "train" else 0,
        alarm_head_frac=algo.alarm_head_frac,
        max_turns=session.max_turns,
        max_turn_tokens=session.max_turn_tokens,
        max_context_tokens=session.max_context_tokens,
        time_limit_s=session.time_limit_s,
        command_timeout_s=config.sandbox.command_timeout_s,
        output_chars=config.sandbox.output_chars,
    )


def _seed(run_seed: int, name: str) -> int:
    return zlib.crc32(f"{run_seed}/{name}".encode())
