"""Weights pushed through a process group into embedded engines, by a fleet, in each view."""

import asyncio
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlmix.core.errors import EngineError, WeightSyncError
from rlmix.engine.client import EngineClient
from rlmix.model.bundle import resolve_model
from rlmix.pools.pushing import Pusher
from rlmix.pools.spec import PushSpec
from rlmix.weights.publish import publish_version
from rlmix.weights.push import Bucket, check_names, read_buckets, tensor_names

PUSH = PushSpec(host="127.0.0.1", backend="gloo", num_ranks=1, bucket_bytes=1 << 20)
FORMATS = {
    "nvfp4": {"accelerator": "b200", "weights": "nvfp4", "kv": "fp8", "attention": "trtllm_mha"},
    "fp8": {"accelerator": "h100", "weights": "fp8", "kv": "fp8", "attention": "fa3"},
    "bf16": {"accelerator": "a100", "weights": "bf16", "kv": "bf16", "attention": "flashinfer"},
}


def publish(store, *, version, change=1.0):
    model = resolve_model("bundled:tiny")
    state = {
        name: (tensor.float() * change).bfloat16()
        for name, tensor in load_file(model / "model.safetensors").items()
    }
    publish_version(state, version=version, store=store, views=list(FORMATS), model_files=model)


def replica(stage, view):
    facts = FORMATS[view]
    argv = [
        sys.executable, "-m", "rlmix.engine.embedded", "--model-path", "{model_path}",
        "--weight-version", "{weight_version}", "--ready-file", "{ready_file}",
        "--max-running-requests", "4", "--pool", view, "--replica", f"{view}-0",
    ]  # fmt: skip
    for key, value in facts.items():
        argv += [f"--{key}", value]
    return stage.spec(
        f"{view}-0", argv=tuple(argv), expected=facts, view=view, pool=view, push=PUSH,
        boot_timeout_s=120.0, update_timeout_s=60.0,
    )  # fmt: skip


async def checksum(url):
    client = EngineClient(url, timeout_s=60)
    try:
        answer = await client.post_json("/weights_checker", {"action": "checksum"})
        return answer["per_engine_checksum"]
    finally:
        await client.close()


@pytest.mark.slow
def test_every_view_arrives_as_it_lies_in_its_folder(stage):
    store = stage.folder / "published"
    publish(store, version=0)
    publish(store, version=1, change=1.05)

    async def scenario():
        fleet = stage.make_fleet(
            *[replica(stage, view) for view in FORMATS],
            store=store,
            canary_prompts=((5, 6, 7),),
            stall_timeout_s=60.0,
        )
        await fleet.start(0)
        before = {view: await checksum(stage.status(f"{view}-0").url) for view in FORMATS}
        await fleet.roll_out(1)
        await fleet.wait_for_version(1, timeout_s=120)
        for view in FORMATS:
            url = stage.status(f"{view}-0").url
            pushed = await checksum(url)
            assert pushed != before[view]
            folder = str(store / view / "v000001")
            answer = await stage.post(
                url + "/update_weights_from_disk", model_path=folder, weight_version="1"
            )
            assert answer["success"] is True
            assert await checksum(url) == pushed

    async def staged():
        async with stage:
            await scenario()

    asyncio.run(asyncio.wait_for(staged(), 400))
    assert not [fields for kind, fields in stage.events if kind == "replica_quarantined"]


def test_a_push_is_cut_into_buckets_in_the_order_of_names_and_loses_no_byte(tmp_path):
    tensors = {
        "b": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "a": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "c": torch.tensor([0.5]),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    # a takes 3 bytes, b 12, c 4: with 15 a bucket holds the first two.
    buckets = list(read_buckets(tmp_path, max_bytes=15))
    assert [list(bucket.tensors) for bucket in buckets] == [["a", "b"], ["c"]]
    assert [bucket.num_bytes for bucket in buckets] == [15, 4]
    assert buckets[0].announcement() == {
        "names": ["a", "b"],
        "dtypes": ["uint8", "bfloat16"],
        "shapes": [[3], [2, 3]],
        "load_format": "flattened_bucket",
    }
    assert buckets[0].flat()[:3].tolist() == [1, 2, 3]
    # One tensor that is larger than a bucket has one of its own.
    assert len(list(read_buckets(tmp_path, max_bytes=1))) == 3
    assert tensor_names(tmp_path) == {"a", "b", "c"}
    assert Bucket(tensors=tensors).num_bytes == 19


def test_names_that_the_engine_did_not_start_with_are_refused_before_anything_is_sent():
    check_names(frozenset("ab"), frozenset("ab"))
    with pytest.raises(WeightSyncError, match="unknown: c; missing: b"):
        check_names(frozenset("ac"), frozenset("ab"))
    many = frozenset(f"t{n}" for n in range(5))
    with pytest.raises(WeightSyncError, match="unknown: t0, t1, t2 and 2 more; missing: none"):
        check_names(many, frozenset())


def test_an_engine_that_does_not_join_is_an_error_within_the_limit(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")

    async def scenario():
        pusher = Pusher(
            "http://127.0.0.1:9", name="h100-0", token=None, host="127.0.0.1",
            num_ranks=1, backend="gloo", limit_s=1.0,
        )  # fmt: skip
        with pytest.raises(EngineError, match="h100-0: pushing version 1 failed"):
            await pusher.push(tmp_path, version=1, served=frozenset("a"))

    asyncio.run(asyncio.wait_for(scenario(), 60))
