"""The trainer process: owns model, optimizer and counters; does what the loop asks, in order.

A plain class that `launch` turns into an actor. The loop is its only caller and calls one method
at a time; nothing here waits for anybody.

With several ranks every one gets every call, in one order, and the same samples; each computes its
share of the micro-batches, and all come to the same metrics and the same decisions.

Invariants: a step that meets a non-finite number leaves weights, moments and counters as they
were; three of those in a row stop the run; the policy version only grows.
"""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlmix.algos.corrections import CENTERED_KINDS, check_bounds
from rlmix.algos.metrics import head_metrics, step_metrics
from rlmix.batch.balance import split_rows
from rlmix.batch.packing import MicroBatch, pack_samples, pool_names_of
from rlmix.core.errors import TrainerError
from rlmix.core.sample import TrainSample
from rlmix.trainer.checkpoint import (
    SIDE_FOLDER,
    copy_side_files,
    is_checkpoint,
    load_checkpoint,
)
from rlmix.trainer.exact import ExactPolicy
from rlmix.trainer.noise import noise_floor
from rlmix.trainer.optimizer import MasterOptimizer
from rlmix.trainer.policy import Policy
from rlmix.trainer.routing import routing_metrics
from rlmix.trainer.saver import Saver
from rlmix.trainer.sharded import ShardedOptimizer
from rlmix.trainer.shared_step import run_shared
from rlmix.trainer.spec import SaveReport, StepResult, TrainerSpec
from rlmix.trainer.step import PassResult, sequence_rule
from rlmix.trainer.world import World, alone, join, open_store
from rlmix.weights.files import hold_files
from rlmix.weights.publish import PublishReport, publish_version
from rlmix.weights.shipping import ship_report

POLICIES: Mapping[str, Callable[..., Policy]] = {
    "native": Policy,
    "exact": ExactPolicy,
    "exact_fp32": partial(ExactPolicy, round_to=None),
}
"""`TrainerSpec.numerics` -> how the policy is computed."""

MAX_FAULTS_IN_A_ROW = 3
"""One non-finite step can be a bad session; three in a row are a broken policy."""


