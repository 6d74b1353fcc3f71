#!/usr/bin/env python
"""Measures the embedded engine beside `transformers` generate, and what recording and HTTP cost.

    python scripts/bench_engine.py [--quick] [--json] [--model PATH] [--sglang-url URL]

Rates are output tokens per CPU second of one thread, so that a busy machine disturbs them little;
`wall` columns are tokens per second as they passed. With `--sglang-url`, the same load also goes to
a running SGLang server (see docs/engine.md). Needs nothing but this checkout.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import orjson
import psutil
import torch

from rlmix.engine import wire
from rlmix.engine.client import EngineClient
from rlmix.engine.embedded.profile import Profile
from rlmix.engine.embedded.requests import Request, parse_request
from rlmix.engine.embedded.scheduler import Scheduler
from rlmix.engine.embedded.shape import ModelShape, read_shape
from rlmix.engine.embedded.weights import load_weights, read_config
from rlmix.engine.protocol import GenerateRequest, SamplingParams
from rlmix.model.bundle import resolve_model

PROMPT_TOKENS = 150
SESSIONS, TURNS = 16, 4
REPEATS = 3
"""Each rate is the best of so many: what disturbs a run only ever slows it down."""
PROFILES = {
    "float32": {"accelerator": "cpu", "activations": "fp32", "kv": "fp32", "attention": "triton"},
    "h100, fp8 cache": {
        "accelerator": "h100",
        "activations": "bf16",
        "kv": "fp8",
        "attention": "fa3",
    },
}


Rates = tuple[float, float]
"""Output tokens per CPU second, and per second."""


def best(measure: Callable[[], Rates]) -> Rates:
    rates = [measure() for _ in range(REPEATS)]
    return max(rate[0] for rate in rates), max(rate[1] for rate in rates)


def prompt_ids(number: int, vocab_size: int) -> list[int]:
    return np.random.default_rng(number).integers(7, vocab_size, PROMPT_TOKENS).tolist()


def new_request(
    input_ids: Sequence[int],
    shape: ModelShape,
    *,
    tokens: int,
    record: bool,
    seed: int,
    ignore_eos: bool = True,
) -> Request:
    body: dict[str, Any] = {
        "input_ids": list(input_ids),
        "sampling_params": {
            "max_new_tokens": tokens,
            "temperature": 1.0,
            "top_p": 0.97 if record else 1.0,
            "top_k": 64 if record else -1,
            "ignore_eos": ignore_eos,
            "sampling_seed": seed,
        },
        "return_logprob": True,
        "return_sampling_mask": record,
        "sampling_logprobs_mode": "support",
    }
    return parse_request(
        body,
        rid="bench",
        default_seed=0,
        vocab_size=shape.vocab_size,
        context_length=shape.context_length,
        max_total_tokens=1 << 20,
        eos_ids=(),
    )


def new_scheduler(folder: Path, profile_name: str, *, max_running: int) -> Scheduler:
    shape = read_shape(read_config(folder))
    profile = Profile(weights="bf16", **PROFILES[profile_name])
    return Scheduler(
        shape,
        profile,
        load_weights(folder, shape=shape, profile=profile),
        version=0,
        max_running=max_running,
        context_length=shape.context_length,
        max_total_tokens=1 << 20,
        mask_cap=4096,
    )


def decode_rates(
    folder: Path, profile_name: str, *, batch: int, tokens: int, record: bool
) -> Rates:
    """Decoding only, scheduler and sampling included."""

    def once() -> Rates:
        scheduler = new_scheduler(folder, profile_name, max_running=batch)
        shape = scheduler.shape
        for number in range(batch):
            ids = prompt_ids(number, shape.vocab_size)
            scheduler.submit(new_request(ids, shape, tokens=tokens, record=record, seed=number))
        while scheduler.stats.generated_tokens < 4 * batch:
            scheduler.step()
        before = scheduler.stats.generated_tokens
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        while scheduler.num_running == batch:
            scheduler.step()
        made = scheduler.stats.generated_tokens - before
        return made / (time.process_time() - cpu_s), made / (time.perf_counter() - wall_s)

    return best(once)


def session_rates(folder: Path, *, turn_tokens: int) -> Rates:
    """The load of `play` without HTTP: the same prompts, turns and seeds, prompts included."""

    def once() -> Rates:
        scheduler = new_scheduler(folder, "h100, fp8 cache", max_running=SESSIONS)
        shape = scheduler.shape
        prompts = [prompt_ids(number, shape.vocab_size) for number in range(SESSIONS)]

        def turn(ids: Sequence[int], number: int) -> Request:
            request = new_request(
                ids, shape, tokens=turn_tokens, record=True, seed=number, ignore_eos=False
            )
            scheduler.submit(request)
            return request

        cpu_s, wall_s = time.process_time(), time.perf_counter()
        running = {number: (0, turn(prompts[number], 0)) for number in range(SESSIONS)}
        while running:
            scheduler.step()
            for number, (done, request) in list(running.items()):
                if request.finish_reason is None:
                    continue
                orjson.dumps(
                    wire.generate_document(request.answer(weight_version=0)),
                    option=orjson.OPT_SERIALIZE_NUMPY,
                )
                if done + 1 == TURNS:
                    del running[number]
                    continue
                ids = [*request.prompt.tolist(), *request.output_ids, *prompts[number][:20]]
                running[number] = (done + 1, turn(ids, done + 1))
        made = scheduler.stats.generated_tokens
        return made / (time.process_time() - cpu_s), made / (time.perf_counter() - wall_s)

    return best(once)


def transformers_rates(folder: Path, *, batch: int, tokens: int) -> Rates:
    """The same for `generate`, sampling from the whole vocabulary, float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(7, model.config.vocab_size, (batch, PROMPT_TOKENS))
    options = {"do_sample": True, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}

    def seconds(count: int) -> tuple[float, float]:
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, max_new_tokens=count, min_new_tokens=count, **options)
        return time.process_time() - cpu_s, time.perf_counter() - wall_s

    def once() -> Rates:
        short, long = seconds(2), seconds(tokens)
        made = batch * (tokens - 2)
        return made / (long[0] - short[0]), made / (long[1] - short[1])

    seconds(2)
    return best(once)


