"""Replaying expert choices: identity, forced routes against plain float64, what is refused."""

import copy
import dataclasses

import numpy as np
import pytest
import torch

from rlmix.batch.packing import pack_samples
from rlmix.core.errors import DataError, TrainerError
from rlmix.trainer.policy import Policy
from rlmix.trainer.routing import Routers, routing_metrics, shares_at
from rlmix.trainer.step import run_micro_batches, step_denominator
from tests.unit.trainer.conftest import ALGO
from tests.unit.trainer.dense_model import DenseModel, attention, dense_loss, normed

LAYERS, EXPERTS, TOP_K = 2, 4, 2
REPLAY = dataclasses.replace(ALGO, routing_replay=True)


@pytest.fixture(scope="module")
def policy(model_dir):
    """As it trains: BF16."""
    return Policy.load(model_dir, replays_routing=True)


@pytest.fixture(scope="module")
def float64_policy(model_dir):
    loaded = Policy.load(model_dir, attention="eager", experts="eager")
    return Policy(copy.deepcopy(loaded.model).double(), replays_routing=True)


@pytest.fixture(scope="module")
def chosen(samples):
    return [sample for sample in samples if sample.advantage][:6]


@torch.no_grad()
def own_routes(policy, batch):
    """int16 [B, T, L, K] of the policy's own choices in exactly this batch."""
    taken = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, output: taken.append(output[2]))
        for layer in policy.model.model.layers
    ]
    policy.hidden(torch.from_numpy(batch.ids_BT))
    for hook in hooks:
        hook.remove()
    rows, length = batch.ids_BT.shape
    stacked = torch.stack(taken, dim=1).view(rows, length, LAYERS, TOP_K)
    return stacked.numpy().astype(np.int16)


def run(policy, batches, algo=REPLAY):
    """Loss, gradients and result of the trainer's own code."""
    for parameter in policy.parameters().values():
        parameter.grad = None
    result = run_micro_batches(
        policy, batches, algo, denominator=step_denominator(batches, algo), trainer_version=2
    )
    gradients = {name: p.grad.clone() for name, p in policy.parameters().items()}
    return result, gradients


def with_experts(sample, experts):
    return dataclasses.replace(sample, experts=experts.astype(np.int16))


