"""`python -m rlmix.router`: the router as a process of its own, or as several behind one port.

In front of any SGLang servers, with nothing else of rlmix running:

    python -m rlmix.router --port 30000 --replica h100-0=http://10.0.0.1:30000 \\
        --replica a100-0=http://10.0.0.2:30000 --speed h100-0=4 --speed a100-0=1
"""

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
from pathlib import Path

from aiohttp import web

from rlmix.core.addresses import is_loopback
from rlmix.core.errors import ConfigError, ExitCode, RlmixError
from rlmix.engine.arguments import die_with_parent
from rlmix.model.bundle import resolve_model
from rlmix.router.server import Router, RouterSpec
from rlmix.router.shards import ShardSpec, write_json
from rlmix.router.static import FACTS, parse_replicas
from rlmix.router.supervisor import Supervisor

BACKLOG = 2048
OWN_OPTIONS = ("host", "port", "ready_file", "shards", "shard_index", "state_dir", "parent_pid")
"""Options that the supervisor gives each shard anew."""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rlmix.router",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=0, help="0 lets the system choose")
    add("--ready-file", type=Path, help="written as JSON {url, pid} when serving")
    add(
        "--replica",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="a server to route to; the router asks it itself how it is",
    )
    add(
        "--speed",
        action="append",
        default=[],
        metavar="NAME=X",
        help="relative speed of a --replica before it has been observed; default 1",
    )
    add(
        "--roofline",
        action="append",
        default=[],
        metavar="NAME=FACT:X,...",
        help=f"the same from facts of its accelerator: {', '.join(FACTS)}",
    )
    add("--token-env", help="environment variable that holds the bearer token")
    add("--policy", default="shortest_delay", help="shortest_delay or least_sessions")
    add("--speeds", choices=("prior", "observed"), default="observed")
    add("--view", default="strict", help="strict or prefer: may a session change its weight view")
    add("--placement", default="free", help="free, pack or spread: sessions of one X-Group-Id")
    add(
        "--break-affinity-s",
        type=float,
        default=30.0,
        help="a session leaves its replica when it would be done so much sooner elsewhere",
    )
    add("--staleness-s", type=float, default=0.0, help="delay that a version behind counts as")
    add("--ramp-s", type=float, default=0.0, help="time over which a new replica is filled")
    add("--queue-timeout-s", type=float, default=30.0)
    add("--request-timeout-s", type=float, default=600.0)
    add("--idle-expiry-s", type=float, default=1800.0)
    add("--max-sessions", type=int, default=100_000, help="in memory; further ones are spilled")
    add(
        "--admit-batches",
        type=float,
        default=4.0,
        help="batches of requests that a replica may have and still be given new sessions",
    )
    add("--max-waiting", type=int, default=4096, help="requests that wait for a place")
    add("--probe-every-s", type=float, default=1.0, help="0: replicas are never asked")
    add("--stall-timeout-s", type=float, default=120.0)
    add("--model", help="folder of tokenizer and chat template, or bundled:NAME: serves /v1/...")
    add("--model-name", default="rlmix", help="what OpenAI clients call it")
    add("--state-dir", type=Path, help="folder of what outlives a restart: homes, trajectories")
    add("--shards", type=int, default=1, help="processes behind the port")
    add("--shard-index", type=int, help=argparse.SUPPRESS)
    add("--parent-pid", type=int, help=argparse.SUPPRESS)
    return parser  # fmt: skip


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    return make_parser().parse_args(argv)


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


