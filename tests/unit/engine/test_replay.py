"""Mask replay on a real trace: a conversation that the embedded engine sampled over HTTP is scored
again by its own BF16 forward, token by token, and renormalised on the kept sets it recorded."""

# T sampled tokens, V vocabulary, K slots of the widest kept set

import asyncio

import numpy as np
import pytest
import torch

from rlmix.algos.support import replayed_logprobs
from rlmix.core.candidates import Candidates
from rlmix.engine.client import EngineClient
from rlmix.engine.embedded.attention import Chunk
from rlmix.engine.embedded.forward import Forward, Step
from rlmix.engine.embedded.kv import KvCache
from rlmix.engine.embedded.profile import Profile
from rlmix.engine.embedded.shape import read_shape
from rlmix.engine.embedded.weights import load_weights, read_config
from rlmix.engine.protocol import GenerateRequest, SamplingParams
from rlmix.model.bundle import resolve_model
from rlmix.model.chat import ChatRenderer

TEMPERATURE = 0.7
TURNS, SESSIONS = 3, 4
FORMATS = {"weights": "bf16", "activations": "bf16", "attention": "fa3", "accelerator": "h100"}
ISSUES = (
    "total() in sums.py returns the wrong sign for two numbers.",
    "last_item() fails for a list of one.",
    "The average of an empty list should be 0.",
    "names are sorted in the wrong order.",
)


async def talk(url, renderer, number):
    """One conversation; per turn what was in the context before it, and the engine's answer."""
    client = EngineClient(url, timeout_s=60)
    context = renderer.prompt_ids(ISSUES[number])
    turns = []
    try:
        for turn in range(TURNS):
            answer = await client.generate(
                GenerateRequest(
                    session_id=f"s{number}",
                    request_id=f"s{number}.{turn}",
                    input_ids=tuple(context),
                    sampling=SamplingParams(
                        temperature=TEMPERATURE,
                        top_p=0.9,
                        top_k=-1,
                        max_new_tokens=30,
                        stop_token_ids=renderer.stop_token_ids,
                        seed=100 * number + turn,
                    ),
                    record="support",
                    head_k=8,
                )
            )
            turns.append((list(context), answer))
            ended = answer.output_ids[-1] in renderer.stop_token_ids
            seen = renderer.observation_ids(0, f"line {turn}\n", ended_with_stop=ended)
            context += [*answer.output_ids, *seen]
    finally:
        await client.close()
    return turns


class Replay:
    """The engine's forward outside the engine, one conversation at a time."""

    def __init__(self, folder, profile):
        # As the server does; MKL adds in another order with more.
        torch.set_num_threads(1)
        self.shape = read_shape(read_config(folder))
        self.profile = profile
        self.weights = load_weights(folder, shape=self.shape, profile=profile)

    def logits(self, turns):
        """float64 [T, V] for each turn. What the engine was given goes in as one chunk per turn,
        what it sampled as one step per token."""
        cache = KvCache(self.shape, num_slots=1, context_length=1024)
        forward = Forward(self.shape, self.profile, cache)
        done, rows = 0, []
        for context, answer in turns:
            given = torch.tensor(context[done:])
            chunk = Chunk(slot=0, start=done, num_tokens=len(given), needs_logits=True)
            step = Step(
                token_ids_T=given,
                positions_T=torch.arange(done, len(context)),
                num_decoding=0,
                longest_decoding=0,
                chunks=(chunk,),
            )
            found = [forward.logits(self.weights, step)[0]]
            for place, token in enumerate(answer.output_ids[:-1], start=len(context)):
                step = Step(
                    token_ids_T=torch.tensor([token]),
                    positions_T=torch.tensor([place]),
                    num_decoding=1,
                    longest_decoding=place + 1,
                    chunks=(),
                )
                found.append(forward.logits(self.weights, step)[0])
            rows.append(torch.stack(found).double())
            # The last sampled token was never computed; it is part of the next turn's context.
            done = len(context) + len(answer.output_ids) - 1
        return rows


def padded(kept: Candidates):
    is_slot = np.arange(kept.sizes.max()) < kept.sizes[:, None]
    ids = np.zeros(is_slot.shape, dtype=np.int64)
    ids[is_slot] = kept.ids
    return torch.from_numpy(ids), torch.from_numpy(is_slot)


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_replay_on_the_recorded_sets_gives_ratio_1_for_every_token_of_a_real_trace(
    kv, tmp_path, start_server
):
    folder = resolve_model("bundled:tiny")
    renderer = ChatRenderer(folder)

    async def scenario(url):
        return await asyncio.gather(*(talk(url, renderer, n) for n in range(SESSIONS)))

    flags = {**FORMATS, "kv": kv, "max_running_requests": SESSIONS}
    with start_server(folder, tmp_path / "ready.json", **flags) as (url, _):
        sessions = asyncio.run(scenario(url))
    replay = Replay(folder, Profile(**FORMATS, kv=kv))
    ratios, bare_ratios, gaps = [], [], []
    for turns in sessions:
        for (_, answer), logits_TV in zip(turns, replay.logits(turns), strict=True):
            logits_TV = logits_TV / TEMPERATURE
            sampled_T = torch.tensor(answer.output_ids)
            sampler_T = torch.tensor(answer.sampler_logprobs, dtype=torch.float64)
            ids_TK, kept_TK = padded(answer.kept)
            trainer_T, trainer_TK = replayed_logprobs(logits_TV, sampled_T, ids_TK, kept_TK)
            ratios += (trainer_T - sampler_T).exp().tolist()
            gaps += (trainer_TK[kept_TK] - torch.tensor(answer.kept.logprobs)).abs().tolist()
            full_TV = logits_TV.log_softmax(-1)
            bare_ratios += (full_TV[range(len(sampled_T)), sampled_T] - sampler_T).exp().tolist()
            head_TK = full_TV.gather(1, padded(answer.head)[0])
            assert head_TK.flatten().tolist() == pytest.approx(answer.head.logprobs, abs=1e-5)
    assert len(ratios) > 100
    assert any(answer.cached_tokens > 0 for turns in sessions for _, answer in turns)
    assert max(abs(ratio - 1) for ratio in ratios) < 1e-6
    # The whole recorded distribution, not only the sampled token.
    assert max(gaps) < 5e-7
    # Without replay the trainer looks up to 10 % less sure of every token that was cut around.
    assert min(bare_ratios) < 0.93
    assert sum(ratio < 0.999 for ratio in bare_ratios) > len(bare_ratios) / 4
    assert max(bare_ratios) < 1 + 1e-6
