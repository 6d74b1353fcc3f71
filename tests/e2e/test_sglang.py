"""Whole runs with a real SGLang server on this machine's CPU, beside an emulated accelerator.

A server takes half a minute to start on a quiet machine and minutes on a busy one, so everything is
awaited with wide limits.
"""

import json
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from rlmix.engine.sglang import serve
from rlmix.engine.sglang.environment import is_runnable, sglang_python
from rlmix.observe.trajectories import read_trajectories
from rlmix.plan.capabilities import SGLANG_VERSION

pytestmark = pytest.mark.slow

LIMIT_S = 600


@pytest.fixture(autouse=True)
def _environment():
    python = sglang_python(None, version=SGLANG_VERSION, environ=os.environ)
    if not is_runnable(python):
        message = f"no SGLang at {python}: run scripts/sglang-env (11 GB, up to 12 minutes)"
        if os.environ.get("RLMIX_REQUIRE_SGLANG") == "1":
            pytest.fail(message)
        pytest.skip(message)


def start(start_run, name, *overrides):
    return start_run(name, *overrides, experiment="tiny_sglang")


def server(run):
    """What the real server said when it was ready: url, pid."""
    return json.loads((run.path / "ready" / "sglang-0.json").read_text())


def keys_of(pid):
    """The API key and the admin key of a server, out of the environment that it was given."""
    words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    found = dict(word.decode().split("=", 1) for word in words if b"=" in word)
    return found[serve.API_KEY_VARIABLE], found[serve.ADMIN_KEY_VARIABLE]


def ask(url, *, key=None, body=None):
    """Status and text of one exchange."""
    request = urllib.request.Request(url, data=body)
    request.add_header("Content-Type", "application/json")
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def is_sampling(run):
    """Does the real server have a request under way? Its metrics are open, as its probes are."""
    try:
        _, text = ask(server(run)["url"] + "/metrics")
    except OSError:
        return False
    lines = [line for line in text.splitlines() if line.startswith("sglang:num_running_reqs{")]
    return any(float(line.rsplit(" ", 1)[1]) >= 1 for line in lines)


def sessions_of(run):
    return [
        trajectory
        for file in sorted((run.path / "trajectories").glob("step_*.jsonl"))
        for trajectory in read_trajectories(file)
    ]