def make_spec(arguments: argparse.Namespace) -> RouterSpec:
    """The router that the arguments mean.

    Raises:
        ConfigError: which of them is wrong, and what is allowed.
    """
    try:
        replicas = parse_replicas(arguments.replica, arguments.speed, arguments.roofline)
    except ValueError as error:
        raise ConfigError(f"router: {error}") from None
    for name in (
        "queue_timeout_s", "request_timeout_s", "idle_expiry_s", "stall_timeout_s", "admit_batches",
    ):  # fmt: skip
        if not getattr(arguments, name) > 0:
            raise ConfigError(f"router: --{name.replace('_', '-')}: give a number above 0")
    for name in ("break_affinity_s", "staleness_s", "ramp_s", "probe_every_s"):
        if not getattr(arguments, name) >= 0:
            raise ConfigError(f"router: --{name.replace('_', '-')}: give a number of at least 0")
    for name, least in (("max_sessions", 1), ("max_waiting", 0)):
        if getattr(arguments, name) < least:
            raise ConfigError(f"router: --{name.replace('_', '-')}: give at least {least}")
    if not 0 <= arguments.port < 1 << 16:
        raise ConfigError(f"router: --port {arguments.port}: give 0 to 65535")
    if arguments.shards < 1:
        raise ConfigError(f"router: --shards {arguments.shards}: give at least 1")
    token = read_token(arguments.token_env)
    if token is None and not is_loopback(arguments.host):
        raise ConfigError(
            f"router: --host {arguments.host}: other machines can reach it, and it asks for no "
            "token; name a variable that holds one with --token-env, or listen on 127.0.0.1"
        )
    shard, store_path = None, None
    index = arguments.shard_index
    if index is not None:
        shard = ShardSpec(index=index, count=arguments.shards, folder=arguments.state_dir)
        store_path = arguments.state_dir / f"shard-{index}.sqlite"
    elif arguments.state_dir is not None:
        store_path = arguments.state_dir / "sessions.sqlite"
    return RouterSpec(
        policy=arguments.policy,
        queue_timeout_s=arguments.queue_timeout_s,
        request_timeout_s=arguments.request_timeout_s,
        idle_expiry_s=arguments.idle_expiry_s,
        max_sessions=arguments.max_sessions,
        observe_speeds=arguments.speeds == "observed",
        view=arguments.view,
        placement=arguments.placement,
        break_affinity_s=arguments.break_affinity_s,
        staleness_s=arguments.staleness_s,
        ramp_s=arguments.ramp_s,
        max_waiting=arguments.max_waiting,
        admit_batches=arguments.admit_batches,
        probe_every_s=arguments.probe_every_s,
        stall_timeout_s=arguments.stall_timeout_s,
        replicas=replicas,
        model_dir=None if arguments.model is None else resolve_model(arguments.model),
        model_name=arguments.model_name,
        store_path=store_path,
        shard=shard,
        token=token,
    )


def shard_argv(arguments: argparse.Namespace) -> list[str]:
    """The arguments of each shard, without those that its supervisor adds."""
    argv: list[str] = []
    for name, value in vars(arguments).items():
        if name in OWN_OPTIONS or value is None:
            continue
        flag = "--" + name.replace("_", "-")
        for one in value if isinstance(value, list) else [value]:
            argv += [flag, str(one)]
    return argv


async def serve(arguments: argparse.Namespace) -> None:
    """Serve until TERM or INT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    spec = make_spec(arguments)
    if arguments.shards > 1 and arguments.shard_index is None:
        supervisor = Supervisor(
            shard_argv(arguments),
            count=arguments.shards,
            host=arguments.host,
            port=arguments.port,
            state_dir=arguments.state_dir,
            ready_file=arguments.ready_file,
        )
        await supervisor.run(stop)
        return
    router = Router(spec)
    # A client that hangs up ends its request here and, through the closed connection, on the
    # replica: nobody generates for a session that was cancelled.
    runner = web.AppRunner(
        router.app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0
    )
    await runner.setup()
    try:
        is_shard = spec.shard is not None
        own_port = 0 if is_shard else arguments.port
        own_host = "127.0.0.1" if is_shard else arguments.host
        await web.TCPSite(runner, own_host, own_port, backlog=BACKLOG).start()
        host, port = runner.addresses[0][:2]
        url = f"http://{host}:{port}"
        if is_shard:
            router.set_own_url(url)
            await web.TCPSite(
                runner, arguments.host, arguments.port, backlog=BACKLOG, reuse_port=True
            ).start()
        logging.getLogger("rlmix.router").info("serving at %s, policy %s", url, arguments.policy)
        if arguments.ready_file is not None:
            write_json(arguments.ready_file, {"url": url, "pid": os.getpid()})
        await stop.wait()
    finally:
        await runner.cleanup()


def calm_collector() -> None:
    """What is loaded by now stays for good, so it is never looked through again; and young objects
    are collected in larger lots. A full pass took tens of milliseconds, which a turn waited."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    if arguments.parent_pid is not None:
        die_with_parent(arguments.parent_pid)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    calm_collector()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(serve(arguments))
    except (RlmixError, OSError) as error:
        text = str(error)
        print(text if text.startswith("router") else f"router: {text}", file=sys.stderr)
        return int(ExitCode.BAD_REQUEST)
    return int(ExitCode.GOOD)


if __name__ == "__main__":
    sys.exit(main())
