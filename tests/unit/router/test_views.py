"""A session never changes its weight view, unless it was said that it may."""

import asyncio

import pytest

FP8 = {"view": "fp8"}


def run(stage, scenario, *options):
    async def whole():
        async with stage:
            await stage.start_router("--queue-timeout-s", "0.5", "--probe-every-s", "0", *options)
            await stage.start_replicas("a", **FP8)
            await scenario()

    asyncio.run(whole())


def test_a_session_moves_within_its_view_or_waits_or_is_told_that_it_is_over(stage):
    async def scenario():
        assert (await stage.generate("s")).by == "a"
        await stage.start_replicas("b", view="bf16", speed=50.0)
        stage.kill("a")
        # The dead may come back, so waiting is right; meanwhile others are served.
        answer = await stage.generate("s")
        assert answer.status == 503
        assert "with the session's weight view 'fp8'" in answer.body["error"]
        assert answer.headers["Retry-After"] == "1"
        assert (await stage.generate("new")).by == "b"
        await stage.start_replicas("c", **FP8)
        answer = await stage.generate("s")
        assert (answer.status, answer.by, answer.moves) == (200, "c", 1)
        # Nobody of its view is left who would come back by himself.
        await stage.admin.put_replica("c", state="quarantined")
        await stage.admin.delete_replica("a")
        answer = await stage.generate("s")
        assert answer.status == 410
        assert "start the session anew" in answer.body["error"]
        assert await stage.metric("rlmix_router_view_changes_total") == 0

    run(stage, scenario)


def test_with_prefer_it_changes_its_view_when_it_must(stage):
    async def scenario():
        assert (await stage.generate("s")).by == "a"
        await stage.start_replicas("b", view="bf16")
        stage.kill("a")
        answer = await stage.generate("s")
        assert (answer.status, answer.by, answer.moves) == (200, "b", 1)
        assert await stage.metric("rlmix_router_view_changes_total") == 1

    run(stage, scenario, "--view", "prefer")


@pytest.mark.parametrize("option", [("--view", "loose"), ("--placement", "heap")])
def test_unknown_policies_are_refused_with_those_that_are_known(option):
    from rlmix.router.__main__ import main

    assert main(list(option)) == 2
