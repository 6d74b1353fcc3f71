"""Published views against the numerics room: every view is made from the BF16 state."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlmix.core.errors import DataError, WeightSyncError
from rlmix.numerics.view_config import view_of_config
from rlmix.numerics.views import decode_view, encode_view
from rlmix.weights.publish import publish_version
from rlmix.weights.store import list_versions, verify_version

VIEWS = ("bf16", "fp8", "nvfp4")


def state(columns=64):
    generator = torch.Generator().manual_seed(4)
    shapes = {
        "model.embed_tokens.weight": (32, 64),
        "model.norm.weight": (64,),
        "model.layers.0.self_attn.q_proj.weight": (64, 64),
        "model.layers.0.mlp.gate.weight": (4, 64),
        "model.layers.0.mlp.experts.0.gate_proj.weight": (64, columns),
        "model.layers.0.mlp.experts.0.up_proj.weight": (64, columns),
        "model.layers.0.mlp.experts.0.down_proj.weight": (64, 64),
    }
    return {
        name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()
    }


@pytest.fixture
def model_files(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    return folder


def test_every_view_decodes_to_what_its_format_can_hold(tmp_path, model_files):
    report = publish_version(
        state(), version=1, store=tmp_path / "store", views=VIEWS, model_files=model_files
    )
    sizes = {view.view: view.total_bytes for view in report.views}
    assert sizes["nvfp4"] < sizes["fp8"] < sizes["bf16"]
    for view in report.views:
        folder = Path(view.path)
        verify_version(folder)
        assert view_of_config(json.loads((folder / "config.json").read_text())) == view.view
        decoded = decode_view(load_file(folder / "model.safetensors"), view.view)
        expected = decode_view(encode_view(state(), view.view), view.view)
        assert sorted(decoded) == sorted(state())
        assert all(torch.equal(decoded[name], expected[name]) for name in decoded)
        error = (
            decoded["model.layers.0.self_attn.q_proj.weight"]
            - state()["model.layers.0.self_attn.q_proj.weight"]
        )
        assert (error.abs().max() == 0) == (view.view == "bf16")
    assert report.metrics()["weights/fp8_bytes"] == sizes["fp8"]


def test_a_view_that_fails_leaves_its_siblings_published(tmp_path, model_files):
    # 24 columns are no multiple of NVFP4's 16
    store = tmp_path / "store"
    with pytest.raises(DataError, match="24 columns"):
        publish_version(
            state(columns=24), version=1, store=store, views=VIEWS, model_files=model_files
        )
    assert list_versions(store, "bf16") == [1]
    assert list_versions(store, "fp8") == [1]
    assert list_versions(store, "nvfp4") == []
    assert [p.name for p in (store / "nvfp4").iterdir()] == []


def test_options_travel_in_the_views_name_and_the_manifest_tells_them(tmp_path, model_files):
    store = tmp_path / "store"
    (model_files / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    (model_files / "config.json").write_text(
        '{"text_config": {"quantization_config": {"quant_method": "fp8"}}}'
    )
    views = ("bf16", "nvfp4:experts:4over6")
    report = publish_version(state(), version=0, store=store, views=views, model_files=model_files)
    assert [view.view for view in report.views] == ["bf16", "nvfp4"]
    manifest = verify_version(store / "nvfp4" / "v000000")
    assert manifest.view == "nvfp4"
    assert manifest.facts == {
        "spec": "nvfp4:experts:4over6",
        "format": "nvfp4",
        "convention": "modelopt",
        "scope": "experts",
        "four_over_six": True,
        "quantised_matrices": 3,
        "bf16_tensors": 4,
    }
    # What the model folder said about its own quantisation is gone.
    for view in ("bf16", "nvfp4"):
        folder = store / view / "v000000"
        assert not (folder / "hf_quant_config.json").exists()
        assert json.loads((folder / "config.json").read_text())["text_config"] == {}
    tensors = load_file(store / "nvfp4" / "v000000" / "model.safetensors")
    assert torch.equal(
        tensors["model.layers.0.self_attn.q_proj.weight"],
        state()["model.layers.0.self_attn.q_proj.weight"],
    )
    with pytest.raises(DataError, match="fp8 takes at most one each"):
        publish_version(state(), version=1, store=store, views=["fp8:x"], model_files=model_files)


def test_one_view_with_two_specs_is_refused_and_so_is_another_spec_for_a_version(
    tmp_path, model_files
):
    store = tmp_path / "store"
    with pytest.raises(WeightSyncError, match="every view is named once"):
        publish_version(
            state(),
            version=0,
            store=store,
            views=["nvfp4", "nvfp4:experts"],
            model_files=model_files,
        )
    publish_version(state(), version=0, store=store, views=["nvfp4"], model_files=model_files)
    with pytest.raises(WeightSyncError, match="published before with other bytes"):
        publish_version(
            state(), version=0, store=store, views=["nvfp4:experts"], model_files=model_files
        )


def test_weights_above_the_file_size_lie_in_several_files_that_the_index_names(
    tmp_path, model_files
):
    report = publish_version(
        state(),
        version=0,
        store=tmp_path / "store",
        views=["bf16"],
        model_files=model_files,
        shard_bytes=12_000,
    )
    folder = Path(report.views[0].path)
    verify_version(folder)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    # Matrices of 64 x 64 take 8,192 bytes: one a file, with what is small beside it. Gate and up
    # share a scale, so they stay together.
    assert files == [f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5)]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(2 * tensor.numel() for tensor in state().values())
    for name, tensor in state().items():
        assert torch.equal(load_file(folder / index["weight_map"][name])[name], tensor)


def test_fused_experts_are_published_one_matrix_each_in_bf16_as_well(tmp_path, model_files):
    """Engines skip fused names without a word and compute NaN."""
    one = state()
    prefix = "model.layers.0.mlp.experts."
    gate, up, down = (one.pop(f"{prefix}0.{part}_proj.weight") for part in ("gate", "up", "down"))
    one[f"{prefix}gate_up_proj"] = torch.cat([gate, up])[None]
    one[f"{prefix}down_proj"] = down[None]
    store = tmp_path / "store"
    report = publish_version(one, version=1, store=store, views=["bf16"], model_files=model_files)
    written = load_file(Path(report.views[0].path) / "model.safetensors")
    assert written.keys() == state().keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in state().items())