def forced(samples, *, seed=0):
    """Two random different experts for every token and layer, in random order."""
    generator = np.random.default_rng(seed)
    return [
        with_experts(s, generator.random((len(s.ids), LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K])
        for s in samples
    ]


class RoutedDense(DenseModel):
    """The plain float64 model with experts that are given, by the ids of a session."""

    def __init__(self, parameters, samples):
        super().__init__(parameters)
        self.routes = {tuple(s.ids.tolist()): s.experts.astype(np.int64) for s in samples}

    def hidden(self, ids_BT):
        x = self.weights["model.embed_tokens.weight"][ids_BT]
        taken = torch.from_numpy(self.routes[tuple(ids_BT[0].tolist())])
        for layer in range(LAYERS):
            prefix = f"model.layers.{layer}."
            w = {k[len(prefix) :]: v for k, v in self.weights.items() if k.startswith(prefix)}
            x = x + attention(normed(x, w["input_layernorm.weight"]), w)
            inner = normed(x, w["post_attention_layernorm.weight"])
            x = x + routed_experts(inner[0], taken[:, layer], w)[None]
        return normed(x, self.weights["model.norm.weight"])


def routed_experts(x_TD, ids_TK, w):
    """One token and one expert at a time: share = e^score / sum of e^score over the K given."""
    rows = []
    for x, ids in zip(x_TD, ids_TK.tolist(), strict=True):
        if -1 in ids:
            ids = (w["mlp.gate.weight"] @ x).topk(TOP_K).indices.tolist()
        scores = torch.stack([(w["mlp.gate.weight"][e] * x).sum() for e in ids]).exp()
        out = 0.0
        for e, share in zip(ids, scores / scores.sum(), strict=True):
            gate, up = (w["mlp.experts.gate_up_proj"][e] @ x).chunk(2)
            inner = gate * gate.sigmoid() * up
            out = out + share * (w["mlp.experts.down_proj"][e] @ inner)
        rows.append(out)
    return torch.stack(rows)


def test_replaying_the_trainers_own_routes_changes_no_bit_of_logprobs_and_gradients(policy, chosen):
    batches = pack_samples(chosen, max_tokens=150)
    routed = [dataclasses.replace(b, experts_BTLK=own_routes(policy, b)) for b in batches]
    plain, plain_gradients = run(policy, batches)
    replayed, gradients = run(policy, routed)
    assert torch.equal(plain.facts.log_ratios_T, replayed.facts.log_ratios_T)
    assert plain.loss == replayed.loss
    assert all(torch.equal(gradients[name], grad) for name, grad in plain_gradients.items())
    metrics = routing_metrics(routed, replayed.routing, pool_names=("b200", "h100"))
    assert metrics["routing/agree_frac"] == 1.0


def test_replayed_positions_leave_the_others_to_the_router_itself(policy, chosen):
    """A record for every other token only; the rest is -1 and routes to the same as before."""
    (batch,) = pack_samples(chosen[:2], max_tokens=1000)
    routes = own_routes(policy, batch)
    routes[:, ::2] = -1
    part = dataclasses.replace(batch, experts_BTLK=routes)
    with torch.no_grad():
        plain = policy.token_logprobs(batch, temperature=1.0, replay=True)
        found = policy.token_logprobs(part, temperature=1.0, replay=True)
    assert torch.equal(plain.trainer_P, found.trainer_P)
    assert found.routing.replayed_BT[:, ::2].sum() == 0
    assert (found.routing.replayed_BT[:, 1::2] == LAYERS).all()
    assert (plain.routing.replayed_BT == 0).all()


def test_forced_routes_give_the_logprobs_and_every_gradient_of_plain_float64(
    float64_policy, chosen
):
    """Transformers keeps its softmaxes and norms in float32 in a float64 model: 2e-6."""
    samples = forced(chosen)
    samples[1] = dataclasses.replace(samples[1], experts=None)
    samples[2].experts[5:9] = -1
    result, gradients = run(float64_policy, pack_samples(samples, max_tokens=150))
    blank = np.full((len(samples[1].ids), LAYERS, TOP_K), -1)
    dense = RoutedDense(
        float64_policy.parameters(),
        [with_experts(s, blank) if s.experts is None else s for s in samples],
    )
    loss, _ = dense_loss(dense, samples, REPLAY)
    loss.backward()
    assert result.loss == pytest.approx(float(loss.detach()), rel=2e-6)
    for name, weight in dense.weights.items():
        scale = float(weight.grad.norm())
        assert float((gradients[name] - weight.grad).norm()) < 1e-5 * scale, name
    own, _ = run(float64_policy, pack_samples(chosen, max_tokens=150))
    assert abs(own.loss - result.loss) > 1e-3  # The routes do matter here.


def test_shares_are_the_routers_softmax_at_the_recorded_ids():
    """Scores ln 1, ln 2, ln 3, ln 4: softmax 0.1 0.2 0.3 0.4; at (3, 0) 0.4 0.1, normalised 0.8
    0.2."""
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).log()
    ids = torch.tensor([[3, 0]])
    raw = shares_at(logits, ids, is_normalising=False)
    assert raw[0].tolist() == pytest.approx([0.4, 0.1])
    assert shares_at(logits, ids, is_normalising=True)[0].tolist() == pytest.approx([0.8, 0.2])


def test_the_metrics_count_token_layers_once_and_by_pool(policy, chosen):
    """Session 0 (b200) complete but for its last token, session 1 (h100) without a record."""
    pair = [next(s for s in chosen if s.pool_names == (name,)) for name in ("b200", "h100")]
    length = len(pair[0].ids)
    (first,) = pack_samples(pair[:1], max_tokens=1000)
    routes = own_routes(policy, first)[0]
    routes[-1] = -1
    routes[3, 0] = [e for e in range(EXPERTS) if e not in routes[3, 0]]  # The other two experts.
    pair[0] = with_experts(pair[0], routes)
    batches = pack_samples(pair, max_tokens=length)
    result, _ = run(policy, batches)
    metrics = routing_metrics(batches, result.routing, pool_names=("b200", "h100"))
    replayed = LAYERS * (length - 1)
    total = replayed + LAYERS * (len(pair[1].ids) - 1)
    assert metrics["routing/replayed_frac"] == pytest.approx(replayed / total)
    # One choice was forced apart; a later layer or token may follow it.
    assert 0.7 < metrics["routing/agree_frac"] <= (replayed - 1) / replayed
    assert "routing/by_pool/h100/agree_frac" not in metrics
    assert metrics["routing/by_pool/b200/agree_frac"] <= 1.0