class TrainerRank:
    """One trainer; `load` comes first."""

    def __init__(self, spec: TrainerSpec) -> None:
        check_bounds(kind=spec.algo.importance, low=spec.algo.low, high=spec.algo.high)
        sequence_rule(spec.algo)
        if spec.algo.centering and spec.algo.importance not in CENTERED_KINDS:
            raise TrainerError(
                f"trainer: algo.centering is not defined for algo.importance="
                f"{spec.algo.importance}; use one of {', '.join(CENTERED_KINDS)}, or "
                "algo.centering=false"
            )
        if not spec.algo.temperature > 0:
            raise TrainerError(
                f"trainer: algo.temperature={spec.algo.temperature}; it divides logits and must be "
                "above 0"
            )
        self._spec = spec
        self._world: World | None = None if spec.ranks > 1 else alone(spec.device)
        self._store: Any = None
        self._loaded: tuple[Policy, MasterOptimizer | ShardedOptimizer] | None = None
        self._saver: Saver | None = None
        self._model_files = Path()
        self._version = 0
        self._faults_in_a_row = 0
        self._num_faults = 0

    def open_store(self) -> tuple[str, int]:
        """Address at which all ranks `join`; asked of rank 0 alone."""
        self._store, host, port = open_store(self._spec.host)
        return host, port

    def join(self, address: tuple[str, int]) -> None:
        """Meet the other ranks; comes before `load` when there are any."""
        self._settle_process()
        self._world = join(
            address,
            rank=self._spec.rank,
            size=self._spec.ranks,
            device=self._spec.device,
            host=self._spec.host,
            store=self._store,
        )

    def load(self, folder: str | Path) -> dict[str, Any]:
        """Load a model folder (fresh start) or a checkpoint folder (resume).

        Returns:
            `resumed`, `step` (0 when fresh), `version`, `extra` (the loop's saved state, empty
            when fresh), `parameters`, `vocab_size`, `model_class`, `load_s`, and `experts_shape`:
            layers and experts per token that sessions must record, None without routing replay.
        Raises:
            TrainerError: damaged checkpoint, or tensors that do not fit the model.
        """
        started_s = time.perf_counter()
        folder = Path(folder)
        self._settle_process()
        checkpoint = load_checkpoint(folder) if is_checkpoint(folder) else None
        # A copy of our own: the folder loaded from may be a checkpoint that is deleted later.
        self._model_files = Path(self._spec.checkpoints_dir) / SIDE_FOLDER
        if self._spec.rank == 0:
            copy_side_files(folder, self._model_files)
        policy = Policy.load(
            folder,
            attention=self._spec.attention,
            experts=self._spec.experts,
            replays_routing=self._spec.algo.routing_replay,
            make=POLICIES[self._spec.numerics],
        )
        if self._spec.packing == "documents":
            policy.take_documents()
        if self._spec.recomputes:
            policy.recompute()
        optimizer: MasterOptimizer | ShardedOptimizer
        world = self._joined()
        if world.mesh is not None and not self._is_exact:
            policy.shard(world.mesh, offloads=self._spec.offloads)
            optimizer = ShardedOptimizer(policy.parameters(), self._spec.optimizer)
        else:
            policy.move(world.device)
            optimizer = MasterOptimizer(policy.parameters(), self._spec.optimizer)
        self._version = 0
        if checkpoint is not None:
            if isinstance(optimizer, ShardedOptimizer):
                optimizer.load_from(checkpoint)
            else:
                optimizer.load_state(checkpoint.optimizer)
            torch.set_rng_state(checkpoint.random_state)
            self._version = checkpoint.version
        self._loaded = (policy, optimizer)
        self._faults_in_a_row = self._num_faults = 0
        return {
            "resumed": checkpoint is not None,
            "step": checkpoint.step if checkpoint else 0,
            "version": self._version,
            "extra": checkpoint.extra if checkpoint else {},
            "parameters": sum(p.numel() for p in policy.parameters().values()),
            "vocab_size": policy.model.get_output_embeddings().weight.shape[0],
            "model_class": type(policy.model).__name__,
            "experts_shape": policy.experts_shape,
            "load_s": time.perf_counter() - started_s,
        }

    def train_step(
        self, samples: Sequence[TrainSample], *, step: int, version: int | None = None
    ) -> StepResult:
        """One optimizer step over all samples.

        Args:
            samples: all samples of the step, those with advantage 0 included: they are measured,
                and their tokens are in the denominator.
            step: number of this step, for messages and the result.
            version: policy version of the weights before the step, for staleness; None: the last
                published one.
        Raises:
            TrainerError: no samples, or the third non-finite step in a row.
            DataError: samples that contradict the settings or each other.
        """
        policy, optimizer = self._parts()
        started_s, cpu_started_s = time.perf_counter(), time.process_time()
        if not samples:
            raise TrainerError(f"trainer: step {step} has no samples; the loop must not call it")
        micro_batches = self._pack(samples)
        num_policy_tokens = sum(batch.sampled_P.size for batch in micro_batches)
        result = run_shared(
            policy,
            optimizer,
            micro_batches,
            self._spec.algo,
            world=self._joined(),
            is_exact=self._is_exact,
            trainer_version=self._version if version is None else version,
        )
        pool_names = pool_names_of(samples)
        metrics = {"loss/policy": result.loss} | result.sequence_metrics
        if result.facts is not None:
            metrics |= step_metrics(
                result.facts, pool_names=pool_names, pool_views=self._spec.pool_views
            )
            metrics |= head_metrics(result.heads, pool_names=pool_names)
            noise_started_s = time.perf_counter()
            metrics |= noise_floor(
                policy, samples, micro_batches, result.facts, self._spec.algo, step=step
            )
            metrics["time/noise_floor_s"] = time.perf_counter() - noise_started_s
        if result.routing:
            metrics |= routing_metrics(micro_batches, result.routing, pool_names=pool_names)
        has_signal = any(batch.needs_gradient for batch in micro_batches)
        skip_reason, applied = self._finish(optimizer, result, has_signal, metrics)
        metrics |= _size_metrics(micro_batches, num_policy_tokens)
        metrics["loss/skipped_steps"] = float(self._num_faults)
        metrics["loss/is_non_finite"] = float(self._faults_in_a_row > 0)
        metrics["time/train_s"] = time.perf_counter() - started_s
        metrics["time/train_cpu_s"] = time.process_time() - cpu_started_s
        if self._faults_in_a_row >= MAX_FAULTS_IN_A_ROW:
            raise TrainerError(
                f"trainer: step {step}: {self._faults_in_a_row} steps in a row were not finite; "
                f"weights are those before them. Last: {skip_reason}. Lower trainer.lr or resume "
                "from an earlier checkpoint"
            )
        return StepResult(
            step=step, applied=applied, skip_reason=skip_reason, metrics=metrics, pools=pool_names
        )

    def _pack(self, samples: Sequence[TrainSample]) -> list[MicroBatch]:
        """The whole step's micro-batches, the same on every rank."""
        # In exact mode any number of ranks has the same ones: they are the leaves of a sum.
        return pack_samples(
            samples,
            max_tokens=self._spec.micro_batch_tokens,
            layout=self._spec.packing,
            num_ranks=1 if self._is_exact else self._spec.ranks,
        )

    def _finish(
        self,
        optimizer: MasterOptimizer | ShardedOptimizer,
        result: PassResult,
        has_signal: bool,
        metrics: dict[str, float],
    ) -> tuple[str, bool]:
        """(reason for not applying the step, whether it was applied); fills in `metrics`."""
        reason = result.failure
        if not reason and not has_signal:
            metrics["loss/grad_norm"] = 0.0
            self._faults_in_a_row = 0
            return "no signal: every group agrees in its rewards", False
        if not reason:
            grad_norm = optimizer.grad_norm()
            metrics["loss/grad_norm"] = grad_norm
            if not math.isfinite(grad_norm):
                reason = f"non-finite: the gradient norm is {grad_norm}"
        if reason:
            self._faults_in_a_row += 1
            self._num_faults += 1
            return reason, False
        clip = self._spec.optimizer.grad_clip
        metrics["loss/clipped"] = float(clip > 0 and grad_norm > clip)
        metrics["trainer/lr"] = optimizer.step(grad_norm=grad_norm)
        self._faults_in_a_row = 0
        return "", True

    def publish(self, version: int) -> PublishReport | None:
        """Write the current weights as `version` in every view; every rank encodes and writes its
        share of the files, rank 0 alone reports and sends them on.

        Raises:
            WeightSyncError: see `weights.publish`.
            TrainerError: the version is below one this trainer already published.
        """
        policy, _ = self._parts()
        if version < self._version:
            raise TrainerError(
                f"trainer: cannot publish version {version} after {self._version}; versions only "
                "grow"
            )
        store = Path(self._spec.weights_store)
        report = publish_version(
            policy.parts(),
            version=version,
            store=store,
            views=self._spec.views,
            model_files=self._model_files,
            writers=self._joined().writers(),
        )
        self._version = version
        if self._spec.rank > 0:
            return None
        return ship_report(
            report,
            store,
            url=self._spec.remote_store,
            full_every=self._spec.full_every,
            keep=self._spec.keep_versions,
        )

    def save(self, step: int, extra: Mapping[str, Any], *, waits: bool = True) -> str:
        """Write `checkpoints/step_%06d` in the background, then delete older ones.

        Args:
            step: optimizer steps done so far in the run.
            extra: the loop's state, JSON values only; comes back from `load`.
            waits: until the checkpoint is complete.
        Returns:
            Its path.
        Raises:
            TrainerError: this save failed, or the one before it.
        """
        policy, optimizer = self._parts()
        saver = self._ready_saver()
        path = saver.start(
            step=step,
            version=self._version,
            model_state=hold_files(policy.parts(), writers=self._joined().writers()),
            model_files=self._model_files,
            optimizer_state=optimizer.state(),
            random_state=torch.get_rng_state(),
            extra=extra,
        )
        if waits:
            saver.wait()
        return str(path)

    def finish_saves(self, *, waits: bool) -> list[SaveReport]:
        """Checkpoints that were finished since the last call; on rank 0.

        Raises:
            TrainerError: a save failed.
        """
        saver = self._ready_saver()
        if waits:
            saver.wait()
        return saver.finished()

    def _ready_saver(self) -> Saver:
        if self._saver is None:
            self._saver = Saver(
                Path(self._spec.checkpoints_dir),
                keep=self._spec.keep_checkpoints,
                writers=self._joined().new_writers(),
            )
        return self._saver

    @torch.no_grad()
    def score(
        self, ids_list: Sequence[Sequence[int]], *, temperature: float | None = None
    ) -> list[np.ndarray]:
        """Trainer logprobs of given tokens over the whole vocabulary.

        Args:
            ids_list: token ids, each list at least 1 long and within the micro-batch budget.
            temperature: None: `algo.temperature`.
        Returns:
            One float32 [T] per list; entry t is log p(ids[t] | ids[:t]), entry 0 is 0.0.
        """
        policy, _ = self._parts()
        divisor = self._spec.algo.temperature if temperature is None else temperature
        lengths = [len(ids) for ids in ids_list]
        scores = [np.zeros(length, dtype=np.float32) for length in lengths]
        budget = self._spec.micro_batch_tokens
        for chosen in split_rows(lengths, max_tokens=budget, num_ranks=1):
            ids_BT = torch.zeros(len(chosen), lengths[chosen[0]], dtype=torch.int64)
            for row, index in enumerate(chosen):
                ids_BT[row, : lengths[index]] = torch.as_tensor(ids_list[index])
            found = policy.next_logprobs(
                ids_BT, [lengths[index] for index in chosen], temperature=divisor
            )
            for index, logprobs_P in zip(chosen, found, strict=True):
                scores[index][1:] = logprobs_P.cpu().numpy()
        return scores

    @torch.no_grad()
    def score_samples(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        """Trainer logprobs of samples as the loss sees them: same kept sets, same temperature.

        Returns:
            One float32 [T] per sample, in the given order; 0.0 where the mask is False.
        """
        policy, _ = self._parts()
        algo = self._spec.algo
        scores = [np.zeros(len(sample.ids), dtype=np.float32) for sample in samples]
        for batch in pack_samples(samples, max_tokens=self._spec.micro_batch_tokens):
            found = policy.token_logprobs(batch, temperature=algo.temperature, replay=algo.replay)
            for number, col, value in zip(
                batch.sequences_P, batch.cols_P, found.trainer_P.cpu().numpy(), strict=True
            ):
                scores[number][col] = value
        return scores

    def _settle_process(self) -> None:
        """Settings that belong to the whole process; a rank has one of its own."""
        # oneDNN keeps 1,024 compiled kernels, one per matrix shape, and packed batches make new
        # shapes at every step: 0.5 GB for nothing, the time per step is the same with 64.
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
        torch.set_num_threads(self._spec.threads)
        torch.manual_seed(self._spec.seed)

    @property
    def _is_exact(self) -> bool:
        return self._spec.numerics != "native"

    def _joined(self) -> World:
        if self._world is None:
            raise TrainerError(
                f"trainer: rank {self._spec.rank} of {self._spec.ranks} has not joined the others; "
                "call join first"
            )
        return self._world

    def _parts(self) -> tuple[Policy, MasterOptimizer | ShardedOptimizer]:
        if self._loaded is None:
            raise TrainerError("trainer: nothing is loaded yet; call load first")
        return self._loaded


def _size_metrics(micro_batches: Sequence[MicroBatch], num_policy_tokens: int) -> dict[str, float]:
    num_tokens = sum(batch.num_tokens for batch in micro_batches)
    num_padded = sum(batch.ids_BT.size for batch in micro_batches)
    kept = [b.kept_logprobs_PK for b in micro_batches if b.kept_logprobs_PK is not None]
    metrics = {
        "trainer/tokens": float(num_tokens),
        "trainer/policy_tokens": float(num_policy_tokens),
        "trainer/padding_frac": 1.0 - num_tokens / num_padded,
        "trainer/micro_batches": float(len(micro_batches)),
    }
    if kept:
        slots = sum(int(np.isfinite(logprobs).sum()) for logprobs in kept)
        metrics["trainer/kept_ids_per_token"] = slots / sum(len(logprobs) for logprobs in kept)
    return metrics
