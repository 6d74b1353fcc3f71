"""The `openai` package talks to the router, and what it said can be trained on."""

import asyncio
import json

import openai
import pytest

from rlmix.engine.scripted import ScriptedEngine, certain_reply
from rlmix.model.bundle import resolve_model
from rlmix.router.template import ChatTemplate, normal_message
from rlmix.router.tool_calls import parse_json, parse_xml, parser_for

TEMPLATE = ChatTemplate(resolve_model("bundled:tiny"))
END = TEMPLATE.stop_token_ids[0]
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}
QUESTION = {"role": "user", "content": "Say <|end|> twice."}


def turn(text):
    return [*TEMPLATE.text_ids(text), END]


def talk(stage, scenario, *, answers, router_arguments=()):
    """`scenario(client, seen)`: the engine answers in order; `seen` are the prompts it got."""
    seen: list[tuple[int, ...]] = []

    def policy(call):
        seen.append(call.input_ids)
        return certain_reply(answers[len(seen) - 1])

    async def whole():
        async with stage, ScriptedEngine(policy, weight_version=3) as engine:
            await stage.start_router("--model", "bundled:tiny", *router_arguments)
            stage.urls["a"] = engine.url
            await stage.register("a", version=3, view="bf16")
            client = openai.AsyncOpenAI(
                base_url=stage.urls["router"] + "/v1", api_key="none", max_retries=0,
                default_headers={"X-Session-Id": "s"},
            )  # fmt: skip
            async with client:
                return await scenario(client, seen)

    return asyncio.run(whole())


async def trajectory(stage, session_id="s"):
    url = f"{stage.urls['router']}/sessions/{session_id}/trajectory"
    async with stage.http.get(url) as response:
        return response.status, await response.json()


def test_a_session_of_tool_calls_is_one_segment_whose_ids_only_grow(stage):
    answers = [turn("ls"), turn("submit")]

    async def scenario(client, seen):
        messages = [QUESTION]
        for command in ("ls", "submit"):
            answer = await client.chat.completions.create(
                model="rlmix", messages=messages, tools=[BASH], top_p=0.9, logprobs=True
            )
            choice = answer.choices[0]
            assert choice.finish_reason == "tool_calls"
            [call] = choice.message.tool_calls
            assert json.loads(call.function.arguments) == {"command": command}
            assert len(choice.logprobs.content) == answer.usage.completion_tokens
            messages.append(choice.message.model_dump(exclude_none=True))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "0\nREADME"})
        status, found = await trajectory(stage)
        assert status == 200
        [segment] = found["segments"]
        first, second = segment["turns"]
        assert segment["prompt_ids"] == list(seen[0])
        assert first["output_ids"] == answers[0]
        # Sampled ids are never encoded again; the end token was sampled and is not doubled.
        assert list(seen[1]) == [*seen[0], *answers[0], *second["observation_ids"]]
        assert second["observation_ids"][0] != END
        assert first["sampler_logprobs"] == [0.0] * len(answers[0])
        assert first["kept_ids"] == [[token] for token in answers[0]]
        assert first["version_spans"] == [{"version": 3, "start": 0, "end": len(answers[0])}]
        assert (first["replica"], first["pool"], first["rehomed"]) == ("a", "pool_a", 0)
        assert first["numerics_key"] == "key_a"
        # What the issue says never becomes a special token.
        assert segment["prompt_ids"].count(END) == 1

    talk(stage, scenario, answers=answers)


def test_a_conversation_that_does_not_go_on_from_the_last_turn_starts_a_segment(stage):
    async def scenario(client, seen):
        for text in ("one", "two"):
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": text}]
            )
        _, found = await trajectory(stage)
        assert [len(segment["turns"]) for segment in found["segments"]] == [1, 1]
        assert [segment["prompt_ids"] for segment in found["segments"]] == [list(s) for s in seen]
        other = await trajectory(stage, "nobody")
        assert other[0] == 404
        async with stage.http.delete(stage.urls["router"] + "/sessions/s") as response:
            assert await response.json() == {"released": True}
        assert (await trajectory(stage))[0] == 404

    talk(stage, scenario, answers=[turn("a"), turn("b")])


