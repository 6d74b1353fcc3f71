#!/usr/bin/env python
"""Measures what publishing a version costs a trainer of several ranks: from shards, as a run does,
and beside it with the whole model gathered on every rank and encoded by rank 0.

    python scripts/bench_publish.py [--ranks N] [--layers N] [--views bf16,fp8,nvfp4] [--json]

A dense random model is cut over real rank processes (FSDP2, gloo). Peak memory is that of the rank
process above what it held before, from Linux's high-water mark, which is reset in between; seconds
are those of the slowest rank; CPU seconds are of all ranks. Both ways write the same bytes.
"""

import argparse
import ctypes
import gc
import json
import multiprocessing
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from check_trainer_memory import status_bytes
from rich.console import Console
from rich.table import Table


def make_model(folder: Path, layers: int) -> int:
    """A random model's folder; returns the bytes of its BF16 weights."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=8192, hidden_size=1024, intermediate_size=3072, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=4, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return sum(2 * parameter.numel() for parameter in model.parameters())


def trim() -> None:
    """Give back what the allocator keeps, so that both ways begin alike."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def serve(pipe: Any, rank: int, ranks: int, asked: argparse.Namespace, folder: Path) -> None:
    """One rank: loads its shards, then publishes in both ways."""
    # Before the first look at memory, with all that it imports.
    import safetensors.torch  # noqa: F401
    import transformers.core_model_loading  # noqa: F401

    import rlmix.numerics.view_config
    import rlmix.numerics.views  # noqa: F401
    from rlmix.trainer.policy import Policy
    from rlmix.trainer.world import join, open_store
    from rlmix.weights.publish import publish_version

    torch.set_num_threads(1)
    store = None
    if rank == 0:
        store, *address = open_store()
        pipe.send(tuple(address))
    world = join(pipe.recv(), rank=rank, size=ranks, store=store)
    policy = Policy.load(folder / "model")
    policy.shard(world.mesh)
    writers, views = world.writers(), asked.views.split(",")
    told = {
        "views": views,
        "model_files": folder / "model",
        "shard_bytes": asked.file_mib * 2**20,
    }

    def from_shards(version: int) -> None:
        parts, store = policy.parts(), folder / "shards"
        publish_version(parts, version=version, store=store, writers=writers, **told)

    def gathered(version: int) -> None:
        state = policy.state()
        if rank == 0:
            publish_version(state, version=version, store=folder / "whole", **told)

    for name, work in (("from shards", from_shards), ("gathered", gathered)):
        trim()
        writers.wait()
        Path("/proc/self/clear_refs").write_text("5")
        before = status_bytes("VmRSS")
        work(0)  # Imports what it needs: the second time is measured.
        writers.wait()
        started_s, cpu_s = time.perf_counter(), time.process_time()
        work(1)
        facts = {
            "peak_mib": (status_bytes("VmHWM") - before) / 2**20,
            "seconds": time.perf_counter() - started_s,
            "cpu_s": time.process_time() - cpu_s,
        }
        pipe.send((name, facts))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--file-mib", type=int, default=16, help="of one weight file; a run: 4768")
    parser.add_argument("--views", default="bf16,fp8,nvfp4")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="rlmix-publish-") as name:
        folder = Path(name)
        asked.model_bytes = make_model(folder / "model", asked.layers)
        pipes, processes = [], []
        for rank in range(asked.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(theirs, rank, asked.ranks, asked, folder), daemon=True
            )
            process.start()
            pipes.append(ours)
            processes.append(process)
        address = pipes[0].recv()
        for pipe in pipes:
            pipe.send(address)
        answers = [[pipe.recv() for pipe in pipes] for _ in range(2)]
        for process in processes:
            process.join()
        same = all(
            (folder / "shards" / path.relative_to(folder / "whole")).read_bytes()
            == path.read_bytes()
            for path in (folder / "whole").rglob("*.safetensors")
        )
    rows = [
        {
            "way": found[0][0],
            "peak_mib": [round(facts["peak_mib"], 1) for _, facts in found],
            "seconds": round(max(facts["seconds"] for _, facts in found), 2),
            "cpu_s": round(sum(facts["cpu_s"] for _, facts in found), 2),
        }
        for found in answers
    ]
    document = {
        "machine": f"{os.cpu_count()} CPUs, {platform.machine()}",
        "ranks": asked.ranks,
        "model_mib": round(asked.model_bytes / 2**20, 1),
        "views": asked.views.split(","),
        "same_bytes": same,
        "rows": rows,
    }
    if asked.json:
        print(json.dumps(document, indent=1))
    else:
        table = Table(
            title=f"Publishing {document['model_mib']} MiB of BF16 weights as {asked.views} from "
            f"{asked.ranks} ranks (same bytes: {same})"
        )
        for column in ("way", "peak of each rank, MiB", "seconds", "CPU s, all ranks"):
            table.add_column(column)
        for row in rows:
            peaks = ", ".join(map(str, row["peak_mib"]))
            table.add_row(row["way"], peaks, str(row["seconds"]), str(row["cpu_s"]))
        Console().print(table)
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
