"""Finished sessions on disk: `trajectories/step_000001.jsonl`, one line per trajectory.

Readable with any JSON tool: ids are numbers, logprobs are numbers with the digits that a float32
needs to come back bit for bit, commands are text. Only the kept sets of top-p sampling, which are
many and which nobody reads by eye, are packed: base64 of little-endian arrays, `lengths` (int32,
one per sampled token), `ids` (int32) and `logprobs` (float32), in order; heads likewise, and
experts with dtype and shape. Nothing is left out.

`trajectories/index.jsonl` sums up each file, so that reports need not read the tokens.
"""

import base64
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from rlmix.core.candidates import Candidates
from rlmix.core.errors import DataError, VersionError
from rlmix.core.schema_version import require_readable
from rlmix.core.trajectory import Outcome, StopReason, Trajectory, Turn, VersionSpan
from rlmix.observe.jsonl import read_jsonl, valid_text, write_atomically

INDEX_FILE = "index.jsonl"

SCHEMA_VERSION = "1.0"
"""In every record, so that a line says by itself how it is read."""

_OPTIONS = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY


def file_name(step: int, *, kind: str = "step") -> str:
    return f"{kind}_{step:06d}.jsonl"


def write_trajectories(
    folder: Path, step: int, trajectories: Sequence[Trajectory], *, kind: str = "step"
) -> dict[str, Any]:
    """Write one file, whole or not at all, and return its line for the index.

    Args:
        step: optimizer step that trained on them (or, for another `kind`, followed them).
        kind: start of the file name; `step` for training.
    """
    lines = [
        orjson.dumps(encode_trajectory(trajectory, step=step), option=_OPTIONS)
        for trajectory in trajectories
    ]
    name = file_name(step, kind=kind)
    write_atomically(folder / name, b"".join(lines))
    return {"step": step, "kind": kind, "file": name, **summarize(trajectories)}


def read_trajectories(path: Path) -> list[Trajectory]:
    """Read a file back. Logprobs come back as float32 values, everything else unchanged.

    Raises:
        VersionError: a line is of another major version.
        DataError: a line is not a trajectory.
    """
    trajectories = []
    for number, record in enumerate(read_jsonl(path), start=1):
        where = f"{path} line {number}"
        try:
            require_readable(record.get("schema_version"), known=SCHEMA_VERSION, where=where)
            trajectories.append(decode_trajectory(record))
        except VersionError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{where}: not a trajectory record ({error})") from error
    return trajectories


def encode_trajectory(trajectory: Trajectory, *, step: int) -> dict[str, Any]:
    turns = trajectory.turns
    return {
        "schema_version": SCHEMA_VERSION,
        "session_id": trajectory.session_id,
        "group_id": trajectory.group_id,
        "task_id": trajectory.task_id,
        "step": step,
        "pools": _distinct(turn.pool for turn in turns),
        "numerics_keys": _distinct(turn.numerics_key for turn in turns),
        "weight_versions": sorted({span.version for turn in turns for span in turn.version_spans}),
        "outcome": trajectory.outcome.value,
        "reward": None if trajectory.outcome is Outcome.VOID else trajectory.reward,
        "stop_reason": trajectory.stop_reason.value,
        "void_reason": valid_text(trajectory.void_reason),
        "verdict_detail": valid_text(trajectory.verdict_detail),
        "diff_bytes": trajectory.diff_bytes,
        "rehomed": trajectory.rehomed,
        "started_s": trajectory.started_s,
        "finished_s": trajectory.finished_s,
        "tags": trajectory.tags,
        "prompt_ids": trajectory.prompt_ids,
        "turns": [_encode_turn(turn) for turn in turns],
    }


def decode_trajectory(record: dict[str, Any]) -> Trajectory:
    outcome = Outcome(record["outcome"])
    return Trajectory(
        session_id=record["session_id"],
        group_id=record["group_id"],
        task_id=record["task_id"],
        prompt_ids=tuple(record["prompt_ids"]),
        turns=tuple(_decode_turn(turn) for turn in record["turns"]),
        stop_reason=StopReason(record["stop_reason"]),
        outcome=outcome,
        reward=0.0 if record["reward"] is None else record["reward"],
        void_reason=record["void_reason"],
        verdict_detail=record["verdict_detail"],
        diff_bytes=record["diff_bytes"],
        rehomed=record["rehomed"],
        started_s=record["started_s"],
        finished_s=record["finished_s"],
        tags=record["tags"],
    )


