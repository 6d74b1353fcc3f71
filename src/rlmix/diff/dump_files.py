"""Reads texts and logprobs that another system dumped, and refuses what it cannot be sure of.

Our own schema is one JSON object a line (`rlmix`): `ids` (all token ids of a text), `sampled`
(positions of the tokens that count, from 1 on) or `loss_mask` (0 or 1 for each id), `logprobs` (one
for each of them: what the sampler reported), and if known `trainer_logprobs` (likewise), `pool`,
`id`, `temperature`, `top_p`, `top_k`, `version`. Public shapes are turned into it, see `SHAPES`.
Invariant: nothing is guessed. A field that is missing, has another length or another type is an
error with file, line and field; ids are never shifted or re-encoded.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlmix.core.errors import DataError
from rlmix.diff.texts import Recorded


@dataclass(frozen=True, kw_only=True, slots=True)
class Dumped:
    """One text of a file."""

    recorded: Recorded
    trainer_P: np.ndarray | None
    """float32, what the dump's own trainer says; None: it does not hold it."""
    temperature: float | None
    top_p: float | None
    top_k: int | None
    """None: the dump does not say."""


def read_dump(path: Path, *, shape: str = "rlmix") -> list[Dumped]:
    """Texts of a JSONL or safetensors file.

    Args:
        shape: one of `SHAPES`.
    Raises:
        DataError: no such file, an unknown shape, or what the shape does not allow.
    """
    if shape not in SHAPES:
        raise DataError(f"{path}: shape {shape!r}; known shapes: {', '.join(SHAPES)}")
    if not path.is_file():
        raise DataError(f"{path}: no such file; give a .jsonl or .safetensors file")
    found: list[Dumped] = []
    for number, record in enumerate(_records(path), start=1):
        where = f"{path} record {number}"
        for plain in _converted(record, shape, where):
            found.append(_dumped(plain, where, name=f"{path.stem}/{len(found)}"))
    if not found:
        raise DataError(f"{path}: no text in it")
    return found


Plain = Mapping[str, Any]
"""A record in our own schema."""


def _converted(record: Plain, shape: str, where: str) -> list[Plain]:
    """Texts of a record; what its shape cannot be taken apart as is the file's fault."""
    try:
        return list(SHAPES[shape](record, where))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{where}: not of shape {shape}: {type(error).__name__}: {error}; "
            "docs/diff-logprobs.md has the fields of each shape"
        ) from error


def _records(path: Path) -> Iterator[Plain]:
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            yield load_file(path)
        except (SafetensorError, OSError) as error:
            raise DataError(f"{path}: cannot be read: {error}") from error
        return
    import json

    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path} line {number}: not JSON: {error}") from error
        if not isinstance(record, dict):
            raise DataError(f"{path} line {number}: not an object")
        yield record


def field(record: Plain, name: str, where: str) -> Any:
    """A field that must be there."""
    if name not in record or record[name] is None:
        raise DataError(f"{where}: no field {name!r}; it has {', '.join(map(str, record))}")
    return record[name]


def whole_numbers(values: Any, name: str, where: str) -> list[int]:
    array = _array(values, name, where)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iub"):
        raise DataError(f"{where}: {name} is no list of whole numbers")
    return [int(value) for value in array]


def numbers(values: Any, name: str, where: str) -> np.ndarray:
    array = _array(values, name, where)
    if array.ndim != 1 or array.dtype.kind not in "fiu":
        raise DataError(f"{where}: {name} is no list of numbers")
    return array.astype(np.float32)


def _array(values: Any, name: str, where: str) -> np.ndarray:
    try:
        return np.asarray(values)
    except ValueError as error:  # Lists of other lengths in a list.
        raise DataError(f"{where}: {name} is no list of numbers") from error


def _limit(record: Plain, name: str, where: str) -> float | int | None:
    """A sampling setting, where the record states it."""
    value = record.get(name)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not is_number:
        raise DataError(f"{where}: {name}={value!r} is no number")
    if name == "temperature" and value is not None and not value > 0:
        raise DataError(f"{where}: temperature={value}; logprobs need one above 0")
    return value


