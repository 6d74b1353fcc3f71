"""Which experts the embedded engine reports: of every position, computed or from the cache."""

import base64

import numpy as np
import pytest
import torch

from rlmix.engine import wire
from rlmix.engine.embedded.profile import Profile
from rlmix.engine.embedded.requests import parse_request
from rlmix.engine.embedded.scheduler import PREFILL_TOKENS, Scheduler
from rlmix.engine.embedded.shape import read_shape
from rlmix.engine.embedded.weights import load_weights, read_config
from rlmix.engine.http import RequestError

PROFILE = Profile(
    accelerator="cpu", weights="bf16", activations="fp32", kv="fp32", attention="triton"
)
LAYERS, DENSE_LAYER, EXPERTS, TOP_K = 3, 1, 8, 2


@pytest.fixture(scope="module")
def model(make_model):
    """Layer 1 has one dense MLP; float32, so that the reference computes what the engine does."""
    return make_model(3, max_position_embeddings=2048, mlp_only_layers=[DENSE_LAYER])


@pytest.fixture(scope="module")
def loaded(model, tmp_path_factory, make_view):
    folder = make_view(model, tmp_path_factory.mktemp("routes") / "model", "bf16")
    shape = read_shape(read_config(folder))
    return shape, load_weights(folder, shape=shape, profile=PROFILE)


def new_scheduler(loaded, **changes):
    shape, weights = loaded
    options = {"max_running": 4, "max_total_tokens": 10_000, "records_routes": True} | changes
    return Scheduler(
        shape, PROFILE, weights, version=0, context_length=2048, mask_cap=4096, **options
    )


def new_request(ids, *, tokens=6, start=0, seed=1, **fields):
    body = {
        "input_ids": list(ids),
        "sampling_params": {"max_new_tokens": tokens, "sampling_seed": seed},
        "return_logprob": True,
        "return_routed_experts": True,
        "routed_experts_start_len": start,
        "return_expert_shares": True,
    } | fields
    return parse_request(
        body,
        rid="r",
        default_seed=0,
        vocab_size=512,
        context_length=2048,
        max_total_tokens=10_000,
        eos_ids=(),
    )


def ids_of(number, length):
    return np.random.default_rng(number).integers(0, 512, length).tolist()


def finish(scheduler, *requests):
    for request in requests:
        scheduler.submit(request)
    while scheduler.has_work:
        scheduler.step()


def answer_of(request):
    return request.answer(weight_version=0)


def context_of(request):
    """Every token that was an input: the last sampled one never was."""
    return request.ids(0, request.length - 1)


def reference(model, ids):
    """(ids, shares) [N, L, K] of a Hugging Face forward over the whole context at once."""
    gates, outputs = [model.model.layers[layer].mlp for layer in (0, 2)], []
    hooks = [
        mlp.gate.register_forward_hook(lambda _, __, output: outputs.append(output))
        for mlp in gates
    ]
    with torch.no_grad():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    experts = np.zeros((len(ids), LAYERS, TOP_K), dtype=np.int64)
    shares = np.zeros((len(ids), LAYERS, TOP_K), dtype=np.float32)
    for layer, (_, share, chosen) in zip((0, 2), outputs, strict=True):
        experts[:, layer], shares[:, layer] = chosen.numpy(), share.numpy()
    return experts, shares


def test_routes_of_prompt_and_output_are_those_of_a_forward_over_the_whole_context(loaded, model):
    request = new_request(ids_of(1, 40), tokens=8)
    finish(new_scheduler(loaded), request)
    answer = answer_of(request)
    experts, shares = reference(model, context_of(request).tolist())
    assert answer.experts.shape == (47, LAYERS, TOP_K)
    assert answer.experts.dtype == np.uint8
    np.testing.assert_array_equal(answer.experts, experts)
    np.testing.assert_allclose(answer.expert_shares, shares, atol=1e-5)
    assert (answer.experts[:, DENSE_LAYER] == 0).all()


def test_a_prompt_from_the_cache_a_long_one_and_one_in_company_keep_their_routes(loaded):
    """Three ways to the same context: at once and alone; in steps; continuing a known context."""
    prompt = ids_of(2, PREFILL_TOKENS + 90)
    first = new_request(prompt, tokens=5)
    finish(new_scheduler(loaded), first)
    scheduler = new_scheduler(loaded)
    others = [new_request(ids_of(10 + n, 30 + n), tokens=20) for n in range(3)]
    beside = new_request(prompt, tokens=5)
    finish(scheduler, *others, beside)
    again = new_request([*prompt, *beside.output_ids, 7, 8, 9], tokens=5)
    finish(scheduler, again)
    assert beside.num_cached == 0
    assert again.num_cached >= len(prompt)
    alone = new_request(again.prompt.tolist(), tokens=5)
    finish(new_scheduler(loaded), alone)
    np.testing.assert_array_equal(answer_of(beside).experts, answer_of(first).experts)
    np.testing.assert_array_equal(answer_of(again).experts, answer_of(alone).experts)
    np.testing.assert_allclose(
        answer_of(again).expert_shares, answer_of(alone).expert_shares, atol=1e-5
    )


