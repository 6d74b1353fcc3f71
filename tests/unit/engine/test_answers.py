"""From an answer to a turn: JSON as the real SGLang gives it, binary as ours do."""

import base64
import copy
import dataclasses

import numpy as np
import orjson
import pytest

from rlmix.core.candidates import Candidates
from rlmix.core.errors import EngineError
from rlmix.core.trajectory import VersionSpan
from rlmix.engine.answers import parse_document, parse_frame
from rlmix.engine.frame import decode_frame, encode_frame
from rlmix.engine.protocol import GenerateRequest, SamplingParams, request_body
from rlmix.engine.wire import Answer, generate_document, generate_frame

LOG = np.log


def request(record="support", *, top_p=0.9, head_k=0, **experts):
    return GenerateRequest(
        session_id="s",
        request_id="r",
        input_ids=(1, 2),
        sampling=SamplingParams(temperature=0.7, top_p=top_p, top_k=-1, max_new_tokens=4),
        record=record,
        head_k=head_k,
        **experts,
    )


KEPT = Candidates.of([(5, 9), (7,)], [(LOG(0.75), LOG(0.25)), (0.0,)])
ANSWER = Answer(
    rid="r",
    output_ids=[9, 7],
    finish_reason={"type": "stop", "matched": 7},
    num_prompt_tokens=2,
    num_cached_tokens=1,
    spans=[VersionSpan(version=3, start=0, end=1), VersionSpan(version=4, start=1, end=2)],
    weight_version=4,
    latency_s=0.5,
    logprobs=np.array([-1.5, -0.1], dtype=np.float32),
    sampling_logprobs=np.array([LOG(0.25), 0.0], dtype=np.float32),
    kept=KEPT,
    tells_support=True,
)


def sglang(**meta):
    """A document as orjson reads it: plain lists of Python numbers."""
    document = {
        "output_ids": [9, 7],
        "meta_info": {
            "finish_reason": {"type": "length"},
            "weight_version": "3",
            "output_token_logprobs": [[-1.5, 9, None], [-0.1, 7, None]],
            "output_token_sampling_mask": [[5, 9], [7]],
            "output_token_sampling_logprobs": [[LOG(0.75), LOG(0.25)], [0]],
        },
    }
    document["meta_info"].update(copy.deepcopy(meta))
    return document


def test_the_sampled_logprob_is_the_one_in_the_kept_set():
    turn = parse_frame(generate_frame(ANSWER), request(), {"X-Rlmix-Pool": "h100"})
    assert turn.output_ids == (9, 7)
    assert turn.sampler_logprobs == tuple(np.float32([LOG(0.25), 0.0]).tolist())
    assert turn.kept == KEPT
    assert [span.version for span in turn.version_spans] == [3, 4]
    assert (turn.cached_tokens, turn.finish_reason, turn.pool) == (1, "stop", "h100")


def test_a_frame_tells_each_logprob_once():
    names = set(decode_frame(generate_frame(ANSWER))[1])
    assert names == {"output_ids", "kept_offsets", "kept_ids", "kept_logprobs"}


def test_numbers_of_json_become_the_float32_that_the_engine_had():
    turn = parse_document(sglang(), request(), {})
    assert turn.kept == KEPT
    # Every float32 survives its shortest decimal form, the whole numbers among them included.
    rng = np.random.default_rng(0)
    values = np.float32(-rng.exponential(8, 20_000))
    digits = [float(str(value)) for value in values]
    kept = Candidates.of([range(len(digits))], [digits])
    assert kept.logprobs.tobytes() == values.tobytes()


def experts_of(rows, dtype=np.uint8):
    return np.arange(4 * rows, dtype=dtype).reshape(rows, 2, 2)


def test_experts_travel_in_binary_with_shape_and_type():
    """2 input and 2 output tokens: 3 positions were an input."""
    raw = generate_frame(dataclasses.replace(ANSWER, experts=experts_of(3)))
    turn = parse_frame(raw, request(experts_shape=(2, 2)), {})
    assert turn.experts.dtype == np.uint8
    assert turn.experts.tolist() == experts_of(3).tolist()
    assert parse_frame(raw, request(), {}).experts is None
    silent = parse_frame(generate_frame(ANSWER), request(experts_shape=(2, 2)), {})
    assert silent.experts is None  # A pool that records none.


