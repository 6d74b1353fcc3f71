"""`python -m rlmix.engine.timed --fleet FILE`: a fleet of timed replicas as one process."""

import argparse
import asyncio
import contextlib
import gc
import json
import os
import signal
from pathlib import Path

from rlmix.engine.arguments import die_with_parent
from rlmix.engine.http import write_ready_file
from rlmix.engine.timed.fleet import TimedFleet, read_specs


async def serve(specs_path: Path, ready_path: Path | None) -> None:
    fleet = TimedFleet(read_specs(json.loads(specs_path.read_text())))
    await fleet.start()
    document = {"control": fleet.control_url, "pid": os.getpid(), "replicas": fleet.urls}
    if ready_path is None:
        print(json.dumps(document), flush=True)
    else:
        write_ready_file(ready_path, document)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    await stop.wait()
    await fleet.stop()


def main() -> None:
    parser = argparse.ArgumentParser(prog="rlmix.engine.timed", description=__doc__)
    parser.add_argument("--fleet", type=Path, required=True, help="JSON, see `fleet.read_specs`")
    parser.add_argument("--ready-file", type=Path, help="written as JSON {control, pid, replicas}")
    parser.add_argument("--parent-pid", type=int, help="end when this parent process ends")
    arguments = parser.parse_args()
    if arguments.parent_pid is not None:
        die_with_parent(arguments.parent_pid)
    # Collecting garbage would stop all replicas at once for milliseconds; little of it is made in
    # cycles here.
    gc.freeze()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(arguments.fleet, arguments.ready_file))


if __name__ == "__main__":
    main()
