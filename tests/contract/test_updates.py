"""New weights from a folder and through a process group, and the proof that they arrived."""

import asyncio
from contextlib import asynccontextmanager

import pytest
import torch

from rlmix.pools.pushing import Pusher
from rlmix.weights.push import Bucket, PushGroup, read_buckets, tensor_names
from tests.contract.differences import expected
from tests.contract.talking import (
    ask,
    checksum_of,
    client_of,
    flush,
    gaps,
    load_version,
    prompt,
    request,
    run,
    turn_under_way,
    version_of,
)

LIMIT_S = 60.0


async def turn_of(engine):
    async with client_of(engine) as client:
        return await client.generate(request(prompt(50), max_new_tokens=16))


async def disk_checksum(engine, version):
    status, document = await load_version(engine, version)
    assert status == 200, document
    return await checksum_of(engine)


def test_a_version_from_disk_is_served_and_says_so(engine):
    async def scenario():
        before = await checksum_of(engine)
        status, document = await load_version(engine, 1)
        assert status == 200
        assert document["success"] is True
        assert await version_of(engine) == "1"
        _, info = await ask(engine, "GET", "/model_info")
        assert info["model_path"] == str(engine.folders[1])
        assert await checksum_of(engine) != before
        return await turn_of(engine)

    turn = run(scenario())
    assert [span.version for span in turn.version_spans] == [1]
    assert gaps(engine, turn, prompt(50), version=1).mean() < 2 * engine.mean_nats


def test_the_same_weights_again_change_neither_checksum_nor_greedy_turn(engine):
    async def scenario():
        async with client_of(engine) as client:
            greedy = request(prompt(51), temperature=0.0, max_new_tokens=16)
            first, before = await client.generate(greedy), await checksum_of(engine)
            assert (await load_version(engine, 0))[0] == 200
            await flush(engine)
            second = await client.generate(greedy)
            assert await checksum_of(engine) == before
            assert second.output_ids == first.output_ids
            assert second.sampler_logprobs == first.sampler_logprobs

    run(scenario())


def test_a_missing_folder_is_refused_and_changes_nothing(engine, tmp_path):
    async def scenario():
        before = await checksum_of(engine)
        status, document = await load_version(engine, 9, model_path=str(tmp_path / "missing"))
        assert status == 400
        assert document["success"] is False
        assert await version_of(engine) == "0"
        _, info = await ask(engine, "GET", "/model_info")
        assert info["model_path"] == str(engine.folders[0])
        assert await checksum_of(engine) == before
        return await turn_of(engine)

    assert gaps(engine, run(scenario()), prompt(50)).mean() < 2 * engine.mean_nats


def pusher(engine, **changes):
    fields = {
        "name": engine.name,
        "token": None,
        "host": "127.0.0.1",
        "num_ranks": 1,
        "backend": "gloo",
        "limit_s": LIMIT_S,
        "bucket_bytes": 1 << 20,
    }
    return Pusher(engine.url, **{**fields, **changes})


def test_a_pushed_version_has_the_checksum_of_the_same_version_from_disk(engine):
    async def scenario():
        wanted = [await disk_checksum(engine, version) for version in (1, 0)]
        served = tensor_names(engine.folders[0])
        push = pusher(engine)
        try:
            found = []
            for version in (1, 0):
                await ask(engine, "POST", "/pause_generation", {"mode": "retract"})
                report = await push.push(engine.folders[version], version=version, served=served)
                await flush(engine)
                await ask(engine, "POST", "/continue_generation", {})
                assert report.num_buckets > 1
                assert await version_of(engine) == str(version)
                found.append(await checksum_of(engine))
                turn = await turn_of(engine)
                assert gaps(engine, turn, prompt(50), version=version).mean() < (
                    2 * engine.mean_nats
                )
            assert found == wanted
        finally:
            push.close()

    run(scenario())


def test_a_push_in_mid_turn_gives_two_spans(engine):
    async def scenario():
        push = pusher(engine, bucket_bytes=1 << 30)
        try:
            async with client_of(engine) as client, turn_under_way(engine, client) as task:
                await ask(engine, "POST", "/pause_generation", {"mode": "retract"})
                await push.push(
                    engine.folders[1],
                    version=1,
                    served=tensor_names(engine.folders[0]),
                )
                await ask(engine, "POST", "/continue_generation", {})
                return await task
        finally:
            push.close()

    assert [span.version for span in run(scenario()).version_spans] == [0, 1]


