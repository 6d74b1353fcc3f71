"""Nobody talks to an engine of a run without its key."""

import asyncio
import os
import subprocess
import sys

import aiohttp
import pytest

from rlmix.core.errors import ConfigError, EngineError
from rlmix.engine.client import EngineClient
from rlmix.engine.keys import KEY_VARIABLE, take_key
from rlmix.engine.scripted.policies import HashPolicy
from rlmix.engine.scripted.server import ScriptedEngine

from .serving import request, run

KEY = "the key of this run"
ENDPOINTS = (
    ("POST", "/generate"), ("POST", "/update_weights_from_disk"), ("POST", "/pause_generation"),
    ("POST", "/begin_weight_update"), ("POST", "/init_weights_update_group"),
    ("GET", "/server_info"), ("GET", "/v1/loads"), ("GET", "/metrics"), ("GET", "/no_such_path"),
)  # fmt: skip


def test_a_missing_or_wrong_key_is_401_everywhere_and_changes_nothing() -> None:
    async def scenario() -> None:
        policy = HashPolicy(vocab_size=16, seed=1)
        async with ScriptedEngine(policy, key=KEY) as engine, aiohttp.ClientSession() as http:
            for method, path in ENDPOINTS:
                for headers in (
                    {}, {"Authorization": "Bearer the key of another run"},
                    {"Authorization": KEY}, {"Authorization": f"Bearer {KEY} "[:-2]},
                ):  # fmt: skip
                    async with http.request(
                        method, engine.url + path, json={}, headers=headers
                    ) as answer:
                        assert answer.status == 401, (method, path, headers)
            async with http.get(engine.url + "/ping") as answer:
                assert answer.status == 200
            assert engine.num_requests == 0
            client = EngineClient(engine.url, token=KEY, timeout_s=20)
            stranger = EngineClient(engine.url, timeout_s=20)
            answered = await client.generate(request((1, 2, 3), max_new_tokens=4))
            assert len(answered.output_ids) == 4
            with pytest.raises(EngineError, match="answered 401"):
                await stranger.generate(request((1, 2, 3)))
            await client.close()
            await stranger.close()

    run(scenario())


def test_the_key_is_taken_out_of_the_environment() -> None:
    environ = {KEY_VARIABLE: KEY, "HOME": "/"}
    assert take_key(environ, host="0.0.0.0") == KEY
    assert environ == {"HOME": "/"}
    assert take_key({}, host="127.0.0.1") is None
    assert take_key({}, host="::1") is None


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "::", "node7", ""])
def test_without_a_key_only_loopback_is_served(host: str) -> None:
    with pytest.raises(ConfigError, match=KEY_VARIABLE):
        take_key({KEY_VARIABLE: ""}, host=host)


@pytest.mark.parametrize("module", ["rlmix.engine.embedded", "rlmix.engine.scripted"])
def test_an_engine_that_others_could_reach_does_not_start_without_a_key(module: str) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", module, "--model-path", "/", "--accelerator", "h100",
            "--weights", "bf16", "--kv", "bf16", "--attention", "fa3",
            "--max-running-requests", "1", "--host", "0.0.0.0",
        ],
        capture_output=True, text=True, timeout=60, check=False,
        env={**{k: v for k, v in os.environ.items() if k != KEY_VARIABLE}},
    )  # fmt: skip
    assert done.returncode != 0
    assert "other machines can reach it, and no key is set" in done.stderr


def test_an_embedded_engine_asks_for_the_key_that_its_environment_had(tmp_path) -> None:
    async def scenario() -> None:
        from rlmix.launch.process import ChildProcess
        from rlmix.model.bundle import resolve_model

        ready = tmp_path / "ready"
        child = ChildProcess.start(
            [
                sys.executable, "-m", "rlmix.engine.embedded", "--model-path",
                str(resolve_model("bundled:tiny")), "--accelerator", "h100", "--weights", "bf16",
                "--kv", "bf16", "--attention", "fa3", "--max-running-requests", "1",
                "--ready-file", str(ready),
            ],
            name="engine", log_path=tmp_path / "log", ready_path=ready, env={KEY_VARIABLE: KEY},
        )  # fmt: skip
        try:
            url = str((await child.wait_ready(120))["url"])
            with_key = EngineClient(url, token=KEY, timeout_s=30)
            assert (await with_key.get_json("/server_info"))["accelerator"] == "h100"
            for token in (None, "another"):
                stranger = EngineClient(url, token=token, timeout_s=30)
                with pytest.raises(EngineError, match="401"):
                    await stranger.get_json("/server_info")
                await stranger.close()
            await with_key.close()
        finally:
            child.kill()
        assert KEY not in (tmp_path / "log").read_text()

    asyncio.run(scenario())