def test_streams_and_completions_and_models(stage):
    async def scenario(client, seen):
        text, finish, usage = "", None, None
        stream = await client.chat.completions.create(
            model="m", messages=[QUESTION], stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
                finish = chunk.choices[0].finish_reason or finish
            usage = chunk.usage or usage
        assert (text, finish, usage.completion_tokens) == ("hi", "stop", len(turn("hi")))
        first = await client.completions.create(model="m", prompt="ab", extra_headers=ALONE)
        second = await client.completions.create(
            model="m", prompt="ab" + first.choices[0].text + "ef", extra_headers=ALONE
        )
        assert (first.choices[0].text, second.choices[0].text) == ("cd", "gh")
        _, found = await trajectory(stage, "t")
        [segment] = found["segments"]
        assert segment["turns"][1]["observation_ids"] == TEMPLATE.text_ids("ef")
        assert [model.id for model in (await client.models.list()).data] == ["rlmix"]

    ALONE = {"X-Session-Id": "t"}
    talk(stage, scenario, answers=[turn("hi"), TEMPLATE.text_ids("cd"), turn("gh")])


def test_errors_have_the_shape_that_clients_read(stage):
    async def scenario(client, seen):
        with pytest.raises(openai.BadRequestError, match="temperature: 'hot'"):
            await client.chat.completions.create(
                model="m", messages=[QUESTION], extra_body={"temperature": "hot"}
            )
        with pytest.raises(openai.BadRequestError, match="n: 2 is not served"):
            await client.chat.completions.create(model="m", messages=[QUESTION], n=2)
        with pytest.raises(openai.ConflictError, match="older than version 9"):
            await client.chat.completions.create(
                model="m", messages=[QUESTION], extra_headers={"X-Min-Version": "9"}
            )
        await stage.admin.put_replica("a", state="starting")
        with pytest.raises(openai.InternalServerError, match="no replica is ready") as refused:
            await client.chat.completions.create(
                model="m", messages=[QUESTION], extra_headers={"X-Session-Id": "new"}
            )
        assert refused.value.response.headers["Retry-After"] == "1"

    talk(stage, scenario, answers=[], router_arguments=("--queue-timeout-s", "0.2"))


def test_tool_calls_are_read_as_the_template_has_them_written():
    one = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    assert parse_json("Look. " + one, [BASH]) == ("Look.", [("bash", {"command": "ls"})])
    assert parse_json("<tool_call>{broken</tool_call>", [BASH])[1] == []
    inner = "<function=bash>\n<parameter=command>\nls -l\n</parameter></function>"
    two = f"<tool_call>{inner}</tool_call>"
    assert parse_xml(two, [BASH]) == ("", [("bash", {"command": "ls -l"})])
    assert [parser_for(text) for text in (two, one, "<|bash|>", "")] == [
        "xml", "json", "bash", "none",
    ]  # fmt: skip


def test_messages_are_compared_by_what_they_say():
    said = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [
        {"id": "call_1", "type": "function",
         "function": {"name": "bash", "arguments": '{"command": "ls"}'}}]}  # fmt: skip
    parts = {"role": "assistant", "content": [{"type": "text", "text": ""}], "tool_calls": [
        {"function": {"name": "bash", "arguments": {"command": "ls"}}}]}  # fmt: skip
    assert normal_message(said) == normal_message(parts)
    with pytest.raises(ValueError, match="list of text parts"):
        normal_message({"role": "user", "content": [{"type": "image_url"}]})


def test_a_session_that_is_released_amid_a_turn_stays_forgotten(stage):
    async def scenario(client, seen):
        messages = [QUESTION]
        first = await client.chat.completions.create(model="m", messages=messages)
        messages += [first.choices[0].message, {"role": "user", "content": "And?"}]
        await stage.fail_next("a", "slow")
        asking = asyncio.create_task(client.chat.completions.create(model="m", messages=messages))

        async def is_there():
            return (await stage.replica("a"))["in_flight"] == 1

        while not await is_there():
            await asyncio.sleep(0.02)
        async with stage.http.delete(stage.urls["router"] + "/sessions/s") as response:
            assert await response.json() == {"released": True}
        assert (await asking).choices[0].message.content == "two"
        # Its second turn alone would be a trajectory that nobody sampled.
        assert (await trajectory(stage))[0] == 404
        await client.chat.completions.create(model="m", messages=[QUESTION])
        status, found = await trajectory(stage)
        assert (status, found["num_turns"], len(found["segments"])) == (200, 1, 1)

    talk(stage, scenario, answers=[turn("one"), turn("two"), turn("three")])
