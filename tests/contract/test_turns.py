"""`/generate`: what is asked and what comes back."""

import asyncio

import numpy as np
import pytest

from rlmix.engine.protocol import EngineRefused, request_body
from tests.contract.checkpoints import CONTEXT, VOCAB
from tests.contract.differences import expected
from tests.contract.talking import ask, body, client_of, gaps, prompt, request, run

META = {
    "id": str,
    "finish_reason": dict,
    "prompt_tokens": int,
    "completion_tokens": int,
    "cached_tokens": int,
    "weight_version": str,
    "weight_versions": list,
    "num_retractions": int,
    "e2e_latency": float,
    "output_token_logprobs": list,
}


def generate(engine, ids, **changes):
    async def scenario():
        async with client_of(engine) as client:
            return await client.generate(request(ids, **changes))

    return run(scenario())


def raw(engine, ids, **changes):
    return run(ask(engine, "POST", "/generate", body(ids, **changes)))


def test_meta_info_holds_what_we_read_in_the_types_we_expect(engine):
    status, document = raw(engine, prompt(1), rid="turn-1")
    assert status == 200
    meta = document["meta_info"]
    assert {name: type(meta.get(name)) for name in META} == META
    assert meta["id"] == "turn-1"
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (24, 12)
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 12}]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == document["output_ids"]


def test_only_ids_travel_and_every_sampling_field_is_said(engine):
    sent = request_body(request(prompt(2), temperature=1.0))
    assert not {"text", "prompt", "session_params"} & sent.keys()
    # The checkpoint's generation_config.json asks for temperature 0.01 and top_k 1. Whoever fills
    # in from it samples the likeliest token each time.
    turn = generate(engine, prompt(2), max_new_tokens=40, temperature=1.0)
    rows = engine.reference.logprobs(0, [*prompt(2), *turn.output_ids], num_new=40, temperature=1.0)
    assert (rows.argmax(axis=1) == np.array(turn.output_ids)).mean() < 0.9
    assert gaps(engine, turn, prompt(2), temperature=1.0).mean() < engine.mean_nats


@pytest.mark.parametrize("temperature", [0.5, 0.8, 1.3])
def test_logprobs_are_after_temperature_over_the_whole_vocabulary(engine, temperature):
    turn = generate(engine, prompt(3), max_new_tokens=32, temperature=temperature)
    found = gaps(engine, turn, prompt(3), temperature=temperature)
    # What rounding does to logits is divided by the temperature too.
    assert found.mean() < engine.mean_nats / min(temperature, 1.0)
    assert found.max() < engine.max_nats / min(temperature, 1.0)
    assert gaps(engine, turn, prompt(3), temperature=1.0).mean() > 2 * found.mean()


def test_plain_logprobs_stay_those_of_the_whole_vocabulary_when_sampling_is_cut(engine):
    status, document = raw(engine, prompt(4), top_p=0.7, top_k=20, max_new_tokens=24)
    assert status == 200
    entries = document["meta_info"]["output_token_logprobs"]
    ids = document["output_ids"]
    rows = engine.reference.logprobs(0, [*prompt(4), *ids], num_new=24, temperature=0.8)
    reference = rows[np.arange(24), ids]
    assert np.abs(np.array([entry[0] for entry in entries]) - reference).mean() < engine.mean_nats


def test_greedy_takes_the_likeliest_and_reports_temperature_one(engine):
    turn = generate(engine, prompt(5), temperature=0.0, max_new_tokens=16)
    rows = engine.reference.logprobs(0, [*prompt(5), *turn.output_ids], num_new=16, temperature=1.0)
    best = rows.max(axis=1)
    chosen = rows[np.arange(16), list(turn.output_ids)]
    # Rounding may swap two tokens that are equally likely.
    assert (best - chosen).max() < engine.max_nats
    assert np.abs(np.array(turn.sampler_logprobs) - chosen).mean() < engine.mean_nats
    assert generate(engine, prompt(5), temperature=0.0, max_new_tokens=16).output_ids == (
        turn.output_ids
    )


def test_a_support_holds_the_sampled_token_and_is_the_reference_renormalised(engine):
    turn = generate(engine, prompt(6), record="support", top_p=0.9, top_k=40, max_new_tokens=24)
    assert turn.kept_exact
    assert turn.kept.sizes.max() <= 40
    np.testing.assert_allclose(turn.kept.mass(), 1.0, atol=1e-3)
    slots, counts = turn.kept.find(np.array(turn.output_ids))
    assert (counts == 1).all()
    assert turn.sampler_logprobs == tuple(turn.kept.logprobs[slots].tolist())
    rows = engine.reference.logprobs(0, [*prompt(6), *turn.output_ids], num_new=24, temperature=0.8)
    differences = []
    for row, ids, logprobs in zip(rows, *turn.kept.lists(), strict=True):
        norm = np.log(np.exp(row[list(ids)]).sum())
        differences += np.abs(np.array(logprobs) - (row[list(ids)] - norm)).tolist()
        # At most top_p of the mass lies before the last one that is kept.
        assert np.exp(np.sort(row[list(ids)])[1:]).sum() <= 0.9 + 0.05
        assert np.exp(row[list(ids)]).sum() >= 0.9 - 0.05 or len(ids) == 40
    assert np.mean(differences) < engine.mean_nats