def _dumped(record: Plain, where: str, *, name: str) -> Dumped:
    ids = whole_numbers(field(record, "ids", where), "ids", where)
    if "sampled" in record:
        sampled = whole_numbers(record["sampled"], "sampled", where)
    else:
        mask = whole_numbers(field(record, "loss_mask", where), "loss_mask", where)
        if len(mask) != len(ids) or set(mask) - {0, 1}:
            raise DataError(f"{where}: loss_mask must hold 0 or 1 for each of {len(ids)} ids")
        sampled = [place for place, counts in enumerate(mask) if counts]
    logprobs = numbers(field(record, "logprobs", where), "logprobs", where)
    trainer = record.get("trainer_logprobs")
    trainer_P = None if trainer is None else numbers(trainer, "trainer_logprobs", where)
    if trainer_P is not None and len(trainer_P) != len(sampled):
        raise DataError(
            f"{where}: {len(trainer_P)} trainer_logprobs for {len(sampled)} sampled tokens"
        )
    if trainer_P is not None and not np.isfinite(trainer_P).all():
        raise DataError(f"{where}: trainer_logprobs hold a number that is not finite")
    try:
        recorded = Recorded(
            name=str(record.get("id", name)),
            pool=str(record.get("pool", "file")),
            ids=tuple(ids),
            sampled=tuple(sampled),
            logprobs_P=logprobs,
            version=record.get("version"),
        )
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error
    limits: dict[str, Any] = {
        key: _limit(record, key, where) for key in ("temperature", "top_p", "top_k")
    }
    return Dumped(recorded=recorded, trainer_P=trainer_P, **limits)


def _own(record: Plain, where: str) -> Iterator[Plain]:
    yield record


def _answer(
    prompt: Sequence[int], output: Sequence[int], logprobs: Any, **more: Any
) -> dict[str, Any]:
    """One turn: a prompt and what was sampled after it."""
    sampled = list(range(len(prompt), len(prompt) + len(output)))
    return {"ids": [*prompt, *output], "sampled": sampled, "logprobs": logprobs, **more}


def _masked(record: dict[str, Any], mask: list[int], where: str) -> dict[str, Any]:
    """The turn without output tokens whose mask is 0 (answers of tools)."""
    if len(mask) != len(record["sampled"]):
        raise DataError(f"{where}: a mask of {len(mask)} for {len(record['sampled'])} tokens")
    kept = [index for index, counts in enumerate(mask) if counts]
    chosen = {"sampled": [record["sampled"][index] for index in kept]}
    for name in ("logprobs", "trainer_logprobs"):
        if record.get(name) is not None:
            if len(record[name]) != len(mask):
                raise DataError(f"{where}: {len(record[name])} {name} for {len(mask)} tokens")
            chosen[name] = [record[name][index] for index in kept]
    return {**record, **chosen}


def _verl(record: Plain, where: str) -> Iterator[Plain]:
    """A batch as verl holds it: `prompts` padded on the left, `responses` on the right,
    `attention_mask` over both, `response_mask`, `rollout_log_probs`, and `old_log_probs`."""
    prompts, responses = field(record, "prompts", where), field(record, "responses", where)
    attention = np.asarray(field(record, "attention_mask", where))
    counts = np.asarray(field(record, "response_mask", where))
    rollout = np.asarray(field(record, "rollout_log_probs", where))
    trainer = record.get("old_log_probs")
    prompts, responses = np.asarray(prompts), np.asarray(responses)
    width = prompts.shape[1]
    if attention.shape != (len(prompts), width + responses.shape[1]):
        raise DataError(f"{where}: attention_mask does not cover prompts and responses")
    if rollout.shape != responses.shape or counts.shape != responses.shape:
        raise DataError(f"{where}: rollout_log_probs and response_mask must match responses")
    for row in range(len(prompts)):
        prompt = prompts[row][attention[row, :width].astype(bool)].tolist()
        real = attention[row, width:].astype(bool)
        made = _answer(prompt, responses[row][real].tolist(), rollout[row][real].tolist())
        if trainer is not None:
            made["trainer_logprobs"] = np.asarray(trainer)[row][real].tolist()
        yield _masked(made, counts[row][real].astype(int).tolist(), where)


