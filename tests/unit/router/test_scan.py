"""What is read out of bodies without parsing them."""

import orjson
import pytest

from rlmix.engine.protocol import GenerateRequest, SamplingParams, request_body
from rlmix.router.probe import read_loads, read_server_info
from rlmix.router.scan import scan_answer, scan_request, with_salt
from rlmix.router.static import parse_replicas


def test_the_facts_of_the_bodies_that_our_client_sends():
    request = GenerateRequest(
        session_id="s", request_id="r", input_ids=tuple(range(8192)), record="support",
        sampling=SamplingParams(temperature=1.0, top_p=0.9, top_k=-1, max_new_tokens=77),
    )  # fmt: skip
    facts = scan_request(orjson.dumps(request_body(request)))
    assert (facts.context_tokens, facts.max_new_tokens, facts.is_stream) == (8192, 77, False)


@pytest.mark.parametrize(
    ("body", "tokens", "limit", "stream"),
    [
        (b'{"input_ids": [7], "stream" : true}', 1, None, True),
        (b'{"sampling_params": {"max_new_tokens": 9}, "input_ids": [ ]}', 0, 9, False),
        (b'{"input_ids": [[1, 2], [3]]}', 2, None, False),
        (b'{"text": "' + b"x" * 396 + b'"}', 101, None, False),
        (b"", 0, None, False),
        (b'{"input_ids": [1, 2', 0, None, False),
    ],
)
def test_odd_bodies_are_read_as_far_as_they_go(body, tokens, limit, stream):
    facts = scan_request(body)
    assert (facts.context_tokens, facts.max_new_tokens, facts.is_stream) == (tokens, limit, stream)


def test_counts_are_found_at_the_start_in_the_middle_and_at_the_end_of_an_answer():
    fields = b'"completion_tokens":12,"cached_tokens": 34'
    for content in (fields, b"x" * 9000 + fields + b"y" * 9000, b"x" * 9000 + fields):
        facts = scan_answer(content)
        assert (facts.output_tokens, facts.cached_tokens) == (12, 34)
    assert scan_answer(b"RLMX\x00").output_tokens is None


def test_loads_are_summed_over_ranks_and_any_field_may_be_missing():
    rank = {"num_running_reqs": 3, "decode_moments": [1, 2, 3, 4, 5, 6], "num_used_tokens": None}
    loads = read_loads({"loads": [rank, {"num_running_reqs": 4}, "odd"], "weight_version": "7"})
    assert (loads.running, loads.waiting, loads.used_tokens, loads.version) == (7, None, None, 7)
    assert loads.moments == (1, 2, 3, 4, 5, 6)
    assert loads.progress == 21
    assert read_loads({}).progress is None
    assert read_loads({"weight_version": "default", "loads": 3}).version == 0


def test_the_real_servers_facts_make_a_key_of_their_own():
    facts = read_server_info(
        {"dtype": "auto", "quantization": "fp8", "tp_size": 2, "max_running_requests": None,
         "kv_cache_dtype": "auto", "context_length": 4096, "weight_version": "default"}
    )  # fmt: skip
    assert (facts.view, facts.max_running, facts.max_context_tokens) == ("fp8", None, 4096)
    assert facts.numerics_key == "weights=fp8/kv=auto/tp=2"
    assert read_server_info({"dtype": "auto"}).view == "bf16"
    assert read_server_info({}).view is None


def test_the_command_lines_replicas():
    found = parse_replicas(
        ["h100-0=http://a:1/", "odd=http://b:2"], ["h100-0=4"],
        ["odd=bandwidth_tb_s:2,weight_gb:12,kv_kb:20"],
    )  # fmt: skip
    assert [(one.name, one.pool, one.url, one.speed) for one in found] == [
        ("h100-0", "h100", "http://a:1", 4.0), ("odd", "odd", "http://b:2", 1.0),
    ]  # fmt: skip
    assert found[1].prior is not None
    assert found[1].prior.base_s == pytest.approx(0.010)  # 12 GB at 0.6 of 2 TB/s


@pytest.mark.parametrize(
    ("replicas", "speeds", "rooflines", "message"),
    [
        (["a=ftp://x"], [], [], "give NAME=URL"),
        (["a=http://x", "a=http://y"], [], [], "given twice"),
        (["a=http://x"], ["b=2"], [], "no --replica has this name; known: a"),
        (["a=http://x"], ["a=0"], [], "a number above 0"),
        (["a=http://x"], [], ["a=weight_gb:1"], "missing bandwidth_tb_s, kv_kb"),
        (["a=http://x"], [], ["a=speed:1"], "with a FACT of bandwidth_tb_s"),
    ],
)
def test_wrong_replicas_are_refused_with_what_is_allowed(replicas, speeds, rooflines, message):
    with pytest.raises(ValueError, match=message):
        parse_replicas(replicas, speeds, rooflines)


@pytest.mark.parametrize(
    ("body", "salted"),
    [
        (b'{"input_ids":[1]}', {"cache_salt": "v2", "input_ids": [1]}),
        (b' {\n "a": {"b": 1}}', {"cache_salt": "v2", "a": {"b": 1}}),
        (b'{"cache_salt":"mine","a":1}', {"cache_salt": "v2/mine", "a": 1}),
        (b'{"cache_salt":null}', {"cache_salt": "v2"}),
    ],
)
def test_a_salt_is_put_into_a_body_beside_the_client_s_own(body, salted):
    assert orjson.loads(with_salt(body, "v2")) == salted
    assert with_salt(body, "") is body


@pytest.mark.parametrize("body", [b"", b"{}", b"[1]", b'["{", "a"]', b'"cache_salt"'])
def test_a_body_that_can_hold_no_salt_is_left_to_the_engine(body):
    assert with_salt(body, "v2") == body