def test_selected_reports_one_number_a_token_within_its_set(engine):
    turn = generate(engine, prompt(7), top_p=0.9, top_k=40, max_new_tokens=24)
    assert turn.kept is None
    status, document = raw(
        engine, prompt(7), top_p=0.9, top_k=40, max_new_tokens=24, return_sampling_mask=True
    )
    assert status == 200
    meta, ids = document["meta_info"], document["output_ids"]
    masks = meta["output_token_sampling_mask"]
    assert meta["output_token_sampling_mask_length"] == len(masks) == 24
    assert all(token in mask for token, mask in zip(ids, masks, strict=True))
    rows = engine.reference.logprobs(0, [*prompt(7), *ids], num_new=24, temperature=0.8)
    wanted = [
        row[token] - np.log(np.exp(row[mask]).sum())
        for row, token, mask in zip(rows, ids, masks, strict=True)
    ]
    reported = np.array(meta["output_token_sampling_logprobs"])
    assert reported.shape == (24,)
    assert np.abs(reported - wanted).mean() < engine.mean_nats


def test_greedy_support_is_the_token_itself(engine):
    turn = generate(engine, prompt(8), record="support", temperature=0.0, max_new_tokens=6)
    assert turn.kept.sizes.tolist() == [1] * 6
    assert turn.sampler_logprobs == (0.0,) * 6


def test_a_head_beside_kept_sets_and_alone_is_the_likeliest_over_the_whole_vocabulary(engine):
    for fields in ({"record": "support", "top_p": 0.9, "top_k": 40}, {"record": "head"}):
        turn = generate(engine, prompt(9), head_k=5, max_new_tokens=8, **fields)
        head = turn.head if turn.head is not None else turn.kept
        assert head.sizes.tolist() == [5] * 8
        rows = engine.reference.logprobs(
            0, [*prompt(9), *turn.output_ids], num_new=8, temperature=0.8
        )
        for row, ids, logprobs in zip(rows, *head.lists(), strict=True):
            assert np.abs(np.array(logprobs) - row[list(ids)]).mean() < engine.mean_nats * 3
            assert np.sort(row)[-5:].sum() - row[list(ids)].sum() < engine.max_nats


def test_a_kept_set_without_a_finite_top_k(engine):
    status, _ = raw(engine, prompt(10), top_p=0.9, return_sampling_mask=True)
    assert status == expected("a kept set without a finite top_k", engine)
    turn = generate(engine, prompt(10), record="support", top_p=0.9, top_k=VOCAB)
    assert len(turn.output_ids) == 12


def test_a_stop_token_ends_the_turn_and_is_part_of_it(engine):
    first = generate(engine, prompt(11), temperature=0.0)
    stop = first.output_ids[3]
    until = first.output_ids.index(stop) + 1
    turn = generate(
        engine, prompt(11), temperature=0.0, ignore_eos=False, stop_token_ids=(stop, 262)
    )
    assert turn.finish_reason == "stop"
    assert turn.output_ids == first.output_ids[:until]
    assert turn.output_ids[-1] == stop


def test_seeds(engine):
    turns = [generate(engine, prompt(12), seed=5, temperature=1.0, max_new_tokens=24) for _ in "ab"]
    is_repeated = turns[0].output_ids == turns[1].output_ids
    assert is_repeated is expected("the same seed, the same turn", engine)


def test_the_next_turn_finds_its_context_and_another_salt_does_not(engine):
    context = prompt(14, 60)
    first = generate(engine, context, salt="a", rid="s1")
    longer = (*context, *first.output_ids, *prompt(15, 5))
    again = generate(engine, longer, salt="a", rid="s2")
    other = generate(engine, longer, salt="b", rid="s3")
    assert first.cached_tokens == other.cached_tokens == 0
    assert (again.cached_tokens >= 60) is expected("a prefix is found again", engine)
    for turn in (again, other):
        assert gaps(engine, turn, longer).mean() < 2 * engine.mean_nats


def test_a_batch_gives_each_request_its_own_parameters(engine):
    temperatures = (0.5, 1.0, 2.0)

    async def scenario():
        async with client_of(engine) as client:
            return await asyncio.gather(
                *[
                    client.generate(
                        request(
                            prompt(20 + n), rid=f"b{n}", temperature=temperatures[n % 3], seed=n,
                            max_new_tokens=40,
                        )
                    )
                    for n in range(6)
                ]
            )  # fmt: skip

    for n, turn in enumerate(run(scenario())):
        found = [gaps(engine, turn, prompt(20 + n), temperature=t).mean() for t in temperatures]
        assert int(np.argmin(found)) == n % 3, found
        assert min(found) < 2 * engine.mean_nats / min(temperatures[n % 3], 1.0)


def test_a_prompt_that_does_not_fit_is_a_400_and_harms_nobody(engine):
    with pytest.raises(EngineRefused, match="400"):
        generate(engine, prompt(30, CONTEXT + 10))
    status, _ = raw(engine, prompt(30, CONTEXT - 10), max_new_tokens=40)
    assert status == 400
    status, _ = raw(engine, [])
    assert status == 400
    assert len(generate(engine, prompt(30)).output_ids) == 12


def test_text_is_not_part_of_the_contract(engine):
    document = body(prompt(31))
    del document["input_ids"]
    status, _ = run(ask(engine, "POST", "/generate", {**document, "text": "w1 w2"}))
    assert status == expected("text instead of input_ids", engine)
