"""The scripted engine as a process: see `main`."""

import asyncio
import os
import sys

from rlmix.core.errors import ConfigError
from rlmix.engine.arguments import die_with_parent, numerics_of, server_parser
from rlmix.engine.http import write_ready_file
from rlmix.engine.keys import take_key
from rlmix.engine.scripted.policies import HashPolicy
from rlmix.engine.scripted.server import ScriptedEngine

DEFAULT_CONTEXT = 1 << 16


def main() -> None:
    """`python -m rlmix.engine.scripted`: the fake as a process, with the embedded server's
    arguments and `--vocab-size`, `--latency-s`, `--token-s`."""
    parser = server_parser(prog="rlmix.engine.scripted", description="A scripted fake engine.")
    parser.add_argument("--vocab-size", type=int, default=256)
    parser.add_argument("--latency-s", type=float, default=0.0)
    parser.add_argument("--token-s", type=float, default=0.0)
    arguments = parser.parse_args()
    if arguments.parent_pid is not None:
        die_with_parent(arguments.parent_pid)
    try:
        key = take_key(os.environ, host=arguments.host)
    except ConfigError as error:
        sys.exit(f"rlmix.engine.scripted: {error}")

    async def serve() -> None:
        numerics = numerics_of(arguments, engine="scripted")
        engine = ScriptedEngine(
            HashPolicy(vocab_size=arguments.vocab_size, seed=arguments.seed),
            numerics=numerics,
            pool=arguments.pool,
            replica=arguments.replica,
            weight_version=int(arguments.weight_version),
            max_running=arguments.max_running_requests,
            latency_s=arguments.latency_s,
            token_s=arguments.token_s,
            model_path=arguments.model_path,
            context_length=arguments.context_length or DEFAULT_CONTEXT,
            key=key,
        )
        await engine.start(host=arguments.host, port=arguments.port)
        if arguments.ready_file is not None:
            write_ready_file(
                arguments.ready_file,
                {
                    "url": engine.url,
                    "port": engine.port,
                    "pid": os.getpid(),
                    "weight_version": arguments.weight_version,
                    "numerics_key": numerics.compact(),
                },
            )
        try:
            await asyncio.Event().wait()
        finally:
            await engine.stop()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
