"""`python -m rlmix.engine.embedded`: one replica of an emulated accelerator, as a process.

Arguments are checked before torch is imported, so a wrong one costs milliseconds. Exit codes: 0
after SIGTERM or SIGINT, 2 for a wrong argument or a folder that cannot be served.
"""

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlmix.core.errors import ConfigError, ExitCode, RlmixError
from rlmix.engine.arguments import die_with_parent, numerics_of, server_parser
from rlmix.engine.embedded.profile import Profile
from rlmix.engine.keys import take_key

if TYPE_CHECKING:
    from rlmix.engine.embedded.scheduler import Scheduler
    from rlmix.numerics.consistent.shard import Layout

PROG = "rlmix.engine.embedded"

NICENESS = 10
"""An emulated accelerator takes cores that a real one would leave to the trainer, the sandboxes
and the verdicts. Yielding to them keeps samples fresh, and requests that wait meanwhile form
larger batches, which cost less per token."""


def main(argv: list[str] | None = None) -> int:
    started_s = time.monotonic()
    parser = server_parser(prog=PROG, description="An SGLang-shaped server for a small model.")
    parser.add_argument(
        "--enable-return-routed-experts",
        action="store_true",
        help="record which experts each token took, for requests that ask",
    )
    arguments = parser.parse_args(argv)
    if arguments.parent_pid is not None:
        die_with_parent(arguments.parent_pid)
    logging.basicConfig(
        level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s"
    )
    try:
        key = take_key(os.environ, host=arguments.host)
        profile = _check(arguments)
        asyncio.run(_serve(arguments, profile, key=key, started_s=started_s))
    except RlmixError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return ExitCode.BAD_REQUEST
    return ExitCode.GOOD


def _check(arguments: argparse.Namespace) -> Profile:
    if not Path(arguments.model_path).is_dir():
        raise ConfigError(f"--model-path {arguments.model_path} is not a folder")
    if arguments.max_running_requests < 1:
        raise ConfigError(f"--max-running-requests {arguments.max_running_requests}; at least 1")
    if not str(arguments.weight_version).isdecimal():
        raise ConfigError(f"--weight-version {arguments.weight_version}; give a decimal number")
    if arguments.consistency == "native" and (arguments.tp_size, arguments.ep_size) != (1, 1):
        raise ConfigError(
            f"--tp-size {arguments.tp_size} --ep-size {arguments.ep_size}: several processes share "
            "a model in exact mode only; leave them out or use --consistency exact"
        )
    return Profile(
        accelerator=arguments.accelerator,
        weights=arguments.weights,
        activations=arguments.activations,
        kv=arguments.kv,
        attention=arguments.attention,
        moe=arguments.moe,
        consistency=arguments.consistency,
    )


async def _serve(
    arguments: argparse.Namespace, profile: Profile, *, key: str | None, started_s: float
) -> None:
    import torch

    from rlmix.engine.embedded.scheduler import Scheduler
    from rlmix.engine.embedded.server import EmbeddedServer
    from rlmix.engine.embedded.shape import read_shape
    from rlmix.engine.embedded.weights import load_weights, read_config
    from rlmix.engine.http import write_ready_file

    torch.set_num_threads(1)
    folder = Path(arguments.model_path)
    shape = read_shape(read_config(folder))
    if arguments.enable_return_routed_experts and not shape.moe_layers:
        raise ConfigError(
            f"--enable-return-routed-experts: the model in {folder} has no experts; leave it out"
        )
    context_length = min(arguments.context_length or shape.context_length, shape.context_length)
    # Twice what the slots hold: running requests and as much again of remembered contexts.
    default_total = 2 * arguments.max_running_requests * context_length
    weights = load_weights(folder, shape=shape, profile=profile)
    numerics = replace(numerics_of(arguments, engine="embedded"), view=str(weights.spec))
    scheduler = Scheduler(
        shape,
        profile,
        weights,
        version=int(arguments.weight_version),
        max_running=arguments.max_running_requests,
        context_length=context_length,
        max_total_tokens=arguments.max_total_tokens or default_total,
        mask_cap=arguments.sampling_mask_max_tokens,
        records_routes=arguments.enable_return_routed_experts,
        layout=_layout(arguments),
        niceness=NICENESS,
    )
    server = EmbeddedServer(
        scheduler,
        profile=profile,
        numerics=numerics,
        model_path=folder,
        context_length=context_length,
        pool=arguments.pool,
        replica=arguments.replica,
        seed=arguments.seed,
        started_s=started_s,
        key=key,
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)

    def on_ready() -> None:
        logging.getLogger(PROG).info("serving %s at %s", numerics.compact(), server.url)
        if arguments.ready_file is not None:
            document = {
                "url": server.url,
                "port": server.port,
                "pid": os.getpid(),
                "weight_version": arguments.weight_version,
                "numerics_key": numerics.compact(),
                "numerics": numerics.to_dict(),
            }
            write_ready_file(arguments.ready_file, document)
        # Everything imported so far stays: a collection that walks all of torch takes 50 ms,
        # which would show as a pause of the whole batch.
        gc.collect()
        gc.freeze()
        yield_cores()

    watching = asyncio.create_task(_watch_ranks(scheduler, stop))
    try:
        await server.run(host=arguments.host, port=arguments.port, stop=stop, on_ready=on_ready)
    finally:
        watching.cancel()
        scheduler.close()
    with contextlib.suppress(asyncio.CancelledError):
        await watching


def _layout(arguments: argparse.Namespace) -> "Layout":
    from rlmix.numerics.consistent.shard import Layout

    try:
        return Layout(tensor=arguments.tp_size, experts=arguments.ep_size)
    except ValueError as error:
        raise ConfigError(str(error)) from error


async def _watch_ranks(scheduler: "Scheduler", stop: asyncio.Event) -> None:
    """Stop serving when a process that shares the model ends; raises which one."""
    if scheduler.exact is not None:
        try:
            await scheduler.exact.model.watch()
        finally:
            stop.set()


def yield_cores() -> None:
    """Lower this process's priority, and that of its session where the kernel schedules those. One
    that was started in somebody else's session, say a shell's, must not slow that down."""
    os.nice(NICENESS)
    if os.getsid(0) != os.getpid():
        return
    with contextlib.suppress(OSError):  # No such file without autogroup scheduling.
        Path("/proc/self/autogroup").write_text(str(NICENESS))


if __name__ == "__main__":
    sys.exit(main())
