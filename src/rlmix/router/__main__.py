"""`python -m rlmix.router`: the router as a process of its own."""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from pathlib import Path

from aiohttp import web

from rlmix.core.errors import ConfigError, ExitCode
from rlmix.router.prober import StaticReplica, parse_replicas
from rlmix.router.server import Router, RouterSpec


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m rlmix.router", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="0 lets the system choose")
    parser.add_argument("--ready-file", type=Path, help="written as JSON {url, pid} when serving")
    parser.add_argument(
        "--replica", action="append", default=[], metavar="NAME=URL",
        help="an SGLang server to route to; the router asks it itself how it is",
    )  # fmt: skip
    parser.add_argument(
        "--speed", action="append", default=[], metavar="NAME=X",
        help="relative speed of a --replica before it has been observed; default 1",
    )  # fmt: skip
    parser.add_argument("--token-env", help="environment variable that holds the bearer token")
    parser.add_argument("--policy", default="shortest_delay")
    parser.add_argument("--speeds", choices=("prior", "observed"), default="prior")
    parser.add_argument("--queue-timeout-s", type=float, default=30.0)
    parser.add_argument("--request-timeout-s", type=float, default=600.0)
    parser.add_argument("--idle-expiry-s", type=float, default=1800.0)
    parser.add_argument("--max-sessions", type=int, default=100_000)
    return parser.parse_args(argv)


def read_token(variable: str | None) -> str | None:
    """The token in the named variable.

    Raises:
        ConfigError: the variable is named but empty; serving without a token would be wrong.
    """
    if variable is None:
        return None
    token = os.environ.get(variable)
    if not token:
        raise ConfigError(f"router: --token-env {variable}: the variable is not set")
    return token


def read_replicas(arguments: argparse.Namespace) -> tuple[StaticReplica, ...]:
    try:
        return parse_replicas(arguments.replica, arguments.speed)
    except ValueError as error:
        raise ConfigError(f"router: {error}") from None


def write_ready_file(path: Path, url: str) -> None:
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(json.dumps({"url": url, "pid": os.getpid()}))
    fresh.rename(path)


async def serve(arguments: argparse.Namespace) -> None:
    """Serve until TERM or INT."""
    router = Router(
        RouterSpec(
            policy=arguments.policy,
            queue_timeout_s=arguments.queue_timeout_s,
            request_timeout_s=arguments.request_timeout_s,
            idle_expiry_s=arguments.idle_expiry_s,
            max_sessions=arguments.max_sessions,
            observe_speeds=arguments.speeds == "observed",
            replicas=read_replicas(arguments),
            token=read_token(arguments.token_env),
        )
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    # A client that hangs up ends its request here and, through the closed connection, on the
    # replica: nobody generates for a session that was cancelled.
    runner = web.AppRunner(
        router.app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, arguments.host, arguments.port, backlog=2048)
        await site.start()
        host, port = runner.addresses[0][:2]
        url = f"http://{host}:{port}"
        logging.getLogger("rlmix.router").info("serving at %s, policy %s", url, arguments.policy)
        if arguments.ready_file is not None:
            write_ready_file(arguments.ready_file, url)
        await stop.wait()
    finally:
        await runner.cleanup()


def main(argv: list[str] | None = None) -> int:
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(serve(parse_arguments(sys.argv[1:] if argv is None else argv)))
    except (ConfigError, OSError) as error:
        print(
            str(error) if str(error).startswith("router") else f"router: {error}", file=sys.stderr
        )
        return int(ExitCode.BAD_REQUEST)
    return int(ExitCode.GOOD)


if __name__ == "__main__":
    sys.exit(main())
