"""A replica says which weight view it serves, and goes on serving that one."""

import asyncio

import pytest

from rlmix.core.errors import WeightSyncError
from rlmix.core.numerics_key import NumericsKey
from rlmix.engine.embedded.profile import Profile
from rlmix.engine.embedded.shape import read_shape
from rlmix.engine.embedded.weights import load_weights, read_config
from tests.unit.engine.serving import client_of

FORMATS = {"accelerator": "b200", "weights": "nvfp4", "activations": "nvfp4", "kv": "bf16"}


@pytest.fixture(scope="module")
def experts_folder(tiny_model, make_view, tmp_path_factory):
    return make_view(tiny_model, tmp_path_factory.mktemp("scope") / "nvfp4", "nvfp4:experts")


def test_a_numerics_key_tells_experts_only_from_all_matrices():
    keys = [
        NumericsKey(**FORMATS, attention="triton", view=view).compact()
        for view in ("", "nvfp4", "nvfp4:experts")
    ]
    assert keys[0] == keys[1] != keys[2]
    assert keys[1].startswith("b200/nvfp4/a=nvfp4/")
    assert keys[2].startswith("b200/nvfp4:experts/a=nvfp4/")


def test_a_replica_reports_the_scope_that_its_folder_declares(
    experts_folder, tmp_path, start_server
):
    async def scenario(url):
        async with client_of(url) as client:
            return await client.get_json("/server_info")

    options = {**FORMATS, "attention": "triton"}
    with start_server(experts_folder, tmp_path / "ready.json", **options) as (url, _):
        info = asyncio.run(scenario(url))
    assert (info["weights"], info["view"]) == ("nvfp4", "nvfp4:experts")
    assert info["numerics_key"].startswith("b200/nvfp4:experts/a=nvfp4/kv=bf16/")


def test_a_folder_of_another_scope_is_not_what_the_replica_serves(experts_folder, view_folders):
    profile = Profile(**FORMATS, attention="triton")
    shape = read_shape(read_config(experts_folder))
    weights = load_weights(experts_folder, shape=shape, profile=profile)
    assert [layer.attention_is_quantised for layer in weights.layers] == [False] * 3
    assert all(layer.mlp_is_quantised for layer in weights.layers)
    with pytest.raises(WeightSyncError, match=r"is the nvfp4 view; .* serves nvfp4:experts"):
        load_weights(view_folders["nvfp4", 1], shape=shape, profile=profile, served=weights.spec)
