"""The server of sandboxes: who gets in, what it keeps, what it forgets."""

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlmix.core.errors import ConfigError, SandboxError
from rlmix.sandbox import wire
from rlmix.sandbox.backend import open_backend
from rlmix.sandbox.link import RUN_MARK
from rlmix.sandbox.protocol import CommandResult
from rlmix.sandbox.reap import marked_processes, reap_folders
from rlmix.sandbox.remote import RemoteBackend
from rlmix.sandbox.server import read_token

from .backends import running_server
from .conftest import HISTORY, LIMITS
from .test_session import gone

TOKEN = secrets.token_hex(16)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    flags = ("--scratch", str(folder / "scratch"), "--max-sandboxes", "3", "--lease-s", "3")
    with running_server(folder, *flags, token=TOKEN) as ready:
        yield ready["url"]
    left = [path.name for path in (folder / "scratch").iterdir()]
    assert left == ["lock"]


def ask(url: str, method: str, path: str, body: object = None, token: str = TOKEN) -> Any:
    request = urllib.request.Request(
        url + path,
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {token}"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.loads(response.read())


def backend_for(url: str, run_id: str, **changes: Any) -> RemoteBackend:
    spec = {"urls": (url,), "token": TOKEN, "limits": LIMITS, "allow_weak": False}
    return RemoteBackend(**{**spec, "run_id": run_id, **changes})


def test_a_server_without_a_token_does_not_start() -> None:
    environment = {key: value for key, value in os.environ.items() if key != wire.TOKEN_VARIABLE}
    for token, length in ((None, 0), ("short", 5)):
        extra = {} if token is None else {wire.TOKEN_VARIABLE: token}
        done = subprocess.run(
            [sys.executable, "-m", "rlmix.sandbox.server"],
            env={**environment, **extra},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 2
        assert f"{wire.TOKEN_VARIABLE} has {length} characters; at least 16" in done.stderr
    with pytest.raises(ConfigError, match=r"token_urlsafe"):
        read_token({})


@pytest.mark.parametrize(
    "token", ["", "wrong" * 8, TOKEN + "x", TOKEN[:-1]], ids=["none", "other", "longer", "shorter"]
)
def test_a_request_without_the_token_reaches_nothing(url: str, token: str) -> None:
    for method, path in (("GET", "/v1/clients"), ("POST", "/v1/clients"), ("GET", "/nothing")):
        with pytest.raises(urllib.error.HTTPError) as caught:
            ask(url, method, path, token=token)
        assert caught.value.code == 401
    opening = backend_for(url, "r", token=token or "none")

    async def scenario() -> None:
        try:
            await opening.open()
        finally:
            await opening.close()

    with pytest.raises(SandboxError, match=r"token is wrong or missing \(HTTP 401\)"):
        asyncio.run(scenario())


def test_a_token_that_is_no_text_is_a_wrong_one(url: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(url, "GET", "/v1/clients", token="\xe9" * 20)
    assert caught.value.code == 401


def test_another_protocol_or_python_is_told_both_versions(url: str) -> None:
    body = {
        "version": wire.VERSION,
        "python": "cpython-27",
        "run_id": "r",
        "limits": wire.dump_limits(LIMITS),
        "allow_weak": False,
    }
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(url, "POST", "/v1/clients", body)
    assert caught.value.code == 503
    assert f"with {wire.PYTHON}, the worker 1 with cpython-27" in caught.value.read().decode()


def test_what_a_request_lacks_is_an_answer_and_not_the_servers_end(url: str) -> None:
    for body in ({}, [], {"version": 1, "python": wire.PYTHON, "limits": {"memory": 1}}):
        with pytest.raises(urllib.error.HTTPError) as caught:
            ask(url, "POST", "/v1/clients", body)
        assert caught.value.code in (400, 503)
    assert ask(url, "GET", "/v1/clients")["max_sandboxes"] == 3


def test_no_more_sandboxes_than_admitted_and_room_again_afterwards(url: str) -> None:
    async def scenario() -> None:
        backend = backend_for(url, f"full{os.getpid()}")
        await backend.open()
        template = await backend.prepare(HISTORY)
        boxes = [await backend.create(template) for _ in range(3)]
        with pytest.raises(SandboxError, match=r"3 sandboxes are live, --max-sandboxes=3"):
            await backend.create(template)
        await boxes[0].destroy()
        again = await backend.create(template)
        assert (await again.run("echo in")).output == "in\n"
        await backend.close()

    asyncio.run(scenario())
    assert ask(url, "GET", "/v1/clients")["clients"] == []


def test_a_worker_that_died_leaves_nothing_longer_than_its_lease(url: str) -> None:
    run_id, word = f"dead{os.getpid()}", f"{35000 + os.getpid()}.25"
    worker = (
        "import asyncio, sys\n"
        "from rlmix.sandbox.remote import RemoteBackend\n"
        "from rlmix.sandbox import wire\n"
        "from rlmix.core.task import Commit\n"
        "async def main():\n"
        "    url, token, run_id, limits, word = sys.argv[1:]\n"
        "    import json\n"
        "    backend = RemoteBackend(urls=(url,), token=token, run_id=run_id, allow_weak=False,\n"
        "                            limits=wire.load_limits(json.loads(limits)))\n"
        "    await backend.open()\n"
        "    box = await backend.create(await backend.prepare((Commit(message='m', "
        "files={'a': ''}),)))\n"
        "    await box.run(f'setsid -f env -i sleep {word}')\n"
        "    print('ready', flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    limits = json.dumps(wire.dump_limits(LIMITS))
    process = subprocess.Popen(
        [sys.executable, "-c", worker, url, TOKEN, run_id, limits, word],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(4)  # Beyond one lease: its heartbeats keep it.
    assert [row["run_id"] for row in ask(url, "GET", "/v1/clients")["clients"]] == [run_id]
    process.kill()
    process.wait()
    process.stdout.close()
    deadline_s = time.monotonic() + 30
    while ask(url, "GET", "/v1/clients")["clients"] and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert ask(url, "GET", "/v1/clients")["clients"] == []
    assert gone(word)


def test_a_run_can_be_ended_by_its_name_alone(url: str) -> None:
    async def scenario() -> None:
        backend = backend_for(url, f"named{os.getpid()}")
        await backend.open()
        box = await backend.create(await backend.prepare(HISTORY))
        answer = await asyncio.to_thread(ask, url, "DELETE", f"/v1/runs/named{os.getpid()}")
        assert answer == {"closed": 1}
        with pytest.raises(SandboxError, match="no such client; its lease ended"):
            await box.run("echo x")
        await backend.close()

    asyncio.run(scenario())


def test_one_sandbox_takes_one_call_at_a_time(url: str) -> None:
    async def scenario() -> None:
        backend = backend_for(url, f"busy{os.getpid()}")
        await backend.open()
        box = await backend.create(await backend.prepare(HISTORY))
        first = asyncio.create_task(box.run("touch begun; sleep 2; echo first"))
        await asyncio.sleep(0.7)
        with pytest.raises(SandboxError, match="is busy; one call at a time"):
            await box.run("echo second")
        assert (await first).output == "first\n"
        await backend.close()

    asyncio.run(scenario())


def test_a_server_that_is_gone_is_a_fault_of_the_machine(tmp_path: Path) -> None:
    async def scenario(url: str, pid: int) -> None:
        backend = backend_for(url, f"gone{os.getpid()}")
        await backend.open()
        template = await backend.prepare(HISTORY)
        box = await backend.create(template)
        running = asyncio.create_task(box.run("sleep 20"))
        await asyncio.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(SandboxError, match=f"sandbox server {url}"):
            await running
        with pytest.raises(SandboxError, match=f"sandbox server {url}"):
            await backend.create(template)
        await backend.close()

    scratch = tmp_path / "scratch"
    with running_server(tmp_path, "--scratch", str(scratch), token=TOKEN) as ready:
        asyncio.run(scenario(ready["url"], ready["pid"]))
    # It had no time to clean up; the next one in the same folder does.
    assert [path.name for path in scratch.iterdir() if path.name != "lock"] != []
    with running_server(tmp_path, "--scratch", str(scratch), token=TOKEN):
        assert [path.name for path in scratch.iterdir()] == ["lock"]
        second = subprocess.run(
            [sys.executable, "-m", "rlmix.sandbox.server", "--scratch", str(scratch)],
            env={**os.environ, wire.TOKEN_VARIABLE: TOKEN},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert second.returncode == 2
        assert "another one works in" in second.stderr
    assert marked_processes(RUN_MARK, f"gone{os.getpid()}") == []


def test_two_servers_share_the_sandboxes_and_one_takes_over(tmp_path: Path) -> None:
    async def scenario(urls: tuple[str, str], first_pid: int) -> None:
        backend = backend_for(urls[0], f"two{os.getpid()}", urls=urls)
        await backend.open()
        template = await backend.prepare(HISTORY)
        boxes = await asyncio.gather(*(backend.create(template) for _ in range(6)))
        assert [server.num_live for server in backend._servers] == [3, 3]
        assert {box._server.url for box in boxes} == set(urls)
        os.kill(first_pid, signal.SIGKILL)
        box = await backend.create(template)
        assert box._server.url == urls[1]
        assert (await box.run("cat a.py")).output == "x = 2\n"
        await backend.close()

    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    with (
        running_server(folders[0], "--scratch", str(folders[0] / "s"), token=TOKEN) as one,
        running_server(folders[1], "--scratch", str(folders[1] / "s"), token=TOKEN) as two,
    ):
        asyncio.run(scenario((one["url"], two["url"]), one["pid"]))
    reap_folders(folders[0] / "s")  # Nobody follows the killed one in its folder.
    assert [path.name for path in (folders[0] / "s").iterdir()] == ["lock"]


def test_remote_without_servers_or_token_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"sandbox\.servers is empty; start `python -m"):
        asyncio.run(open_backend("remote", LIMITS, tmp_path, "r"))
    monkeypatch.delenv(wire.TOKEN_VARIABLE, raising=False)
    opening = open_backend("remote", LIMITS, tmp_path, "r", servers=("http://127.0.0.1:9",))
    with pytest.raises(ConfigError, match=f"set {wire.TOKEN_VARIABLE} to the token"):
        asyncio.run(opening)


def test_a_result_with_half_a_surrogate_pair_survives_the_wire() -> None:
    result = CommandResult(exit_code=1, output="a\ud800b", oom=True)
    assert wire.load_result(wire.load(wire.dump(wire.dump_result(result)))) == result
