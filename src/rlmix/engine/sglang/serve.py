"""One real SGLang server, started by a program that runs in SGLang's own environment.

    PYTHON -P serve.py ARGUMENTS OF sglang.launch_server

rlmix is not installed there, so this file imports nothing of it. It starts what
`python -m sglang.launch_server ARGUMENTS` starts, and adds three things:

* The keys come from the environment and stay out of SGLang's own settings, which it logs, prints
  under `/server_info`, and hands to its child processes. SGLang's own check of keys is put before
  its routes: the API key opens `/generate` and what is only read, the admin key the rest.
* `--port 0` becomes a port that the system says is free.
* When the server can serve, it says so in a file, as every server of rlmix does.
"""

import json
import os
import socket
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

API_KEY_VARIABLE = "RLMIX_ENGINE_API_KEY"
ADMIN_KEY_VARIABLE = "RLMIX_ENGINE_ADMIN_KEY"
READY_VARIABLE = "RLMIX_ENGINE_READY_FILE"

FREEZE_TIMEOUT_S = 10.0
LISTEN_TIMEOUT_S = 60.0
LISTEN_POLL_S = 0.1


def main() -> None:
    argv = sys.argv[1:]
    ready_path = os.environ.pop(READY_VARIABLE, None)
    api_key = os.environ.pop(API_KEY_VARIABLE, None)
    admin_key = os.environ.pop(ADMIN_KEY_VARIABLE, None)
    _forget_secrets()
    if value_of(argv, "--port") == "0":
        host = value_of(argv, "--host") or "127.0.0.1"
        argv[argv.index("--port") + 1] = str(free_port(host))

    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    server_args = prepare_server_args(argv)
    server_args.resolve_once()

    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils import kill_process_tree

    if api_key or admin_key:
        _ask_for_keys(http_server, api_key=api_key, admin_key=admin_key)

    def say_ready() -> None:
        if ready_path is not None:
            host, port = server_args.host, server_args.port
            document = {
                "url": f"http://{f'[{host}]' if ':' in host else host}:{port}",
                "port": port,
                "pid": os.getpid(),
                "weight_version": value_of(argv, "--weight-version"),
            }
            _write(Path(ready_path), document)

    try:
        http_server.launch_server(server_args, launch_callback=say_ready)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def value_of(argv: list[str], flag: str) -> str | None:
    """The word after a flag; None when it is not there."""
    return argv[argv.index(flag) + 1] if flag in argv[:-1] else None


def free_port(host: str) -> int:
    """A port that nobody listens on now. Another program may take it before the server does; the
    server then ends with an error and its replica is started again."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _forget_secrets() -> None:
    """SGLang's child processes inherit the environment and need no key of the run or of Ray."""
    for name in list(os.environ):
        if name.startswith(("RLMIX_", "RAY_")) and name.endswith(("_TOKEN", "_KEY")):
            del os.environ[name]


def _ask_for_keys(http_server: Any, *, api_key: str | None, admin_key: str | None) -> None:
    """SGLang's own middleware with our keys, so that they are in no `ServerArgs`."""
    from sglang.srt.utils.auth import add_api_key_middleware

    add_api_key_middleware(http_server.app, api_key=api_key, admin_api_key=admin_key)

    def freeze(server_args: Any) -> None:
        """What the server asks itself after its start: without a key it would be refused, and
        without its warm-up it asks before it listens. Comes back when it listens."""
        request = urllib.request.Request(
            server_args.url() + "/freeze_gc",
            method="POST",
            headers={"Authorization": f"Bearer {admin_key or api_key}"},
        )
        deadline_s = time.monotonic() + LISTEN_TIMEOUT_S
        while True:
            try:
                urllib.request.urlopen(request, timeout=FREEZE_TIMEOUT_S).close()
            except OSError as error:
                if time.monotonic() > deadline_s:
                    print(f"serve: /freeze_gc failed: {error}", file=sys.stderr, flush=True)
                    return
                time.sleep(LISTEN_POLL_S)
            else:
                return

    http_server._freeze_gc_after_server_warmup = freeze


def _write(path: Path, document: dict[str, Any]) -> None:
    """Complete from the first moment on."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(document))
    unfinished.replace(path)


if __name__ == "__main__":
    main()
