"""The forward against Transformers in float32, and against itself in other batch shapes."""

import pytest
import torch

from rlmix.core.errors import ConfigError, WeightSyncError
from rlmix.engine.embedded.attention import Chunk
from rlmix.engine.embedded.forward import Forward, Step
from rlmix.engine.embedded.kv import KvCache
from rlmix.engine.embedded.profile import Profile
from rlmix.engine.embedded.shape import read_shape
from rlmix.engine.embedded.weights import load_weights, read_config

IDS = torch.randint(0, 512, (90,), generator=torch.Generator().manual_seed(5))


class Bench:
    """A forward with its cache, driven by hand."""

    def __init__(self, folder, **profile):
        fields = {
            "accelerator": "cpu",
            "weights": "bf16",
            "activations": "fp32",
            "kv": "fp32",
            "attention": "triton",
            **profile,
        }
        self.profile = Profile(**fields)
        self.shape = read_shape(read_config(folder))
        self.weights = load_weights(folder, shape=self.shape, profile=self.profile)
        self.cache = KvCache(self.shape, num_slots=8, context_length=256)
        self.forward = Forward(self.shape, self.profile, self.cache)

    def prefill(self, ids, *, slot=0, start=0):
        """Logits after the last of `ids`."""
        chunk = Chunk(slot=slot, start=start, num_tokens=len(ids), needs_logits=True)
        step = Step(
            token_ids_T=ids,
            positions_T=torch.arange(start, start + len(ids)),
            num_decoding=0,
            longest_decoding=0,
            chunks=(chunk,),
        )
        return self.forward.logits(self.weights, step)[0]

    def decode(self, tokens, positions):
        """Logits after one more token in slots 0, 1, ..."""
        step = Step(
            token_ids_T=torch.tensor(tokens),
            positions_T=torch.tensor(positions),
            num_decoding=len(tokens),
            longest_decoding=max(positions) + 1,
            chunks=(),
        )
        return self.forward.logits(self.weights, step)

    def all_logits(self, ids):
        """[T, V], by stepwise decoding after a prefill of 10."""
        rows = [self.prefill(ids[:10])]
        rows += [self.decode([int(ids[t])], [t])[0] for t in range(10, len(ids))]
        return torch.stack(rows)


def reference(model, ids):
    with torch.no_grad():
        return model(ids[None]).logits[0]


def difference(first, second):
    return (torch.log_softmax(first, -1) - torch.log_softmax(second, -1)).abs().max().item()


def test_prefill_and_stepwise_decode_agree_with_transformers_in_float32(tiny_model, view_folders):
    bench = Bench(view_folders["bf16", 0])
    expected = reference(tiny_model, IDS)
    assert difference(bench.all_logits(IDS), expected[9:]) < 1e-5
    assert difference(bench.prefill(IDS), expected[-1]) < 1e-5


@pytest.mark.parametrize("accelerator", ["b300", "b200", "h100", "a100", "rtx_pro_6000"])
def test_every_accelerators_order_of_addition_computes_the_same_function(
    tiny_model, view_folders, accelerator
):
    bench = Bench(view_folders["bf16", 0], accelerator=accelerator)
    assert difference(bench.prefill(IDS), reference(tiny_model, IDS)[-1]) < 1e-5


