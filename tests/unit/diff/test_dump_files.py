"""Dumps of other systems: read as they are, or refused with file, record and field."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from rlmix.core.errors import DataError
from rlmix.diff.dump_files import SHAPES, read_dump
from rlmix.diff.foreign import explain

OWN = {"ids": [5, 6, 7, 8], "sampled": [2, 3], "logprobs": [-1.0, -2.0], "pool": "h100"}


def lines(folder: Path, *records: object) -> Path:
    path = folder / "dump.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_our_own_schema_takes_positions_or_a_mask(tmp_path: Path) -> None:
    masked = {"ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1], "logprobs": [-1.0, -2.0]}
    first, second = read_dump(lines(tmp_path, {**OWN, "trainer_logprobs": [-1.5, -2.0]}, masked))
    assert first.recorded.sampled == second.recorded.sampled == (2, 3)
    assert first.trainer_P is not None
    assert first.trainer_P.tolist() == [-1.5, -2.0]
    assert (first.recorded.pool, second.recorded.pool, second.trainer_P) == ("h100", "file", None)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({}, "no field 'ids'"),
        ({**OWN, "logprobs": [-1.0]}, "each sampled token needs one"),
        ({**OWN, "sampled": [0, 1]}, "outside 1"),
        ({**OWN, "ids": [5.5, 6, 7, 8]}, "ids is no list of whole numbers"),
        ({**OWN, "logprobs": ["a", "b"]}, "logprobs is no list of numbers"),
        ({**OWN, "trainer_logprobs": [-1.0]}, "1 trainer_logprobs for 2 sampled tokens"),
        ({"ids": [5, 6], "loss_mask": [0, 2], "logprobs": [-1]}, "0 or 1 for each"),
    ],
)
def test_what_is_missing_or_has_another_length_is_refused(
    tmp_path: Path, record: dict[str, object], says: str
) -> None:
    with pytest.raises(DataError, match=says) as refused:
        read_dump(lines(tmp_path, record))
    assert "dump.jsonl record 1" in str(refused.value)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_dump(tmp_path / "ghost.jsonl")
    (tmp_path / "dump.jsonl").write_text("{]\n")
    with pytest.raises(DataError, match="line 1: not JSON"):
        read_dump(tmp_path / "dump.jsonl")
    with pytest.raises(DataError, match="known shapes: rlmix, verl"):
        read_dump(tmp_path / "dump.jsonl", shape="other")
    (tmp_path / "dump.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no text in it"):
        read_dump(tmp_path / "dump.jsonl")


PUBLIC: dict[str, dict[str, object]] = {
    "slime": {
        "tokens": [5, 6, 7, 8, 9],
        "response_length": 3,
        "rollout_log_probs": [-1.0, -2.0, -3.0],
        "log_probs": [-1.1, -2.0, -3.0],
        "loss_mask": [1, 0, 1],
    },
    "trl": {
        "prompt_ids": [5, 6],
        "completion_ids": [7, 8, 9],
        "completion_mask": [1, 0, 1],
        "sampling_per_token_logps": [-1.0, -2.0, -3.0],
        "old_per_token_logps": [-1.1, -2.0, -3.0],
    },
}
PUBLIC["miles"] = PUBLIC["slime"]


@pytest.mark.parametrize("shape", PUBLIC)
def test_masked_tokens_of_a_response_do_not_count(tmp_path: Path, shape: str) -> None:
    (one,) = read_dump(lines(tmp_path, PUBLIC[shape]), shape=shape)
    assert one.recorded.ids == (5, 6, 7, 8, 9)
    assert one.recorded.sampled == (2, 4)
    assert one.recorded.logprobs_P.tolist() == [-1.0, -3.0]
    assert one.trainer_P is not None
    assert one.trainer_P.tolist() == pytest.approx([-1.1, -3.0])


def test_a_batch_of_verl_is_padded_on_both_ends(tmp_path: Path) -> None:
    batch = {
        "prompts": np.array([[0, 5, 6], [4, 5, 6]]),
        "responses": np.array([[7, 8, 0], [7, 8, 9]]),
        "attention_mask": np.array([[0, 1, 1, 1, 1, 0], [1] * 6]),
        "response_mask": np.array([[1, 1, 0], [1, 0, 1]]),
        "rollout_log_probs": np.array([[-1, -2, 0], [-1, -2, -3]], dtype=np.float32),
        "old_log_probs": np.array([[-1, -2, 0], [-1, -2, -4]], dtype=np.float32),
    }
    path = tmp_path / "batch.safetensors"
    save_file(batch, path)
    short, full = read_dump(path, shape="verl")
    assert (short.recorded.ids, short.recorded.sampled) == ((5, 6, 7, 8), (2, 3))
    assert (full.recorded.ids, full.recorded.sampled) == ((4, 5, 6, 7, 8, 9), (3, 5))
    assert full.trainer_P is not None
    assert full.trainer_P.tolist() == [-1, -4]


VERL = {
    "prompts": [[5]], "responses": [[7, 8]], "attention_mask": [[1, 1, 1]],
    "response_mask": [[1, 1]], "rollout_log_probs": [[-1, -2]],
}  # fmt: skip
SLIME = {"tokens": [5, 6, 7, 8], "response_length": 2, "loss_mask": [1, 1]}
VLLM = {"token_ids": [7], "logprobs": 5}


@pytest.mark.parametrize(
    ("shape", "record", "says"),
    [
        ("rlmix", OWN | {"ids": [[5], [6, 7]]}, "ids is no list of numbers"),
        ("rlmix", OWN | {"temperature": "hot"}, "temperature='hot' is no number"),
        ("rlmix", OWN | {"temperature": 0}, "need one above 0"),
        ("rlmix", OWN | {"trainer_logprobs": [float("nan"), -1.0]}, "not finite"),
        ("verl", VERL | {"prompts": [[5], [5, 6]]}, "not of shape verl"),
        ("verl", VERL | {"prompts": [5]}, "not of shape verl"),
        ("verl", VERL | {"old_log_probs": [[-1]]}, "not of shape verl"),
        ("slime", SLIME | {"rollout_log_probs": [-1]}, "1 logprobs for 2 tokens"),
        ("slime", SLIME | {"rollout_log_probs": [-1, -2, -3]}, "3 logprobs for 2 tokens"),
        ("slime", SLIME | {"rollout_log_probs": -1}, "not of shape slime"),
        ("slime", SLIME | {"response_length": "two"}, "not of shape slime"),
        ("vllm", {"prompt_token_ids": [5], "outputs": 5}, "not of shape vllm"),
        ("vllm", {"prompt_token_ids": [5], "outputs": [VLLM]}, "not of shape vllm"),
    ],
)
def test_a_record_of_another_form_is_told_with_its_line(
    tmp_path: Path, shape: str, record: dict[str, object], says: str
) -> None:
    with pytest.raises(DataError, match=f"record 1: .*{says}"):
        read_dump(lines(tmp_path, record), shape=shape)


def test_answers_of_engines_are_read_as_they_came(tmp_path: Path) -> None:
    vllm = {
        "prompt_token_ids": [5, 6],
        "outputs": [
            {
                "token_ids": [7, 8],
                "logprobs": [{"7": {"logprob": -1.0}}, {"9": {"logprob": 0}, "8": {"logprob": -2}}],
            }
        ],
    }
    (one,) = read_dump(lines(tmp_path, vllm), shape="vllm")
    assert one.recorded.logprobs_P.tolist() == [-1.0, -2.0]
    sglang = {
        "input_ids": [5, 6],
        "output_ids": [7, 8],
        "sampling_params": {"temperature": 0.7},
        "meta_info": {"output_token_logprobs": [[-1.0, 7, None], [-2.0, 8, None]]},
    }
    (two,) = read_dump(lines(tmp_path, sglang), shape="sglang")
    assert (two.recorded.sampled, two.temperature) == ((2, 3), 0.7)
    sglang["output_ids"] = [7, 9]
    with pytest.raises(DataError, match="of other tokens"):
        read_dump(lines(tmp_path, sglang), shape="sglang")
    assert set(SHAPES) == {"rlmix", "verl", "slime", "miles", "trl", "vllm", "sglang"}


def test_a_change_of_the_question_that_explains_a_record_is_named() -> None:
    draws = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 50, generator=draws) * 3
    targets = torch.multinomial(logits.softmax(-1), 1, generator=draws)[:, 0]

    def told(scores: torch.Tensor) -> torch.Tensor:
        return scores.double().log_softmax(-1).gather(1, targets[:, None])[:, 0]

    noise = 1e-3 * torch.randn(300, generator=draws).double()
    (warm,) = explain(logits, targets, told(logits / 0.7) + noise)
    assert (warm.cause, "0.7 times" in warm.evidence) == ("sampling", True)
    (lifted,) = explain(logits, targets, told(logits) + 0.05 + noise)
    assert (lifted.cause, "+0.05" in lifted.evidence) == ("sampling", True)
    (stored,) = explain(logits, targets, told(logits).bfloat16().double())
    assert (stored.cause, stored.operator) == ("cast", "logprob")
    (head,) = explain(logits, targets, told(logits.bfloat16()))
    assert (head.cause, head.operator) == ("cast", "head")
    assert explain(logits, targets, told(logits) + 100 * noise) == ()
    assert explain(logits, targets, told(logits)) == ()