def test_experts_of_sglang_get_the_shape_of_the_model_and_the_smallest_type():
    """Flat int32 in base64; from position 1 on, 2 rows are left."""
    asked = request(experts_shape=(2, 2), experts_start=1)
    body = request_body(asked)
    assert (body["return_routed_experts"], body["routed_experts_start_len"]) == (True, 1)
    assert "return_routed_experts" not in request_body(request())
    for experts, dtype in ((experts_of(2), np.uint8), (experts_of(2, np.int32) + 250, np.int16)):
        packed = base64.b64encode(experts.astype("<i4").tobytes()).decode()
        turn = parse_document(sglang(routed_experts=packed), asked, {})
        assert turn.experts.dtype == dtype
        assert turn.experts.tolist() == experts.tolist()
    ours = generate_document(dataclasses.replace(ANSWER, experts=experts_of(2)))
    assert parse_document(orjson_read(ours), asked, {}).experts.tolist() == experts_of(2).tolist()


@pytest.mark.parametrize(
    ("rows", "shape", "message"),
    [
        (2, (2, 2), r"routed experts are uint8 of shape \(2, 2, 2\), expected .* \(3, 2, 2\)"),
        (3, (3, 2), r"12 expert ids are no multiple of 6|expected .* \(3, 3, 2\)"),
    ],
)
def test_experts_of_other_tokens_or_another_model_are_refused(rows, shape, message):
    asked = request(experts_shape=shape)
    packed = base64.b64encode(experts_of(rows).astype("<i4").tobytes()).decode()
    with pytest.raises(EngineError, match=message):
        parse_frame(
            generate_frame(dataclasses.replace(ANSWER, experts=experts_of(rows))), asked, {}
        )
    with pytest.raises(EngineError, match=message):
        parse_document(sglang(routed_experts=packed), asked, {})


def orjson_read(document):
    """What a client reads of a document that one of our servers wrote."""
    return orjson.loads(orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY))


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"output_token_sampling_mask": [[5, 9]]}, "1 candidate sets, 2 sets of logprobs"),
        ({"output_token_sampling_mask": [[5], [7]]}, "position 0: 1 candidate ids, 2 logprobs"),
        ({"output_token_sampling_mask": [[5, 8], [7]]}, "position 0: sampled id 9 is not in"),
        ({"output_token_sampling_mask": [[9, 9], [7]]}, "id 9 is several times in its kept set"),
        (
            {
                "output_token_sampling_mask": [[5, 9, 5], [7]],
                "output_token_sampling_logprobs": [[LOG(0.25), LOG(0.25), LOG(0.5)], [0]],
            },
            "position 0: id 5 is several times in its kept set",
        ),
        ({"output_token_sampling_mask": [[5, 9.5], [7]]}, "not a flat list of whole numbers"),
        (
            {"output_token_sampling_mask": [[9, 2**31], [7]]},
            "from 7 to 2147483648; allowed: 0 to 2",
        ),
        ({"output_token_sampling_mask": [[-5, 9], [7]]}, "candidate ids reach from -5 to 9"),
        ({"output_token_sampling_mask": [[5 - 2**32, 9], [7]]}, "reach from -4294967291 to 9"),
        ({"output_token_sampling_mask": [[True, 9], [7]]}, "not a flat list of whole numbers"),
        (
            {"output_token_sampling_logprobs": [[LOG(0.75), LOG(0.25)], [-0.7]]},
            "position 1: kept set sums",
        ),
        ({"output_token_sampling_logprobs": [[-0.7, None], [0]]}, "position 0: logprob nan is not"),
        ({"output_token_sampling_logprobs": [[-0.7, 0.5], [0]]}, r"0\.5 is above 0"),
        ({"output_token_sampling_logprobs": [[-0.7, -1e39], [0]]}, "logprob -inf is not"),
        ({"output_token_sampling_logprobs": [["a", -1], [0]]}, "could not convert"),
        ({"output_token_sampling_logprobs": [-1.0, 0]}, "lacks or misplaces a field"),
        ({"output_token_sampling_mask_length": 3}, "2 kept sets, the engine counts 3"),
        ({"weight_versions": [{"version": "1", "start": 0, "end": 1}]}, "do not cover 2 tokens"),
    ],
)
def test_json_that_contradicts_itself_is_an_error(meta, message):
    with pytest.raises(EngineError, match=message):
        parse_document(sglang(**meta), request(), {})


