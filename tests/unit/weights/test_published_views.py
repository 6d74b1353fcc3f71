"""Published views against the numerics room: every view is made from the BF16 state."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlmix.core.errors import DataError
from rlmix.numerics.views import decode_view, encode_view, view_of_config
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