async def play(url: str, *, vocab_size: int, turn_tokens: int) -> tuple[int, float]:
    """Sessions of several turns, all at once; returns output tokens and seconds."""
    client = EngineClient(url, timeout_s=600)
    prompts = [tuple(prompt_ids(number, vocab_size)) for number in range(SESSIONS)]

    async def session(number: int) -> int:
        context, made = prompts[number], 0
        for turn in range(TURNS):
            sampling = SamplingParams(
                temperature=1.0, top_p=0.97, top_k=64, max_new_tokens=turn_tokens, seed=turn
            )
            answer = await client.generate(
                GenerateRequest(
                    session_id=f"s{number}",
                    request_id=f"s{number}-{turn}-{time.monotonic_ns()}",
                    input_ids=context,
                    sampling=sampling,
                    record="support",
                )
            )
            made += len(answer.output_ids)
            context = (*context, *answer.output_ids, *prompts[number][:20])
        return made

    try:
        started_s = time.perf_counter()
        made = await asyncio.gather(*(session(number) for number in range(SESSIONS)))
        return sum(made), time.perf_counter() - started_s
    finally:
        await client.close()


def serve(folder: Path, *, turn_tokens: int) -> dict[str, float]:
    """Start, memory and HTTP rates of a server process."""
    vocab_size = read_shape(read_config(folder)).vocab_size
    flags = PROFILES["h100, fp8 cache"]
    with tempfile.TemporaryDirectory() as scratch:
        ready = Path(scratch) / "ready.json"
        argv = [sys.executable, "-m", "rlmix.engine.embedded", "--model-path", str(folder)]
        argv += ["--weights", "bf16", "--max-running-requests", str(SESSIONS)]
        argv += ["--ready-file", str(ready), "--parent-pid", str(os.getpid())]
        argv += ["--log-level", "warning"]
        for name, value in flags.items():
            argv += [f"--{name}", value]
        started_s = time.perf_counter()
        process = subprocess.Popen(argv)
        try:
            while not ready.exists():
                if process.poll() is not None:
                    raise SystemExit("bench_engine: the server did not start")
                time.sleep(0.01)
            start_s = time.perf_counter() - started_s
            usage = psutil.Process(process.pid)
            start_cpu_s = sum(usage.cpu_times()[:2])
            url = json.loads(ready.read_text())["url"]
            asyncio.run(play(url, vocab_size=vocab_size, turn_tokens=4))

            def once() -> Rates:
                with urllib.request.urlopen(f"{url}/flush_cache", data=b""):
                    pass
                before_s = sum(usage.cpu_times()[:2])
                made, wall_s = asyncio.run(
                    play(url, vocab_size=vocab_size, turn_tokens=turn_tokens)
                )
                return made / (sum(usage.cpu_times()[:2]) - before_s), made / wall_s

            per_cpu_s, per_s = best(once)
            return {
                "start_s": start_s,
                "start_cpu_s": start_cpu_s,
                "rss_mib": usage.memory_info().rss / 2**20,
                "tokens_per_cpu_s": per_cpu_s,
                "tokens_per_s": per_s,
            }
        finally:
            process.terminate()
            process.wait(20)


