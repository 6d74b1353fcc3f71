"""The control endpoint as another process meets it."""

import asyncio
import stat
from dataclasses import replace
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from rlmix.core.errors import ConfigError
from rlmix.loop.control import ControlServer
from rlmix.observe.live_state import (
    EventLine,
    LiveState,
    PoolState,
    state_from_dict,
    state_to_dict,
)
from rlmix.observe.run_dir import RunDir
from rlmix.scaling.control import CONTROL_FILE, KEY_VARIABLE, ControlClient
from rlmix.scaling.operation import begin, cancel

STATE = LiveState(
    run="r", phase="sampling", step=1, num_steps=3, elapsed_s=2.0, rewards=(0.5,),
    pools=(PoolState(name="h100", accelerator="h100", is_emulated=True, weights="fp8", kv="fp8",
                     replicas_ready=1, replicas_total=1),),
    metrics={"reward/mean": 0.5, "loss/policy": float("nan")},
    events=(EventLine(run_s=1.0, kind="scale_started", reason="by hand"),),
)  # fmt: skip


class Desk:
    """What stands behind the server: one operation, and what was asked."""

    def __init__(self):
        self.asked = []
        self.operation, _ = begin(
            "x", {"h100": 2}, replicas_from={"h100": 1}, added={"h100-1": "h100"}, removed={},
            drain_s=1.0, now_s=0.0, known={},
        )  # fmt: skip

    async def ask(self, targets, name, reason):
        self.asked.append((dict(targets), name, reason))
        if targets == {"h100": 9}:
            raise ConfigError("h100=9: above the ceiling of 3")
        return self.operation

    async def leave(self, machine, within_s, reason):
        self.asked.append((machine, within_s, reason))
        if machine == "nobody":
            raise ConfigError("machine 'nobody': there are gpu-1")
        return self.operation

    async def stay(self, machine, reason):
        self.asked.append((machine, reason))
        return

    def find(self, name):
        return self.operation

    def cancel(self, name, reason):
        self.operation, _ = cancel(self.operation, reason=reason, now_s=1.0)
        return self.operation


def serve(run, talk):
    """Run `talk(client)` in a thread beside the server of a run."""

    async def scenario():
        desk = Desk()
        server = ControlServer(
            run.path, bind="127.0.0.1", describe=lambda: {"pools": {"h100": {"replicas": 1}}},
            show=lambda: state_to_dict(STATE),
            ask=desk.ask, find=desk.find, cancel=desk.cancel,
            change=lambda settings: {**settings, "told": True},
            leave=desk.leave, stay=desk.stay,
        )  # fmt: skip
        await server.start()
        try:
            return await asyncio.to_thread(talk, run.path, desk)
        finally:
            await server.stop()

    return asyncio.run(scenario())


@pytest.fixture
def run(tmp_path):
    with RunDir.create(tmp_path, "r") as run:
        yield run


def test_pools_operations_and_settings_go_through_the_file_in_the_run_s_folder(run):
    def talk(folder, desk):
        assert stat.S_IMODE((folder / CONTROL_FILE).stat().st_mode) == 0o600
        client = ControlClient.of_run(folder)
        assert client.pools() == {"pools": {"h100": {"replicas": 1}}}
        assert state_from_dict(client.view()) == replace(STATE, metrics={"reward/mean": 0.5})
        begun = client.scale("x", {"h100": 2}, "by hand")
        assert desk.asked == [({"h100": 2}, "x", "by hand")]
        assert (begun["id"], begun["status"], begun["progress"]) == ("x", "running", 0.0)
        assert client.operation("x")["replicas"]["h100-1"]["step"] == "booting"
        assert client.cancel("x", "no")["status"] == "rolling_back"
        assert client.change_settings({"scaling.auto": True})["settings"]["told"] is True

    serve(run, talk)
    assert not (run.path / CONTROL_FILE).exists()


def test_a_machine_leaves_within_its_time_and_stays_again(run):
    def talk(folder, desk):
        client = ControlClient.of_run(folder)
        assert client.leave("gpu-1", 90.0, "notice")["id"] == "x"
        client.leave("gpu-1", None, "notice")
        assert client.stay("gpu-1", "false alarm") == {}
        assert desk.asked == [
            ("gpu-1", 90.0, "notice"), ("gpu-1", None, "notice"), ("gpu-1", "false alarm"),
        ]  # fmt: skip
        with pytest.raises(ConfigError, match=r"^machine 'nobody': there are gpu-1$"):
            client.leave("nobody", None, "notice")

    serve(run, talk)


def test_a_refusal_is_the_run_s_own_sentence(run):
    def talk(folder, desk):
        with pytest.raises(ConfigError, match=r"^h100=9: above the ceiling of 3$"):
            ControlClient.of_run(folder).scale("y", {"h100": 9}, "")

    serve(run, talk)


def test_what_is_no_id_or_no_endpoint_of_a_run_is_one_sentence(run):
    def talk(folder, desk):
        client = ControlClient.of_run(folder)
        for name in ("", "a b", "a/b", "..", "x" * 65, "\u00e9"):
            with pytest.raises(ConfigError, match="an id is 1 to 64 letters"):
                client.scale(name, {"h100": 2}, "by hand")
            with pytest.raises(ConfigError, match="an id is 1 to 64 letters"):
                client.cancel(name, "no")
        assert desk.asked == []
        for url in ("http://127.0.0.1:port", "http://[::1", "http://a b"):
            with pytest.raises(ConfigError, match="is not the control endpoint of a run"):
                ControlClient(url, key="k", run="r").pools()
        with pytest.raises(ConfigError, match="no address"):
            ControlClient.of_url("http://[::1", {KEY_VARIABLE: "k"})

    serve(run, talk)


def test_without_the_key_nothing_is_answered_and_from_elsewhere_it_comes_in_the_environment(run):
    def talk(folder, desk):
        known = ControlClient.of_run(folder)
        # The last is a byte that is no UTF-8.
        for word in (None, "Bearer guess", known._key, "Bearer \xe9"):
            headers = {} if word is None else {"Authorization": word}
            for path in ("/pools", "/view", "/settings", "/no_such_path"):
                with pytest.raises(HTTPError) as caught:
                    urlopen(Request(known._url + path, headers=headers), timeout=20)
                assert caught.value.code == 401, (path, headers)
        stranger = ControlClient(known._url, key="guess", run="r")
        with pytest.raises(ConfigError, match="the key is not the run's"):
            stranger.pools()
        far = ControlClient.of_url(known._url, {KEY_VARIABLE: known._key})
        assert far.pools()["pools"]
        with pytest.raises(ConfigError, match=f"set {KEY_VARIABLE}"):
            ControlClient.of_url(known._url, {})

    serve(run, talk)


def test_runs_that_start_have_ended_or_do_not_answer_are_told_apart(tmp_path, run):
    with pytest.raises(ConfigError, match="is starting and takes no requests yet"):
        ControlClient.of_run(run.path)
    gone = ControlClient("http://127.0.0.1:9", key="k", run="r")
    with pytest.raises(ConfigError, match=r"does not answer at http://127\.0\.0\.1:9"):
        gone.pools()
    run.close("finished")
    with pytest.raises(ConfigError, match=r"run r is not running \(finished\)"):
        ControlClient.of_run(run.path)