def test_the_hooks_are_gone_after_a_forward_and_after_an_error(policy, chosen):
    (batch,) = pack_samples(forced(chosen[:1]), max_tokens=1000)
    with torch.no_grad():
        policy.token_logprobs(batch, temperature=1.0, replay=True)
    routers = Routers(policy.model)
    with (
        pytest.raises(RuntimeError, match="in the middle"),
        routers.replaying(batch.experts_BTLK),
    ):
        raise RuntimeError("in the middle")
    assert not any(module._forward_hooks for module in policy.model.modules())


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ([0, 0], r"session s0, token 4, layer 1: recorded experts \[0, 0\], must be 2 different"),
        ([1, 4], r"recorded experts \[1, 4\], must be 2 different ids below 4"),
        ([1, -1], r"recorded experts \[1, -1\]"),
    ],
)
def test_a_record_that_no_router_can_have_made_is_refused(policy, chosen, experts, message):
    """All zeros is what SGLang gives when its MoE kernel routes by itself."""
    sample = forced(chosen[:1])[0]
    sample.experts[4, 1] = experts
    (batch,) = pack_samples([sample], max_tokens=1000)
    with pytest.raises(DataError, match=message):
        policy.check_routes(batch)


def test_a_record_of_another_model_is_refused(policy, chosen):
    narrow = with_experts(chosen[0], np.zeros((len(chosen[0].ids), 1, TOP_K)))
    (batch,) = pack_samples([narrow], max_tokens=1000)
    with pytest.raises(DataError, match=r"2 experts in each of 1 layers; the model takes 2"):
        policy.check_routes(batch)
    with pytest.raises(DataError, match="experts of different sizes"):
        pack_samples([narrow, *forced(chosen[1:2])], max_tokens=1000)


def test_a_model_without_experts_and_an_unknown_router_are_refused_when_loaded():
    from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3Config

    small = {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    }  # fmt: skip
    dense = AutoModelForCausalLM.from_config(Qwen3Config(**small))
    with pytest.raises(TrainerError, match="Qwen3ForCausalLM has no experts; set"):
        Routers(dense)
    other = AutoModelForCausalLM.from_config(
        GptOssConfig(**small, num_local_experts=4, num_experts_per_tok=2)
    )
    with pytest.raises(TrainerError, match=r"GptOssForCausalLM has a router that cannot be repl"):
        Routers(other)


FAMILIES = {
    "qwen2_moe": {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {"moe_intermediate_size": 16, "norm_topk_prob": False},
    "qwen3_next": {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "qwen3_5_moe_text": {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "olmoe": {},
}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_each_supported_family_routes_as_told_and_as_before(model_type):
    """Own routes: no bit changes. Other routes: every router gets a gradient through them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        model_type, vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=8,
        num_local_experts=8, num_experts_per_tok=2, initializer_range=0.2, eos_token_id=1,
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16,
        linear_value_head_dim=16, **FAMILIES[model_type],
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    routers = Routers(model)
    assert routers.layers == (0, 1, 2, 3)
    ids = torch.randint(0, 64, (2, 12))
    taken = []
    hooks = [
        module.register_forward_hook(lambda _, __, output: taken.append(output[2]))
        for _, module, _ in routers._routers
    ]
    native = model(ids, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    own = torch.stack(taken, 1).view(2, 12, 4, 2).numpy()
    with routers.replaying(own) as tally:
        same = model(ids, use_cache=False).logits
    assert torch.equal(native, same)
    assert (tally.agreed_BT == 4).all()
    with routers.replaying((own + 1) % 8) as tally:
        other = model(ids, use_cache=False).logits
    assert not torch.equal(native, other)
    assert (tally.agreed_BT < 4).any()
    other.float().square().mean().backward()
    assert all(float(router.weight.grad.abs().sum()) > 0 for _, router, _ in routers._routers)