def _slime(record: Plain, where: str) -> Iterator[Plain]:
    """A sample as slime and miles hold it: `tokens`, `response_length`, `rollout_log_probs`, and
    if there `loss_mask` (of the response) and `log_probs` (of the trainer)."""
    tokens = whole_numbers(field(record, "tokens", where), "tokens", where)
    length = int(field(record, "response_length", where))
    if not 0 < length < len(tokens):
        raise DataError(f"{where}: response_length={length} of {len(tokens)} tokens")
    made = _answer(tokens[:-length], tokens[-length:], field(record, "rollout_log_probs", where))
    if record.get("log_probs") is not None:
        made["trainer_logprobs"] = record["log_probs"]
    if "weight_version" in record:
        made["version"] = record["weight_version"]
    if record.get("loss_mask") is None:
        yield made
    else:
        yield _masked(made, whole_numbers(record["loss_mask"], "loss_mask", where), where)


def _trl(record: Plain, where: str) -> Iterator[Plain]:
    """A completion as TRL's GRPO holds it: `prompt_ids`, `completion_ids`,
    `sampling_per_token_logps`, and if there `completion_mask` and `old_per_token_logps`."""
    prompt = whole_numbers(field(record, "prompt_ids", where), "prompt_ids", where)
    output = whole_numbers(field(record, "completion_ids", where), "completion_ids", where)
    made = _answer(prompt, output, field(record, "sampling_per_token_logps", where))
    if record.get("old_per_token_logps") is not None:
        made["trainer_logprobs"] = record["old_per_token_logps"]
    mask = record.get("completion_mask")
    counts = [1] * len(output) if mask is None else whole_numbers(mask, "completion_mask", where)
    yield _masked(made, counts, where)


def _vllm(record: Plain, where: str) -> Iterator[Plain]:
    """A RequestOutput of vLLM as JSON: `prompt_token_ids`, `outputs` with `token_ids` and
    `logprobs`, a mapping from token id to `{"logprob": ...}` for each position."""
    prompt = whole_numbers(field(record, "prompt_token_ids", where), "prompt_token_ids", where)
    for output in field(record, "outputs", where):
        ids = whole_numbers(field(output, "token_ids", where), "token_ids", where)
        rows = field(output, "logprobs", where)
        if len(rows) != len(ids):
            raise DataError(f"{where}: {len(rows)} logprobs for {len(ids)} token_ids")
        try:
            chosen = [float(row[str(i)]["logprob"]) for row, i in zip(rows, ids, strict=True)]
        except (KeyError, TypeError) as error:
            raise DataError(f"{where}: logprobs lack the sampled token {error}") from error
        yield _answer(prompt, ids, chosen)


def _sglang(record: Plain, where: str) -> Iterator[Plain]:
    """A `/generate` request and its answer: `input_ids`, `output_ids` and
    `meta_info.output_token_logprobs`, rows of logprob, token id and text."""
    prompt = whole_numbers(field(record, "input_ids", where), "input_ids", where)
    output = whole_numbers(field(record, "output_ids", where), "output_ids", where)
    rows = field(field(record, "meta_info", where), "output_token_logprobs", where)
    if [int(row[1]) for row in rows] != output:
        raise DataError(f"{where}: output_token_logprobs are of other tokens than output_ids")
    params = record.get("sampling_params") or {}
    limits = {key: params[key] for key in ("temperature", "top_p", "top_k") if key in params}
    yield _answer(prompt, output, [float(row[0]) for row in rows], **limits)


SHAPES: dict[str, Callable[[Plain, str], Iterator[Plain]]] = {
    "rlmix": _own,
    "verl": _verl,
    "slime": _slime,
    "miles": _slime,
    "trl": _trl,
    "vllm": _vllm,
    "sglang": _sglang,
}
"""Shape -> how a record becomes records of ours."""