def summarize(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Counts that reports need: outcomes, stop reasons, and per pool what it served.

    A session that moved between pools counts in each pool that served a turn of it.
    """
    pools: dict[str, dict[str, Any]] = {}
    for trajectory in trajectories:
        by_pool: dict[str, list[Turn]] = {}
        for turn in trajectory.turns:
            by_pool.setdefault(turn.pool, []).append(turn)
        for name, turns in by_pool.items():
            pool = pools.setdefault(
                name,
                {"sessions": 0, "valid": 0, "reward_sum": 0.0, "tokens": 0, "numerics_keys": []},
            )
            pool["sessions"] += 1
            pool["tokens"] += sum(len(turn.output_ids) for turn in turns)
            if trajectory.outcome is not Outcome.VOID:
                pool["valid"] += 1
                pool["reward_sum"] += trajectory.reward
            for key in _distinct(turn.numerics_key for turn in turns):
                if key not in pool["numerics_keys"]:
                    pool["numerics_keys"].append(key)
    voids = [t for t in trajectories if t.outcome is Outcome.VOID]
    return {
        "sessions": len(trajectories),
        "outcomes": dict(Counter(t.outcome.value for t in trajectories)),
        "stop_reasons": dict(Counter(t.stop_reason.value for t in trajectories)),
        "void_reasons": dict(Counter(t.void_reason or t.stop_reason.value for t in voids)),
        "pools": pools,
    }


def _encode_turn(turn: Turn) -> dict[str, Any]:
    return {
        "pool": turn.pool,
        "replica": turn.replica,
        "numerics_key": turn.numerics_key,
        "versions": [[span.version, span.start, span.end] for span in turn.version_spans],
        "finish_reason": turn.finish_reason,
        "cached_tokens": turn.cached_tokens,
        "wire_bytes": turn.wire_bytes,
        "command": valid_text(turn.command),
        "exit_code": turn.exit_code,
        "model_s": round(turn.model_s, 6),
        "tool_s": round(turn.tool_s, 6),
        "output_ids": turn.output_ids,
        "sampler_logprobs": np.asarray(turn.sampler_logprobs, dtype=np.float32),
        "kept": _encode_candidates(turn.kept),
        "kept_exact": turn.kept_exact,
        "head": _encode_candidates(turn.head),
        "experts": _encode_array(turn.experts),
        "observation_ids": turn.observation_ids,
    }


def _decode_turn(record: dict[str, Any]) -> Turn:
    return Turn(
        output_ids=tuple(record["output_ids"]),
        sampler_logprobs=_float32(record["sampler_logprobs"]),
        kept=_decode_candidates(record["kept"]),
        kept_exact=record["kept_exact"],
        head=_decode_candidates(record["head"]),
        experts=_decode_array(record["experts"]),
        observation_ids=tuple(record["observation_ids"]),
        version_spans=tuple(
            VersionSpan(version=version, start=start, end=end)
            for version, start, end in record["versions"]
        ),
        pool=record["pool"],
        replica=record["replica"],
        numerics_key=record["numerics_key"],
        finish_reason=record["finish_reason"],
        cached_tokens=record["cached_tokens"],
        wire_bytes=record["wire_bytes"],
        command=record["command"],
        exit_code=record["exit_code"],
        model_s=record["model_s"],
        tool_s=record["tool_s"],
    )


def _encode_candidates(candidates: Candidates | None) -> dict[str, str] | None:
    if candidates is None:
        return None
    return {
        "lengths": _pack(candidates.sizes, "<i4"),
        "ids": _pack(candidates.ids, "<i4"),
        "logprobs": _pack(candidates.logprobs, "<f4"),
    }


def _decode_candidates(record: dict[str, str] | None) -> Candidates | None:
    if record is None:
        return None
    lengths = _unpack(record["lengths"], "<i4")
    return Candidates(
        offsets=np.concatenate(([0], lengths.cumsum())),
        ids=_unpack(record["ids"], "<i4"),
        logprobs=_unpack(record["logprobs"], "<f4"),
    )


def _encode_array(values: np.ndarray | None) -> dict[str, Any] | None:
    if values is None:
        return None
    dtype = values.dtype.newbyteorder("<").str
    return {"dtype": dtype, "shape": values.shape, "data": _pack(values, dtype)}


def _decode_array(record: dict[str, Any] | None) -> np.ndarray | None:
    if record is None:
        return None
    return _unpack(record["data"], record["dtype"]).reshape(record["shape"])


def _pack(values: np.ndarray, dtype: str) -> str:
    return base64.b64encode(values.astype(dtype, copy=False).tobytes()).decode()


def _unpack(text: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype=dtype)


def _float32(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(np.asarray(values, dtype=np.float32).tolist())


def _distinct(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(value for value in values if value))
