"""What clients and replicas can send that they should not: nobody else is hurt by it."""

import asyncio
import logging
import time

import aiohttp
import orjson
import pytest

from rlmix.core.errors import EngineError
from rlmix.engine.client import EngineClient
from rlmix.engine.http import JsonServer, reply_json
from rlmix.router.forward import Call, ClientGone, Forwarder
from rlmix.router.probe import Loads, read_loads
from rlmix.router.registry import Registry
from rlmix.router.scan import RequestFacts, scan_answer, scan_request
from rlmix.router.states import Health, HealthRecord, HealthRules, ReplicaState
from rlmix.router.strategies import STRATEGIES, Ask
from rlmix.router.upstream import ReplicaRecord, Upstream


def run(stage, scenario, *options, replicas=("a",), token=None):
    async def whole():
        async with stage:
            await stage.start_router("--probe-every-s", "0", *options, token=token)
            if replicas:
                await stage.start_replicas(*replicas)
            return await scenario()

    return asyncio.run(whole())


async def until(condition, timeout_s=30.0):
    deadline_s = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < deadline_s, "the condition did not come true"
        await asyncio.sleep(0.02)


async def raw(stage, head: bytes, body: bytes = b"{}") -> bytes:
    """First line of the answer to a request that no client library would send."""
    port = int(stage.urls["router"].rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    length = str(len(body)).encode()
    writer.write(head + b"Host: r\r\nContent-Length: " + length + b"\r\n\r\n" + body)
    line = await asyncio.wait_for(reader.readline(), 20)
    writer.close()
    return line


@pytest.mark.parametrize("header", [b"X-Session-Id", b"X-Request-Id", b"X-Group-Id"])
def test_ids_that_are_no_text_are_400_and_the_router_goes_on_listing_its_sessions(stage, header):
    async def scenario():
        others = b"" if header == b"X-Session-Id" else b"X-Session-Id: s\r\n"
        for value in (b"\xff\xfe", b"a\tb", b"x" * 600):
            head = b"POST /generate HTTP/1.1\r\n" + others + header + b": " + value + b"\r\n"
            assert b" 400 " in await raw(stage, head), value
        assert (await stage.generate("säss/1 %2F?")).status == 200
        listed = (await stage.admin.sessions())["sessions"]
        assert [session["session_id"] for session in listed] == ["säss/1 %2F?"]

    run(stage, scenario)


def test_a_session_with_an_odd_id_is_released_by_the_client(stage):
    async def scenario():
        client = EngineClient(stage.urls["router"], timeout_s=10.0)
        for session_id in ("a/b", "a?b=1", "a%2Fb", "ä b", ".."):
            await stage.generate(session_id)
            await client.release(session_id)
            assert (await stage.admin.sessions())["num_sessions"] == 0, session_id
        await client.close()

    run(stage, scenario)


def test_a_token_that_is_no_text_is_401(stage):
    async def scenario():
        for path in (b"/pools", b"/sessions/x/trajectory", b"/v1/models", b"/nothing"):
            head = b"GET " + path + b" HTTP/1.1\r\nAuthorization: Bearer \xff\r\n"
            assert b" 401 " in await raw(stage, head), path

    run(stage, scenario, "--model", "bundled:tiny", replicas=(), token="secret")


def test_numbers_without_measure_are_400_or_without_meaning(stage):
    async def scenario():
        answer = await stage.generate("s", headers={"X-Min-Version": "9" * 400})
        assert (answer.status, "X-Min-Version" in answer.body["error"]) == (400, True)
        for name in ("X-Timeout-S", "X-Deadline-S"):
            assert (await stage.generate("s", headers={name: "-1"})).status == 400
            assert (await stage.generate("s", headers={name: "nan"})).status == 400
            assert (await stage.generate("s", headers={name: "inf"})).status == 200

    run(stage, scenario)
    long = b'{"input_ids":[1],"sampling_params":{"max_new_tokens":' + b"9" * 5000 + b"}}"
    assert scan_request(long).max_new_tokens == 10**12 - 1


def test_a_replica_s_name_cannot_bring_a_header_with_it(stage):
    async def scenario():
        with pytest.raises(EngineError, match="printable"):
            await stage.register("a", pool="p\r\nX-Evil: 1")
        stage.urls["a%0D%0AX-Evil:1"] = stage.urls["a"]
        with pytest.raises(EngineError, match="printable"):
            await stage.register("a%0D%0AX-Evil:1")
        assert (await stage.generate("s")).by == "a"

    run(stage, scenario)


def test_a_client_with_little_time_is_no_fault_of_the_replica(stage):
    async def scenario():
        for number in range(12):  # ten faults would be a death
            answer = await stage.generate(
                f"s{number}", takes_s=2.0, headers={"X-Timeout-S": "0.05"}
            )
            assert answer.status == 504
        replica = await stage.replica("a")
        assert (replica["health"], replica["errors"]) == ("healthy", 0)

    run(stage, scenario)


def test_two_clients_of_one_session_id_are_both_served_at_one_home(stage):
    async def scenario():
        answers = await asyncio.gather(*[stage.generate("s", takes_s=0.2) for _ in range(8)])
        assert len({answer.by for answer in answers}) == 1
        assert {answer.status for answer in answers} == {200}
        listed = (await stage.admin.sessions())["sessions"]
        assert [(one["session_id"], one["turns"], one["in_flight"]) for one in listed] == [
            ("s", 8, 0)
        ]
        homes = await stage.admin.replicas()
        assert sum(one["sessions"] for one in homes) == 1

    run(stage, scenario, replicas=("a", "b"))


# --- streams


async def streaming(stage, name, pieces, gate):
    """An engine that sends pieces of a stream and then waits at a gate."""

    async def answer(call):
        response = aiohttp.web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(call.request)
        for piece in pieces:
            await response.write(piece)
        await gate.wait()
        if call.request.transport is not None:
            call.request.transport.abort()
        return response

    engine = JsonServer({("POST", "/generate"): answer})
    await engine.start(host="127.0.0.1")
    stage.urls[name] = engine.url
    return engine


@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_stream_that_breaks_off_ends_with_an_error_and_with_nobody_else_s_tokens(
    stage, is_given_up
):
    async def scenario():
        gate = asyncio.Event()
        first = await streaming(stage, "a", [b'data: {"n":1}\n\n', b'data: {"n":'], gate)
        await stage.register("a", speed=100.0)
        never = await streaming(stage, "b", [b'data: {"other":1}\n\n'], gate)
        await stage.register("b", speed=0.01)
        async with stage.http.post(
            stage.urls["router"] + "/generate",
            json={"input_ids": [1], "stream": True},
            headers={"X-Session-Id": "s"},
        ) as response:
            seen = b""
            while b'{"n":' not in seen[12:]:
                seen += await asyncio.wait_for(response.content.readany(), 20)
            if is_given_up:
                await stage.admin.put_replica("a", state="dead")
            else:
                gate.set()
            seen += await asyncio.wait_for(response.content.read(), 20)
        gate.set()
        await first.stop()
        await never.stop()
        events = [event for event in seen.split(b"\n\n") if event]
        assert events[:2] == [b'data: {"n":1}', b'data: {"n":']
        document = orjson.loads(events[2].removeprefix(b"data: "))
        assert document["status"] == 502
        assert "lost amid its answer" in document["error"]
        assert events[3:] == [b"data: [DONE]"]

    run(stage, scenario, replicas=())


class GoneClient:
    """A sink whose client has hung up, in the words of aiohttp."""

    async def start(self, status, headers):
        pass

    async def write(self, piece):
        raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")


def test_a_client_that_leaves_amid_a_stream_is_no_loss_of_the_replica():
    sent = []

    async def answer(call):
        sent.append(call)
        response = aiohttp.web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(call.request)
        await response.write(b"data: {}\n\n")
        return response

    async def scenario():
        engine = JsonServer({("POST", "/generate"): answer})
        await engine.start(host="127.0.0.1")
        forwarder = Forwarder(token=None)
        await forwarder.open()
        upstream = Upstream(record("a", url=engine.url))
        call = Call(
            body=b"{}",
            facts=RequestFacts(context_tokens=1, max_new_tokens=1, is_stream=True),
            request_id="r",
            started_s=time.monotonic(),
            limit_s=20.0,
            sink=GoneClient(),
        )
        with pytest.raises(ClientGone):
            await forwarder.post(upstream, "s", call, {})
        assert (forwarder.reconnects, call.has_passed) == (0, True)
        await forwarder.close()
        await engine.stop()

    asyncio.run(scenario())
    assert len(sent) == 1


# --- replicas that talk nonsense


def record(name, **changes):
    facts = {
        "name": name, "pool": "p", "url": "http://127.0.0.1:1", "numerics_key": "k", "speed": 1.0,
        "max_running": 8, "version": 0, "state": ReplicaState.READY, **changes,
    }  # fmt: skip
    return ReplicaRecord(**facts)


def test_counts_that_are_none_count_as_missing():
    nonsense = [
        {"loads": 3},
        {"loads": [1, "x", None]},
        {"loads": [{"num_running_reqs": -5, "max_total_num_tokens": -1}]},
        {"loads": [{"num_running_reqs": True, "max_running_requests": {}}]},
        {"loads": [{"num_waiting_reqs": "7", "decode_moments": "abcdef"}]},
        {"loads": [{"decode_moments": [1, 2, 3]}], "weight_version": ["x"]},
        {"loads": [{"decode_moments": [1, 2, 3, None, 5, 6]}], "total_generated_tokens": 1e300},
    ]  # fmt: skip
    for document in nonsense:
        loads = read_loads(document)
        assert loads == Loads(version=loads.version)


@pytest.mark.parametrize(
    "moments",
    [
        (10.0, 1e9, 5.0, 0.0, 0.0, 0.0),  # a mean batch that its squares rule out
        (1.0, 1.0, 1e17, 1.0, 1e17, 1.0),  # a step of three thousand years
        (5.0, 0.0, 100.0, 0.0, 0.0, 0.0),
    ],
)
def test_impossible_sums_of_one_replica_leave_everybody_s_times_alone(moments):
    async def scenario():
        registry = Registry(strategy=STRATEGIES["shortest_delay"], observe_speeds=True)
        liar, honest = registry.put(record("a")), registry.put(record("b"))
        before = honest.model
        for factor in (1, 2, 3):
            told = tuple(factor * one for one in moments)
            liar.observe_loads(Loads(moments=told), own=0.0)
            registry.refresh_speeds()
        assert honest.model == before
        assert liar.model == before
        place = await registry.take_place(Ask(context_tokens=10), timeout_s=0.1)
        assert place is liar

    asyncio.run(scenario())


def test_an_answer_that_claims_a_million_tokens_for_ten_teaches_nothing():
    content = b'{"meta_info":{"completion_tokens":1000000000,"cached_tokens":3}}'
    assert scan_answer(content, most_output_tokens=10).output_tokens is None
    assert scan_answer(content).output_tokens is None
    assert scan_answer(content).cached_tokens == 3
    fine = b'{"meta_info":{"completion_tokens":10}}'
    assert scan_answer(fine, most_output_tokens=10).output_tokens == 10
    assert scan_answer(b'{"completion_tokens":' + b"1" * 5000).output_tokens is None


def test_a_replica_that_answers_garbage_to_its_probes_harms_no_other(stage, caplog):
    caplog.set_level(logging.WARNING)
    asked = []

    async def garbage(call):
        asked.append(call.request.path)
        return aiohttp.web.Response(body=b'\xff{"loads": [[[', content_type="application/json")

    async def odd(call):
        return reply_json({"loads": {"a": 1}, "weight_version": "-3", "paused": "perhaps"})

    async def scenario():
        liar = JsonServer({("GET", path): garbage for path in ("/ready", "/v1/loads")})
        other = JsonServer({("GET", "/v1/loads"): odd, ("GET", "/ready"): garbage})
        await liar.start(host="127.0.0.1")
        await other.start(host="127.0.0.1")
        async with stage:
            await stage.start_router(
                f"--replica=liar-0={liar.url}", f"--replica=odd-0={other.url}",
                "--probe-every-s", "0.05",
            )  # fmt: skip
            await stage.start_replicas("a")

            async def was_asked_often():
                return len(asked) > 10

            await until(was_asked_often)
            await stage.admin.put_replica("liar-0", state="draining")
            await stage.admin.delete_replica("odd-0")
            answers = await asyncio.gather(*[stage.generate(f"s{i}") for i in range(4)])
            assert {answer.status for answer in answers} <= {200, 404}
            assert any(answer.by == "a" for answer in answers)
        await liar.stop()
        await other.stop()
        assert "Traceback" not in (stage.folder / "router.log").read_text()

    asyncio.run(scenario())


def test_a_good_answer_among_the_faults_keeps_a_replica_alive():
    health = HealthRecord(HealthRules(window_s=1000.0, suspect_faults=3, dead_faults=10))
    for second in range(100):
        health.fault(now_s=second, reason="500")
        if second % 8 == 7:
            health.success(now_s=second)
    assert health.state is Health.SUSPECT
    for second in range(100, 110):
        health.fault(now_s=second, reason="500")
    assert health.state is Health.DEAD