HEADS = [[[LOG(0.6), 5, None], [LOG(0.3), 9, None]], [[LOG(0.9), 7, None], [LOG(0.05), 1, None]]]


def test_a_head_is_read_beside_the_kept_sets_and_may_not_exceed_all():
    turn = parse_document(sglang(output_top_logprobs=HEADS), request(head_k=2), {})
    assert turn.head.ids.tolist() == [5, 9, 7, 1]
    assert turn.head.mass().tolist() == pytest.approx([0.9, 0.95])
    with pytest.raises(EngineError, match="1 heads for 2 tokens"):
        parse_document(sglang(output_top_logprobs=HEADS[:1]), request(head_k=2), {})
    too_much = [[[-0.1, 5, None], [-0.2, 9, None]], HEADS[1]]
    with pytest.raises(EngineError, match=r"position 0: head sums to 1\.72.*at most 1"):
        parse_document(sglang(output_top_logprobs=too_much), request(head_k=2), {})
    twice = [[[-0.7, 5, None], [-2.0, 5, None]], HEADS[1]]
    with pytest.raises(EngineError, match="position 0: id 5 is several times in its head"):
        parse_document(sglang(output_top_logprobs=twice), request(head_k=2), {})
    with pytest.raises(EngineError, match="output_top_logprobs"):
        parse_document(sglang(), request(head_k=2), {})


def test_a_head_alone_says_of_the_sampled_id_what_its_own_logprob_says():
    full = request("head", top_p=1.0, head_k=2)
    own = [[LOG(0.3), 9, None], [LOG(0.9), 7, None]]
    document = sglang(output_top_logprobs=HEADS, output_token_logprobs=own)
    turn = parse_document(document, full, {})
    assert turn.sampler_logprobs == pytest.approx((LOG(0.3), LOG(0.9)), abs=1e-6)
    assert (turn.kept.ids.tolist(), turn.kept_exact) == ([5, 9, 7, 1], False)
    outside = [[LOG(0.02), 8, None], [LOG(0.9), 7, None]]
    document = sglang(output_top_logprobs=HEADS, output_token_logprobs=outside)
    assert parse_document(document | {"output_ids": [8, 7]}, full, {}).output_ids == (8, 7)
    other = [own[0], [LOG(0.8), 7, None]]
    document = sglang(output_top_logprobs=HEADS, output_token_logprobs=other)
    with pytest.raises(EngineError, match=r"position 1: .* -0\.223144, its head says -0\.105361"):
        parse_document(document, full, {})


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"kept_ids": np.float32([5, 9, 7])}, "array kept_ids is float32"),
        ({"kept_offsets": np.int32([0, 1, 2])}, "do not ascend from 0 to 3 slots"),
        ({"kept_offsets": np.int32([0, 3])}, "1 kept sets for 2 tokens"),
        ({"output_ids": np.int32([9, -7])}, "output id -7 is below 0"),
        ({"output_ids": np.int32([])}, "no output token"),
        ({"output_ids": np.int32([9] * 5)}, "5 tokens, asked for 4"),
        ({"kept_logprobs": np.float32([np.nan, -1, 0])}, "position 0: logprob nan is not finite"),
    ],
)
def test_a_whole_frame_that_contradicts_itself_is_an_error(arrays, message):
    meta, good = decode_frame(generate_frame(ANSWER))
    with pytest.raises(EngineError, match=message):
        parse_frame(encode_frame(meta, {**good, **arrays}), request(), {})


def test_a_frame_without_what_was_asked_for_is_an_error():
    meta, good = decode_frame(generate_frame(ANSWER))
    del good["kept_offsets"]
    with pytest.raises(EngineError, match=r"lacks or misplaces a field: KeyError..kept_offsets"):
        parse_frame(encode_frame(meta, good), request(), {})
    with pytest.raises(EngineError, match="head_offsets"):
        parse_frame(generate_frame(ANSWER), request(head_k=3), {})


def test_documents_keep_the_shapes_of_the_real_server():
    meta = generate_document(ANSWER)["meta_info"]
    assert [ids.tolist() for ids in meta["output_token_sampling_mask"]] == [[5, 9], [7]]
    assert meta["output_token_sampling_mask_length"] == 2
    assert [len(values) for values in meta["output_token_sampling_logprobs"]] == [2, 1]
