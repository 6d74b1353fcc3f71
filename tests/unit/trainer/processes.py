"""Trainer ranks as real processes, for tests: killed like any process, without a Ray to start.

Children come from a server that has imported the trainer once, so that starting one costs
milliseconds. One child serves many trainers after another: it meets the others once.
"""

import asyncio
import dataclasses
import multiprocessing
import os
import pickle
import signal

from rlmix.core.errors import LaunchError
from rlmix.loop.trainer_ranks import TrainerRanks

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["rlmix.trainer.rank", "transformers.models.auto.modeling_auto"])


class ProcessHandle:
    """Satisfies `rlmix.launch.handle.Handle`; owns a `TrainerRank` in a process of its own."""

    def __init__(self, spec, *, name):
        self._pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=serve, args=(theirs, spec), daemon=True)
        self._process.start()
        theirs.close()
        self.name = name

    @property
    def pid(self):
        return self._process.pid

    @property
    def is_alive(self):
        return self._process.is_alive()

    async def call(self, method, *args, timeout_s=None, **kwargs):
        try:
            self._pipe.send((method, args, kwargs))
            answer = await asyncio.to_thread(self._pipe.recv)
        except (EOFError, OSError) as error:
            raise LaunchError(f"launch: process {self.name} is gone") from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self):
        if self._process.is_alive():
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.join()


def serve(pipe, spec):
    import torch

    from rlmix.trainer.rank import TrainerRank
    from rlmix.weights.publish import publish_version

    rank = TrainerRank(spec)
    while True:
        try:
            method, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            if method == "remake":  # Another trainer, among the same ranks.
                fields = {"rank": spec.rank, "ranks": spec.ranks}
                world, rank = rank._world, TrainerRank(dataclasses.replace(args[0], **fields))
                rank._world, answer = world, None
            elif method == "state":
                policy, optimizer = rank._parts()
                answer = (policy.state(), optimizer.full_state())
            elif method == "publish_in_files":
                version, store, views, shard_bytes = args
                answer = publish_version(
                    rank._parts()[0].parts(), version=version, store=store, views=views,
                    model_files=rank._model_files, shard_bytes=shard_bytes,
                    writers=rank._joined().writers(),
                )  # fmt: skip
            elif method == "spoil":
                with torch.no_grad():
                    rank._parts()[0].parameters()[args[0]].fill_(float("nan"))
                answer = None
            else:
                answer = getattr(rank, method)(*args, **kwargs)
        except Exception as error:
            answer = error
        pipe.send_bytes(pickle.dumps(answer))  # Whole tensors: their memory ends with the process.


def start_ranks(spec, num_ranks):
    """(`TrainerRanks` of real processes, the list of handles that it spawned)."""
    handles = []

    def spawn(rank, incarnation):
        told = dataclasses.replace(spec, rank=rank, ranks=num_ranks)
        handles.append(ProcessHandle(told, name=f"trainer-{rank}"))
        return handles[-1]

    ranks = TrainerRanks(spawn, num_ranks=num_ranks)
    ranks.start()
    return ranks, handles