def test_contexts_that_part_in_the_middle_of_a_cached_one_get_their_own_routes(loaded):
    scheduler = new_scheduler(loaded)
    stem = ids_of(3, 60)
    finish(scheduler, new_request([*stem, *ids_of(4, 20)]))
    finish(scheduler, new_request([*stem, *ids_of(5, 20)]))
    left = new_request([*stem, *ids_of(4, 20), 1])
    finish(scheduler, left)
    assert left.num_cached >= 80
    alone = new_request(left.prompt.tolist())
    finish(new_scheduler(loaded), alone)
    np.testing.assert_array_equal(answer_of(left).experts, answer_of(alone).experts)


def test_a_later_turn_brings_only_the_positions_that_are_asked_for(loaded):
    """40 prompt and 6 output tokens: positions 0-44 were inputs. The next turn starts at 45, the
    token sampled last, and has 46 + 4 new context tokens and 6 more outputs: 45-54, 10 rows."""
    scheduler = new_scheduler(loaded)
    first = new_request(ids_of(6, 40))
    finish(scheduler, first)
    assert len(answer_of(first).experts) == 45
    context = [*first.prompt.tolist(), *first.output_ids, 11, 12, 13, 14]
    second = new_request(context, start=45)
    whole = new_request(context)
    finish(scheduler, second, whole)
    assert len(answer_of(second).experts) == 10
    np.testing.assert_array_equal(answer_of(second).experts, answer_of(whole).experts[45:])
    joined = np.concatenate((answer_of(first).experts, answer_of(second).experts))
    np.testing.assert_array_equal(joined, answer_of(whole).experts)


def test_slots_that_close_up_carry_their_routes_along(loaded):
    scheduler = new_scheduler(loaded)
    requests = [new_request(ids_of(20 + n, 15 + n), tokens=4 + 7 * n) for n in range(4)]
    finish(scheduler, *requests)
    for n in (1, 3):
        alone = new_request(requests[n].prompt.tolist(), tokens=4 + 7 * n)
        finish(new_scheduler(loaded), alone)
        np.testing.assert_array_equal(answer_of(requests[n]).experts, answer_of(alone).experts)


def test_after_a_retraction_under_new_weights_each_position_keeps_its_first_route(
    loaded, make_model, make_view, tmp_path_factory
):
    """The logprob of a token that was sampled by the old weights came through their routes."""
    shape, old = loaded
    other = make_model(4, max_position_embeddings=2048, mlp_only_layers=[DENSE_LAYER])
    folder = make_view(other, tmp_path_factory.mktemp("new") / "model", "bf16")
    new = load_weights(folder, shape=shape, profile=PROFILE)
    scheduler = new_scheduler(loaded)
    request = new_request(ids_of(7, 30), tokens=12)
    waiting = new_request(ids_of(8, PREFILL_TOKENS + 200), tokens=3)
    scheduler.submit(request)
    for _ in range(5):
        scheduler.step()
    scheduler.submit(waiting)
    scheduler.step()  # A part of its prompt only: nothing is sampled yet.
    sampled = len(request.output_ids)
    assert (sampled, waiting.output_ids) == (6, [])
    scheduler.pause("retract")
    scheduler.replace_weights(new, version=1)
    scheduler.resume()
    finish(scheduler)
    under_old, _ = reference_run(loaded, old, request)
    under_new, _ = reference_run(loaded, new, request)
    edge = 30 + sampled - 1
    np.testing.assert_array_equal(answer_of(request).experts[:edge], under_old[:edge])
    np.testing.assert_array_equal(answer_of(request).experts[edge:], under_new[edge:])
    assert (under_old[:edge] != under_new[:edge]).any()
    whole, _ = reference_run(loaded, new, waiting)
    np.testing.assert_array_equal(answer_of(waiting).experts, whole)


def reference_run(loaded, weights, request):
    """Routes of the request's context as one prompt under given weights."""
    scheduler = new_scheduler((loaded[0], weights))
    again = new_request(request.ids(0, request.length).tolist(), tokens=1)
    finish(scheduler, again)
    return answer_of(again).experts[:-1], answer_of(again).expert_shares[:-1]


def test_recording_changes_no_number(loaded):
    """Bit for bit: same ids, same logprobs."""
    plain, recorded = new_request(ids_of(9, 50), tokens=20), new_request(ids_of(9, 50), tokens=20)
    finish(new_scheduler(loaded, records_routes=False), plain)
    finish(new_scheduler(loaded), recorded)
    assert plain.output_ids == recorded.output_ids
    assert plain.logprobs == recorded.logprobs
    assert answer_of(plain).experts is None  # As SGLang without its flag: absent, not an error.


def test_who_does_not_ask_gets_nothing_and_the_json_is_sglangs(loaded):
    scheduler = new_scheduler(loaded)
    silent = new_request(ids_of(9, 20), return_routed_experts=False)
    asking = new_request(ids_of(9, 20), return_expert_shares=False)
    finish(scheduler, silent, asking)
    assert "routed_experts" not in wire.generate_document(answer_of(silent))["meta_info"]
    answer = answer_of(asking)
    meta = wire.generate_document(answer)["meta_info"]
    assert "routed_expert_shares" not in meta
    flat = np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype=np.int32)
    np.testing.assert_array_equal(flat.reshape(25, LAYERS, TOP_K), answer.experts)


def test_a_start_beyond_the_prompt_is_refused():
    with pytest.raises(RequestError, match="routed_experts_start_len=21; allowed: 0 to the 20"):
        new_request(ids_of(9, 20), start=21)