def measure(folder: Path, *, is_quick: bool, sglang_url: str | None) -> dict[str, Any]:
    tokens = 60 if is_quick else 200
    rows = []
    for batch in (1, 8, 32):
        ours = decode_rates(folder, "float32", batch=batch, tokens=tokens, record=False)
        other = transformers_rates(folder, batch=batch, tokens=tokens)
        rows.append(_row(f"decode, float32, batch {batch}", ours, "transformers", other))
    for profile in PROFILES:
        plain = decode_rates(folder, profile, batch=8, tokens=tokens, record=False)
        kept = decode_rates(folder, profile, batch=8, tokens=tokens, record=True)
        rows.append(_row(f"kept sets, {profile}, batch 8", kept, "without", plain))
    emulated = decode_rates(folder, "h100, fp8 cache", batch=8, tokens=tokens, record=False)
    exact = decode_rates(folder, "float32", batch=8, tokens=tokens, record=False)
    rows.append(_row("emulated formats, batch 8", emulated, "float32", exact))
    turn_tokens = 16 if is_quick else 40
    server = serve(folder, turn_tokens=turn_tokens)
    inside = session_rates(folder, turn_tokens=turn_tokens)
    through = (server["tokens_per_cpu_s"], server["tokens_per_s"])
    label = f"{SESSIONS} sessions of {TURNS} turns over HTTP"
    rows.append(_row(label, through, "without HTTP", inside))
    if sglang_url is not None:
        vocab_size = read_shape(read_config(folder)).vocab_size
        made, wall_s = asyncio.run(play(sglang_url, vocab_size=vocab_size, turn_tokens=turn_tokens))
        rows.append(_row(label, through, "SGLang", (float("nan"), made / wall_s)))
    return {"rows": rows, "server": server, "machine": _machine()}


def _row(what: str, ours: Rates, other_name: str, other: Rates) -> dict[str, Any]:
    index = 0 if np.isfinite(other[0]) else 1
    return {
        "what": what,
        "ours_tokens_per_cpu_s": ours[0],
        "ours_tokens_per_s": ours[1],
        "other": other_name,
        "other_tokens_per_cpu_s": None if np.isnan(other[0]) else other[0],
        "other_tokens_per_s": other[1],
        "ratio": ours[index] / other[index],
    }


def _machine() -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "load_1min": os.getloadavg()[0],
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under 60 s")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--model", default="bundled:tiny", help="model folder in BF16")
    parser.add_argument("--sglang-url", help="a running SGLang server of the same model")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = measure(
        resolve_model(arguments.model), is_quick=arguments.quick, sglang_url=arguments.sglang_url
    )
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"{'what':44} {'tok/cpu-s':>10} {'tok/s':>8}   {'other':14} {'tok/cpu-s':>10}  ratio")
    for row in result["rows"]:
        other = row["other_tokens_per_cpu_s"] or row["other_tokens_per_s"]
        print(
            f"{row['what']:44} {row['ours_tokens_per_cpu_s']:10.0f} {row['ours_tokens_per_s']:8.0f}"
            f"   {row['other']:14} {other:10.0f} {row['ratio']:6.2f}"
        )
    server = result["server"]
    print(
        f"server: ready after {server['start_s']:.1f} s ({server['start_cpu_s']:.1f} cpu-s), "
        f"{server['rss_mib']:.0f} MiB"
    )
    machine = result["machine"]
    print(f"load {machine['load_1min']:.1f} on {machine['cpus']} cpus, torch {machine['torch']}")


if __name__ == "__main__":
    main()
