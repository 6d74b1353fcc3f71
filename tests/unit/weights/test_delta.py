import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rlmix.core.errors import WeightSyncError
from rlmix.weights.delta import apply_file, encode_file
from rlmix.weights.manifest import hash_file


def tensors(seed, *, step=0.0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(300, 64, generator=generator)
    noise = torch.randn(300, 64, generator=torch.Generator().manual_seed(seed + 1)) * step
    return {
        "a.weight": (weight + noise).bfloat16(),
        "b.weight": (weight + noise).to(torch.float8_e4m3fn),
        "b.weight_scale_inv": (weight + noise).abs().amax(0).float(),
        "c.weight": ((weight + noise) * 8).round().to(torch.uint8),
        "d.bias": (weight + noise)[0, :3].bfloat16(),
        "e.scale": (weight + noise)[0, 0].float(),
        "f.count": torch.tensor([1, 2, 3], dtype=torch.int64),
    }


def files(tmp_path, *, step=0.001, **changed):
    old, new = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
    save_file(tensors(0), old, metadata={"format": "pt"})
    save_file({**tensors(0, step=step), **changed}, new, metadata={"format": "pt"})
    return old, new


def test_a_file_of_all_formats_comes_back_byte_for_byte(tmp_path):
    old, new = files(tmp_path)
    delta = encode_file(old, new)
    assert delta is not None
    assert len(delta.data) < new.stat().st_size / 2
    # BF16 and FP8 elements, 3 biases, and two codes in each byte of c.
    assert delta.num_elements == 300 * 64 * 4 + 3
    entry = apply_file(old, delta.data, tmp_path / "made.safetensors")
    assert (tmp_path / "made.safetensors").read_bytes() == new.read_bytes()
    assert entry == hash_file(new)


def test_a_tensor_more_or_of_another_shape_has_no_delta(tmp_path):
    old, new = files(tmp_path, extra=torch.zeros(3))
    assert encode_file(old, new) is None
    old, new = files(tmp_path, **{"a.weight": torch.zeros(2, 2)})
    assert encode_file(old, new) is None


def test_only_the_bits_count_so_minus_zero_and_nan_arrive(tmp_path):
    odd = torch.tensor([0.0, -0.0, float("nan"), float("inf")]).bfloat16()
    old, new = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
    save_file({"x": odd}, old)
    save_file({"x": odd.flip(0)}, new)
    delta = encode_file(old, new)
    apply_file(old, delta.data, tmp_path / "made")
    assert (tmp_path / "made").read_bytes() == new.read_bytes()


def test_any_damage_is_an_error_or_another_hash_and_never_passes(tmp_path):
    old, new = files(tmp_path)
    data = encode_file(old, new).data
    expected = hash_file(new)
    generator = np.random.default_rng(0)
    for place in generator.integers(0, len(data), 40):
        damaged = bytearray(data)
        damaged[place] ^= 1 << int(generator.integers(0, 8))
        try:
            entry = apply_file(old, bytes(damaged), tmp_path / "made")
        except WeightSyncError:
            continue
        assert entry != expected
    for cut in (0, 4, 100, len(data) // 2):
        with pytest.raises(WeightSyncError):
            apply_file(old, data[:cut], tmp_path / "made")


def test_a_delta_on_another_base_does_not_give_the_new_file(tmp_path):
    old, new = files(tmp_path)
    data = encode_file(old, new).data
    save_file(tensors(9), old, metadata={"format": "pt"})
    try:
        entry = apply_file(old, data, tmp_path / "made")
    except WeightSyncError:
        return
    assert entry != hash_file(new)


def test_no_safetensors_file_is_named(tmp_path):
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"\xff" * 20)
    with pytest.raises(WeightSyncError, match=r"bad\.safetensors is no safetensors file"):
        encode_file(bad, bad)
