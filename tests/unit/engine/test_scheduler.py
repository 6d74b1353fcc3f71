"""The scheduler without HTTP: slots, budgets, long prompts, broken numbers."""

import dataclasses

import numpy as np
import pytest
import torch

from rlmix.engine.embedded.profile import Profile
from rlmix.engine.embedded.requests import parse_request
from rlmix.engine.embedded.scheduler import PREFILL_TOKENS, Scheduler
from rlmix.engine.embedded.shape import read_shape
from rlmix.engine.embedded.weights import load_weights, read_config

PROFILE = Profile(
    accelerator="cpu", weights="bf16", activations="fp32", kv="fp32", attention="triton"
)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory, make_model, make_view):
    """Shape and weights of a model with a context longer than one step's prompt tokens."""
    model = make_model(2, max_position_embeddings=2048, num_hidden_layers=2)
    folder = make_view(model, tmp_path_factory.mktemp("long") / "model", "bf16")
    shape = read_shape(read_config(folder))
    return shape, load_weights(folder, shape=shape, profile=PROFILE)


def new_scheduler(loaded, *, max_running=4, max_total_tokens=10_000):
    shape, weights = loaded
    return Scheduler(
        shape,
        PROFILE,
        weights,
        version=0,
        max_running=max_running,
        context_length=2048,
        max_total_tokens=max_total_tokens,
        mask_cap=4096,
    )


def new_request(number, *, length=20, tokens=10):
    body = {
        "input_ids": np.random.default_rng(number).integers(0, 512, length).tolist(),
        "sampling_params": {"max_new_tokens": tokens, "sampling_seed": number},
        "return_logprob": True,
    }
    return parse_request(
        body,
        rid=f"r{number}",
        default_seed=0,
        vocab_size=512,
        context_length=2048,
        max_total_tokens=10_000,
        eos_ids=(),
    )


def finish(scheduler, limit=2000):
    for _ in range(limit):
        if not scheduler.has_work:
            return
        scheduler.step()
    raise AssertionError(f"still at work after {limit} steps")


def alone(loaded, number, **shape):
    scheduler = new_scheduler(loaded)
    request = new_request(number, **shape)
    scheduler.submit(request)
    finish(scheduler)
    return request


def same(left, right):
    assert left.output_ids == right.output_ids
    np.testing.assert_allclose(left.logprobs, right.logprobs, atol=1e-5)


def test_requests_that_come_and_go_in_any_order_do_not_disturb_each_other(loaded):
    """Slots are closed up as requests of different lengths end; each equals its run alone."""
    generator = np.random.default_rng(1)
    plans = [
        {"length": int(generator.integers(3, 90)), "tokens": int(generator.integers(1, 40))}
        for _ in range(24)
    ]
    scheduler = new_scheduler(loaded, max_running=5)
    requests = [new_request(number, **plan) for number, plan in enumerate(plans)]
    arriving = list(requests)
    while arriving or scheduler.has_work:
        for _ in range(int(generator.integers(0, 3))):
            if arriving:
                scheduler.submit(arriving.pop(0))
        scheduler.step()
        assert scheduler.num_running <= 5
    for number in (0, 3, 7, 12, 18, 23):
        same(requests[number], alone(loaded, number, **plans[number]))
    assert all(len(r.output_ids) == r.max_new_tokens for r in requests)


def test_aborting_in_the_middle_leaves_the_others_as_they_were(loaded):
    scheduler = new_scheduler(loaded)
    requests = [new_request(number, tokens=30) for number in range(4)]
    for request in requests:
        scheduler.submit(request)
    for _ in range(12):
        scheduler.step()
    scheduler.abort("r1")
    scheduler.abort("r0")
    finish(scheduler)
    assert [r.finish_reason["type"] for r in requests] == ["abort", "abort", "length", "length"]
    assert 0 < len(requests[0].output_ids) < 30
    same(requests[2], alone(loaded, 2, tokens=30))
    same(requests[3], alone(loaded, 3, tokens=30))


def test_a_prompt_longer_than_a_step_lets_the_others_go_on_decoding(loaded):
    scheduler = new_scheduler(loaded)
    short = new_request(0, tokens=20)
    scheduler.submit(short)
    scheduler.step()
    long = new_request(1, length=2 * PREFILL_TOKENS + 100, tokens=4)
    scheduler.submit(long)
    before = len(short.output_ids)
    for _ in range(2):
        scheduler.step()
        assert long.output_ids == []
    assert len(short.output_ids) == before + 2
    scheduler.step()
    assert len(long.output_ids) == 1
    finish(scheduler)
    same(long, alone(loaded, 1, length=2 * PREFILL_TOKENS + 100, tokens=4))
    same(short, alone(loaded, 0, tokens=20))


def test_a_request_waits_until_its_longest_form_fits_the_kv_budget(loaded):
    scheduler = new_scheduler(loaded, max_total_tokens=100)
    requests = [new_request(number, length=20, tokens=20) for number in range(3)]
    for request in requests:
        scheduler.submit(request)
    for _ in range(5):
        scheduler.step()
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    finish(scheduler)
    assert all(len(request.output_ids) == 20 for request in requests)
    assert scheduler.prefixes.num_tokens <= 100


def test_retracting_and_going_on_changes_no_number(loaded):
    scheduler = new_scheduler(loaded)
    requests = [new_request(number, tokens=25) for number in range(3)]
    for request in requests:
        scheduler.submit(request)
    for _ in range(10):
        scheduler.step()
    scheduler.pause("retract")
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 3)
    assert not scheduler.has_work
    scheduler.prefixes.clear()
    scheduler.resume()
    finish(scheduler)
    for number, request in enumerate(requests):
        assert request.num_retractions == 1
        same(request, alone(loaded, number, tokens=25))


def test_broken_logits_end_the_request_and_not_the_engine(loaded):
    scheduler = new_scheduler(loaded)
    _, weights = loaded
    embedding = weights.embedding.clone()
    embedding[7] = float("inf")
    scheduler.weights = dataclasses.replace(weights, embedding=embedding)
    healthy, sick = new_request(0, tokens=5), new_request(1, tokens=5)
    healthy.prompt = np.array([1, 2, 3])
    sick.prompt = np.array([1, 7, 3])
    healthy.stop_ids = frozenset({7})
    for request in (healthy, sick):
        scheduler.submit(request)
    finish(scheduler)
    assert sick.finish_reason == {"type": "abort", "message": "logits are NaN or Inf"}
    assert sick.output_ids == []
    assert healthy.finish_reason["type"] in ("length", "stop")
    scheduler.weights = weights
    # Shorter than what the broken one left in the slots, and continuing its context.
    after = [new_request(number, length=2, tokens=3) for number in range(4)]
    after[3].prompt = np.array([1, 7, 3, 4])
    for request in after:
        scheduler.submit(request)
    finish(scheduler)
    same(after[0], alone(loaded, 0, length=2, tokens=3))
    assert [request.finish_reason["type"] for request in after] == ["length"] * 4


def test_decoding_is_bit_equal_alone_and_in_a_batch(loaded):
    """Holds with MKL; elsewhere the difference stays at float32 rounding."""
    scheduler = new_scheduler(loaded)
    requests = [new_request(number, length=10 + 9 * number, tokens=12) for number in range(4)]
    for request in requests:
        scheduler.submit(request)
    finish(scheduler)
    by_itself = alone(loaded, 2, length=28, tokens=12)
    if torch.backends.mkl.is_available():
        assert requests[2].logprobs == by_itself.logprobs
    same(requests[2], by_itself)