@asynccontextmanager
async def group_of(engine):
    """A group that the engine has joined."""
    group = await asyncio.to_thread(
        PushGroup, host="127.0.0.1", world_size=2, backend="gloo", limit_s=LIMIT_S
    )
    joining = asyncio.create_task(
        ask(engine, "POST", "/init_weights_update_group", group.invitation())
    )
    await asyncio.to_thread(group.meet)
    status, document = await joining
    assert status == 200, document
    try:
        yield group
    finally:
        await ask(engine, "POST", "/destroy_weights_update_group", {"group_name": group.name})
        group.close()


async def push_tensors(engine, group, tensors, **changes):
    """(status, document) of one push, each tensor on its own unless `load_format` is given."""
    announced = {**Bucket(tensors=tensors).announcement(), "load_format": None, **changes}
    asking = asyncio.create_task(
        ask(
            engine,
            "POST",
            "/update_weights_from_distributed",
            {"group_name": group.name, "flush_cache": False, **announced},
        )
    )
    for tensor in tensors.values():
        await asyncio.to_thread(group.send, tensor.contiguous())
    return await asking


def first_tensors(engine, version, count=3):
    bucket = next(read_buckets(engine.folders[version], max_bytes=1 << 30))
    return {name: bucket.tensors[name] for name in list(bucket.tensors)[:count]}


def test_tensors_may_come_one_by_one_and_the_version_only_with_the_push_that_has_it(engine):
    async def scenario():
        before = await checksum_of(engine)
        async with group_of(engine) as group:
            assert (await ask(engine, "POST", "/begin_weight_update", {}))[0] == 200
            status, document = await push_tensors(engine, group, first_tensors(engine, 1))
            assert (status, document["success"]) == (200, True)
            assert await version_of(engine) == "0"
            changed = await checksum_of(engine)
            assert changed != before
            # Requests are served while the update is open, by mixed weights.
            assert len((await turn_of(engine)).output_ids) == 16
            status, _ = await push_tensors(
                engine, group, first_tensors(engine, 0), weight_version="7"
            )
            assert status == 200
            assert await version_of(engine) == "7"
            assert (await ask(engine, "POST", "/end_weight_update", {}))[0] == 200
            assert await checksum_of(engine) == before

    run(scenario())


def test_a_push_outside_an_update_is_refused_before_anything_is_received(engine):
    async def scenario():
        async with group_of(engine) as group:
            body = {
                **Bucket(tensors=first_tensors(engine, 1)).announcement(),
                "group_name": group.name,
                "weight_version": "9",
            }
            status, document = await ask(engine, "POST", "/update_weights_from_distributed", body)
            assert (status, document["success"]) == (400, False)
            assert await version_of(engine) == "0"

    run(scenario())


def test_a_wrong_shape_is_refused(engine):
    if engine.kind == "scripted":
        pytest.skip("a script has no shapes")

    async def scenario():
        async with group_of(engine) as group:
            await ask(engine, "POST", "/begin_weight_update", {})
            status, document = await push_tensors(
                engine,
                group,
                {"model.norm.weight": torch.ones(3, dtype=torch.bfloat16)},
                weight_version="9",
            )
            assert (status, document["success"]) == (400, False)
            await ask(engine, "POST", "/end_weight_update", {})
            assert await version_of(engine) == "0"

    run(scenario())


def test_a_tensor_that_the_model_does_not_have(engine):
    async def scenario():
        async with group_of(engine) as group:
            await ask(engine, "POST", "/begin_weight_update", {})
            status, _ = await push_tensors(
                engine,
                group,
                {"model.layers.0.no_such.weight": torch.ones(4, dtype=torch.bfloat16)},
                weight_version="9",
            )
            await ask(engine, "POST", "/end_weight_update", {})
            assert status == expected("a tensor that the model does not have", engine)
            assert await version_of(engine) == ("9" if status == 200 else "0")

    run(scenario())


def test_float32_tensors_are_cast_to_what_the_engine_holds(engine):
    if engine.kind == "scripted":
        pytest.skip("a script has no formats")

    async def scenario():
        before = await checksum_of(engine)
        async with group_of(engine) as group:
            await ask(engine, "POST", "/begin_weight_update", {})
            tensors = {name: t.float() for name, t in first_tensors(engine, 0).items()}
            status, _ = await push_tensors(engine, group, tensors)
            await ask(engine, "POST", "/end_weight_update", {})
            assert status == 200
            assert await checksum_of(engine) == before

    run(scenario())


def test_one_update_at_a_time(engine):
    async def scenario():
        assert (await ask(engine, "POST", "/begin_weight_update", {}))[0] == 200
        assert (await ask(engine, "POST", "/begin_weight_update", {}))[0] == 400
        assert (await ask(engine, "POST", "/end_weight_update", {}))[0] == 200
        assert (await ask(engine, "POST", "/end_weight_update", {}))[0] == 400

    run(scenario())