@pytest.mark.parametrize(
    "changes",
    [
        {"mlp_only_layers": [1], "tie_word_embeddings": True},
        {"decoder_sparse_step": 2, "norm_topk_prob": False},
        {"num_experts": 24, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
        {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 24},
    ],
    ids=["dense layer, tied head", "sparse step 2, raw shares", "many experts", "no groups"],
)
def test_other_shapes_agree_with_transformers_too(tmp_path, make_model, make_view, changes):
    model = make_model(3, **changes)
    bench = Bench(make_view(model, tmp_path / "model", "bf16"))
    assert difference(bench.all_logits(IDS[:40]), reference(model, IDS[:40])[9:]) < 1e-5


def test_a_chunked_prompt_gives_the_logits_of_a_whole_one(view_folders):
    bench = Bench(view_folders["bf16", 0])
    whole = bench.prefill(IDS)
    bench.prefill(IDS[:33], slot=2)
    bench.prefill(IDS[33:70], slot=2, start=33)
    assert difference(bench.prefill(IDS[70:], slot=2, start=70), whole) < 1e-5


def test_prompts_and_decoding_rows_share_a_step_without_touching_each_other(view_folders):
    bench = Bench(view_folders["bf16", 0], activations="bf16", kv="fp8", attention="fa3")
    lengths = (20, 45, 71)
    for slot, length in enumerate(lengths):
        bench.prefill(IDS[:length], slot=slot)
    alone_prompt = bench.prefill(IDS[5:60], slot=3)
    alone = []
    for length in lengths:
        bench.prefill(IDS[:length], slot=0)
        alone.append(bench.decode([int(IDS[length])], [length])[0])
    for slot, length in enumerate(lengths):
        bench.prefill(IDS[:length], slot=slot)
    step = Step(
        token_ids_T=torch.cat((IDS[list(lengths)], IDS[5:60])),
        positions_T=torch.cat((torch.tensor(lengths), torch.arange(55))),
        num_decoding=3,
        longest_decoding=72,
        chunks=(Chunk(slot=3, start=0, num_tokens=55, needs_logits=True),),
    )
    mixed = bench.forward.logits(bench.weights, step)
    assert difference(mixed[:3], torch.stack(alone)) < 1e-5
    assert difference(mixed[3], alone_prompt) < 1e-5


def test_what_a_former_request_left_in_a_slot_changes_nothing(view_folders):
    bench = Bench(view_folders["bf16", 0])
    first = bench.prefill(IDS[:30])
    bench.prefill(IDS.flip(0), slot=0)
    assert torch.equal(bench.prefill(IDS[:30]), first)


def mean_gap(bench, expected):
    got = torch.log_softmax(bench.all_logits(IDS), -1)
    wanted = torch.log_softmax(expected[9:], -1)
    chosen = wanted.argmax(-1, keepdim=True)
    return (got.gather(1, chosen) - wanted.gather(1, chosen)).abs().mean().item()


def test_the_gap_to_float32_grows_with_the_coarseness_of_the_format(tiny_model, view_folders):
    expected = reference(tiny_model, IDS)
    weights = {
        view: mean_gap(Bench(view_folders[view, 0], weights=view), expected)
        for view in ("bf16", "fp8", "nvfp4")
    }
    assert weights["bf16"] < 1e-5 < weights["fp8"] < weights["nvfp4"]
    kv = {
        kv: mean_gap(Bench(view_folders["bf16", 0], kv=kv), expected)
        for kv in ("fp32", "bf16", "fp8")
    }
    assert kv["fp32"] < kv["bf16"] < kv["fp8"]
    rounded = mean_gap(Bench(view_folders["bf16", 0], activations="bf16"), expected)
    assert rounded > 1e-4


def test_chips_of_different_generations_differ_in_the_last_bits_of_bf16(view_folders):
    def logits(accelerator, **profile):
        bench = Bench(
            view_folders["bf16", 0], accelerator=accelerator, activations="bf16", **profile
        )
        return bench.all_logits(IDS[:40])

    h100 = logits("h100", kv="bf16")
    assert 1e-6 < difference(h100, logits("a100", kv="bf16")) < 1
    # One generation, and yet SGLang has tuned tiles for the one and not for the other.
    assert 1e-6 < difference(h100, logits("h200", kv="bf16")) < 1
    with_fp8_query = logits("h100", kv="fp8", attention="fa3")
    with_bf16_query = logits("h100", kv="fp8", attention="flashinfer")
    assert difference(with_fp8_query, with_bf16_query) > 1e-4


def test_the_cache_holds_only_numbers_of_its_format(view_folders):
    for kv, dtype in (("fp8", torch.float8_e4m3fn), ("bf16", torch.bfloat16)):
        bench = Bench(view_folders["bf16", 0], kv=kv)
        bench.prefill(IDS)
        held = bench.cache.read(0, 0, len(IDS), dtype=torch.float32)
        assert torch.equal(held, held.to(dtype).float())
        assert held.abs().max() > 0


def test_unknown_profiles_and_models_are_refused_with_what_is_known():
    with pytest.raises(ConfigError, match="accelerator='tpu'; it reproduces b300"):
        Profile(accelerator="tpu", weights="bf16", activations="bf16", kv="fp8", attention="fa3")
    with pytest.raises(ConfigError, match="model_type='llama'"):
        read_shape({"model_type": "llama"})


def test_a_folder_that_is_not_what_the_replica_serves_is_refused(
    view_folders, tmp_path, make_model, make_view
):
    bench = Bench(view_folders["bf16", 0])

    def load(folder):
        return load_weights(folder, shape=bench.shape, profile=bench.profile)

    with pytest.raises(WeightSyncError, match="is the fp8 view; this replica serves bf16"):
        load(view_folders["fp8", 0])
    with pytest.raises(WeightSyncError, match=r"no readable config\.json"):
        load(tmp_path)
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in view_folders["bf16", 0].iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(WeightSyncError, match="cannot be read"):
        load(broken)
    other = make_view(make_model(4, num_hidden_layers=2), tmp_path / "other", "bf16")
    with pytest.raises(WeightSyncError, match="another shape"):
        load(other)


def test_equal_checkpoints_have_equal_checksums(view_folders):
    def checksum(version, **profile):
        return Bench(view_folders["bf16", version], **profile).weights.checksum

    assert checksum(0) == checksum(0, accelerator="h100")
    assert checksum(0) != checksum(1)
