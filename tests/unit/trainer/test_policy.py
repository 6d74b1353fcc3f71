import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlmix.batch.packing import pack_samples
from rlmix.core.errors import TrainerError
from rlmix.trainer.policy import Policy, default_attention


@pytest.fixture(scope="module")
def policy(model_dir):
    return Policy.load(model_dir)


def test_state_has_the_names_and_bytes_of_the_folder_it_was_loaded_from(policy, model_dir):
    on_disk = load_file(model_dir / "model.safetensors")
    state = policy.state()
    assert sorted(state) == sorted(on_disk)
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in state  # one by one, as engines load
    assert all(torch.equal(state[name], tensor) for name, tensor in on_disk.items())


def test_state_is_a_copy_that_later_steps_do_not_touch(policy):
    state = policy.state()
    name = "model.embed_tokens.weight"
    state[name].zero_()
    assert policy.state()[name].abs().sum() > 0


def test_tied_parameters_are_trained_once(policy):
    names = list(policy.parameters())
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_padding_does_not_change_a_tokens_logprob(policy, samples):
    def logprobs(chosen):
        (batch,) = pack_samples(chosen, max_tokens=10_000)
        with torch.no_grad():
            found = policy.token_logprobs(batch, temperature=1.0, replay=True)
        return {
            (batch.session_ids[row], int(col)): float(value)
            for row, col, value in zip(batch.rows_P, batch.cols_P, found.trainer_P, strict=True)
        }

    shortest = min((s for s in samples if s.advantage), key=lambda s: len(s.ids))
    longest = max((s for s in samples if s.advantage), key=lambda s: len(s.ids))
    alone, together = logprobs([shortest]), logprobs([shortest, longest])
    assert len(longest.ids) > len(shortest.ids) + 5
    for key, value in alone.items():
        assert together[key] == pytest.approx(value, abs=0.03)  # BF16 kernels differ by shape


def test_kept_logprobs_sum_to_one_and_contain_the_sampled_token(policy, samples):
    (batch,) = pack_samples(samples[:1], max_tokens=10_000)
    with torch.no_grad():
        found = policy.token_logprobs(batch, temperature=0.7, replay=True)
    assert found.support.is_exact
    sums = found.support.trainer_logprobs_TK.exp().sum(dim=1)
    assert sums.tolist() == pytest.approx([1.0] * len(sums), abs=1e-5)
    is_sampled = torch.from_numpy(batch.kept_ids_PK == batch.sampled_P[:, None])
    is_sampled &= torch.isfinite(found.support.sampler_logprobs_TK)
    in_kept = found.support.trainer_logprobs_TK[is_sampled]
    assert in_kept.tolist() == pytest.approx(found.trainer_P.tolist(), abs=1e-5)


def test_without_replay_a_kept_set_is_no_support(policy, samples):
    (batch,) = pack_samples(samples[:1], max_tokens=10_000)
    with torch.no_grad():
        replayed = policy.token_logprobs(batch, temperature=1.0, replay=True)
        plain = policy.token_logprobs(batch, temperature=1.0, replay=False)
    assert plain.support is None
    assert (plain.trainer_P < replayed.trainer_P).all()


def test_a_folder_that_lacks_a_tensor_or_has_one_too_many_is_refused(model_dir, tmp_path):
    tensors = load_file(model_dir / "model.safetensors")
    for number, (change, message) in enumerate(
        (
            ({"model.norm.weight": None}, r"missing_keys.*model\.norm\.weight"),
            ({"model.extra.weight": torch.ones(2)}, r"unexpected_keys.*model\.extra\.weight"),
            ({"model.norm.weight": torch.ones(3)}, r"mismatched_keys.*model\.norm\.weight"),
        )
    ):
        folder = tmp_path / str(number)
        shutil.copytree(model_dir, folder)
        changed = {k: v for k, v in (tensors | change).items() if v is not None}
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(TrainerError, match=message):
            Policy.load(folder)


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(TrainerError, match=r"has no config\.json"):
        Policy.load(tmp_path)


def test_a_model_that_scales_its_logits_is_refused(tmp_path):
    from transformers import AutoModelForCausalLM, GraniteConfig

    config = GraniteConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, logits_scaling=8.0, initializer_range=0.5,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with pytest.raises(TrainerError, match="GraniteForCausalLM is not a plain matrix"):
        Policy(model)


def test_a_dense_model_with_an_untied_head_loads_too(tmp_path, samples):
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=512, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, tie_word_embeddings=False,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    policy = Policy.load(tmp_path)
    assert "lm_head.weight" in policy.parameters()
    assert "lm_head.weight" in policy.state()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3"
    (batch,) = pack_samples(samples[:1], max_tokens=1000)
    assert torch.isfinite(
        policy.token_logprobs(batch, temperature=1.0, replay=True).trainer_P
    ).all()


def test_long_contexts_never_get_the_attention_whose_memory_grows_with_the_square(policy):
    from transformers import Qwen3Config

    assert default_attention(Qwen3Config(max_position_embeddings=262_144)) == "sdpa"
    assert default_attention(Qwen3Config(max_position_embeddings=512)) == "eager"
    assert policy.model.config._attn_implementation == "eager"
    assert policy.model.config._experts_implementation == "grouped_mm"
