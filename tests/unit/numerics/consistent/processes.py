"""Runs one function in several processes that share a torch store."""

import queue
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LIMIT_S = 240.0


def _run(work: Callable[[int, Any], dict[str, Any]], rank: int, port: int, found: Any) -> None:
    torch.set_num_threads(1)
    found.put((rank, work(rank, dist.TCPStore("127.0.0.1", port, is_master=False))))


def run_on_ranks(
    work: Callable[[int, Any], dict[str, Any]], *, world: int
) -> dict[int, dict[str, Any]]:
    """What `work(rank, store)` returned on each of `world` ranks; numpy arrays travel best."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.get_context("forkserver")
    # torch and the models once, not once per process.
    context.set_forkserver_preload(["tests.unit.numerics.consistent.shapes"])
    found = context.Queue()
    ranks = [
        context.Process(target=_run, args=(work, rank, store.port, found), daemon=True)
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    answers: dict[int, dict[str, Any]] = {}
    deadline_s = time.monotonic() + LIMIT_S
    while len(answers) < world:
        try:
            rank, answer = found.get(timeout=1.0)
        except queue.Empty:
            broken = [p.exitcode for p in ranks if p.exitcode not in (None, 0)]
            assert not broken, f"a rank ended with {broken[0]}"
            assert time.monotonic() < deadline_s, f"only ranks {sorted(answers)} answered"
            continue
        answers[rank] = answer
    for process in ranks:
        process.join(timeout=30)
        assert process.exitcode == 0
    return answers