def test_two_steps_on_a_real_server_beside_an_emulated_one(start_run):
    run = start(start_run, "two", "--json")
    run.wait_until(lambda: bool(run.events("replica_ready")) and is_sampling(run), "turns", LIMIT_S)
    said = server(run)
    api_key, admin_key = keys_of(said["pid"])

    # Keys: two of them, in no command line, not in what the server tells, and asked for.
    assert api_key != admin_key
    commands = b"\n".join(
        Path(f"/proc/{process.pid}/cmdline").read_bytes() for process in run.marked_processes()
    )
    assert b"serve.py" in commands
    assert api_key.encode() not in commands
    assert admin_key.encode() not in commands
    status, text = ask(said["url"] + "/server_info", key=api_key)
    assert status == 200
    assert api_key not in text
    assert admin_key not in text
    assert json.loads(text)["trust_remote_code"] is False
    assert ask(said["url"] + "/server_info")[0] == 401
    assert ask(said["url"] + "/generate", body=b"{}")[0] == 401
    assert ask(said["url"] + "/update_weights_from_disk", key=api_key, body=b"{}")[0] == 401
    assert ask(said["url"] + "/update_weights_from_tensor", key=api_key, body=b"{}")[0] == 401
    # The server listens on loopback only.
    listening = {
        connection.laddr
        for connection in psutil.Process(said["pid"]).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert {address.ip for address in listening} == {"127.0.0.1"}

    code, stdout = run.finish(LIMIT_S)
    assert code == 0, run.stderr()
    document = json.loads(stdout)
    assert document["steps"] == 2
    assert document["pools"]["sglang"]["is_emulated"] is False
    assert document["pools"]["sglang"]["tokens"] > 0

    # Its weight version rose between the steps, and it says so itself.
    updates = [event for event in run.events("replica_updated") if event["pool"] == "sglang"]
    assert updates[0]["version"] == 1
    ready = [event for event in run.events("replica_ready") if event["pool"] == "sglang"]
    assert ready[0]["numerics_key"].endswith(f"/sglang-{SGLANG_VERSION}/real")
    assert 0 < ready[0]["canary_mean_abs_nats"] < 0.05

    # Its tokens were trained on, with its own logprobs; how far they were off is in the metrics.
    turns = [turn for session in sessions_of(run) for turn in session.turns]
    real = [turn for turn in turns if turn.pool == "sglang"]
    assert {turn.pool for turn in turns} == {"sglang", "b200"}
    assert real
    for turn in real:
        assert turn.numerics_key.endswith("/real")
        assert len(turn.sampler_logprobs) == len(turn.output_ids) > 0
        assert turn.kept is not None
        assert turn.kept_exact
        assert turn.version_spans
    rows = [row for row in run.rows() if "mismatch/by_pool/sglang/mean_abs" in row]
    assert rows
    for row in rows:
        # BF16 on both sides: rounding, and no format between them.
        assert row["mismatch/by_pool/sglang/mean_abs"] < 0.05
        assert row["mismatch/by_pool/sglang/k3_kl"] < row["mismatch/by_pool/b200/k3_kl"]

    run.assert_nothing_left()
    written = [path for path in run.path.rglob("*") if path.is_file()]
    assert any(path.name == "engine-sglang-0.log" for path in written)
    for path in written:
        content = path.read_bytes()
        assert api_key.encode() not in content, path
        assert admin_key.encode() not in content, path


def test_a_killed_server_comes_back_catches_up_and_nothing_is_lost(start_run):
    run = start(start_run, "kill", "loop.steps=2000", "loop.checkpoint_every=50")

    def events(kind):
        return [event for event in run.events(kind) if event["replica"] == "sglang-0"]

    def updated():
        return [event["version"] for event in events("replica_updated")]

    run.wait_until(lambda: len(run.rows()) >= 1 and updated() != [], "its first update", LIMIT_S)
    # Of a session, and not a probe of an update that is under way.
    run.wait_until(
        lambda: is_sampling(run) and len(events("replica_updating")) == len(updated()),
        "a turn on it",
        LIMIT_S,
    )
    first = server(run)["pid"]
    group = [process.pid for process in psutil.Process(first).children(recursive=True)]
    os.killpg(first, signal.SIGKILL)
    run.wait_until(lambda: events("replica_dead") != [], "the death to be noticed", LIMIT_S)
    run.wait_until(lambda: len(events("replica_ready")) == 2, "a replacement", LIMIT_S)
    again = events("replica_ready")[1]
    booted = events("replica_starting")[1]
    # It started on a version that was new then, and served only after it was verified.
    assert int(booted["reason"].split()[-1]) <= again["version"]
    assert again["incarnation"] == 2
    assert again["canary_mean_abs_nats"] is None or again["canary_mean_abs_nats"] < 0.05
    back_at = len(run.rows())
    run.wait_until(
        lambda: any("mismatch/by_pool/sglang/k3_kl" in row for row in run.rows()[back_at:]),
        "tokens of the replacement to be trained on",
        LIMIT_S,
    )
    assert not [pid for pid in [first, *group] if psutil.pid_exists(pid)]
    os.kill(run.process.pid, signal.SIGINT)
    code, _ = run.finish(LIMIT_S)
    assert code == 130, run.stderr()

    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert all(row["rollout/void_frac"] == 0 for row in rows)
    sessions = sessions_of(run)
    assert len(sessions) == 8 * len(rows)
    assert len({session.session_id for session in sessions}) == len(sessions)
    # Those that were there went on elsewhere. Not each was trained on: the step that their group
    # was meant for may have been over by then.
    ended = map(json.loads, (run.path / "sessions.jsonl").read_text().splitlines())
    moved = [session for session in ended if session.get("rehomed")]
    assert moved
    assert {session["what"] for session in moved} == {"finished"}
    run.assert_nothing_left()


def test_a_wrong_flag_is_refused_with_the_words_of_sglang_s_parser(start_run):
    # `several` words is all that rlmix knows of this one; SGLang knows that they are numbers.
    run = start(
        start_run, "flag", "+pools.sglang.engine_args.bucket-e2e-request-latency=[abc]"
    )  # fmt: skip
    code, _ = run.finish(LIMIT_S)
    assert code == 2
    assert "pools.sglang.engine_args: SGLang 0.5.23 refuses its arguments:" in run.stderr()
    assert "bucket-e2e-request-latency: invalid float value: 'abc'" in run.stderr()
    assert not run.path.exists()


def test_what_only_the_server_refuses_ends_the_run_with_its_own_words(start_run):
    run = start(start_run, "late", "pools.b200.replicas=0", "launch.max_restarts=0",
                "+pools.sglang.engine_args.tokenizer-path=/no/such/tokenizer")  # fmt: skip
    code, _ = run.finish(LIMIT_S)
    assert code == 1
    assert "pools: sglang-0 cannot be started" in run.stderr()
    assert "sglang-0 ended with exit code 1 before it was ready" in run.stderr()
    assert "/no/such/tokenizer" in run.stderr()
    assert len(run.events("replica_starting")) == 1
    run.assert_nothing_left()
