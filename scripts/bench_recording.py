#!/usr/bin/env python
"""Measures what recording costs: engine throughput, bytes per token, and reading at the client.

    python scripts/bench_recording.py [--quick] [--json] [--model PATH] [--batch N]
        [--temperature T]

All rows sample the same way (top-p 0.97, top-k 64) and differ in what they record and in which form
they answer. Engine rates are output tokens per CPU second of one thread, sampling and writing the
answers included, HTTP not; best of several rounds that take turns, so that a busy machine disturbs
all rows alike. Exit code 1 when recording kept sets in binary leaves less than 0.8 of the
throughput without recording. Needs nothing but this checkout.
"""

import argparse
import json
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import orjson
import torch

from rlmix.core.trajectory import Outcome, StopReason, Trajectory, Turn
from rlmix.engine import wire
from rlmix.engine.answers import parse_document, parse_frame
from rlmix.engine.embedded.profile import Profile
from rlmix.engine.embedded.requests import Request, parse_request
from rlmix.engine.embedded.scheduler import Scheduler
from rlmix.engine.embedded.shape import read_shape
from rlmix.engine.embedded.weights import ModelWeights, load_weights, read_config
from rlmix.engine.protocol import GenerateRequest, Generation, SamplingParams, request_body
from rlmix.model.bundle import resolve_model
from rlmix.observe.trajectories import encode_trajectory

REQUIRED_RATIO = 0.8
PROMPT_TOKENS = 150
HEAD_K = 128
PROFILE = {
    "accelerator": "h100",
    "weights": "bf16",
    "activations": "bf16",
    "kv": "fp8",
    "attention": "fa3",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """One row of the table."""

    name: str
    record: bool
    """Kept sets."""
    head_k: int
    is_binary: bool
    experts: bool = False
    """Routed experts of prompt and output, which every slot and cached prefix then holds."""


MODES = (
    Mode(name="without recording", record=False, head_k=0, is_binary=True),
    Mode(name="kept sets, JSON", record=True, head_k=0, is_binary=False),
    Mode(name="kept sets, binary", record=True, head_k=0, is_binary=True),
    Mode(name=f"and a head of {HEAD_K}, JSON", record=True, head_k=HEAD_K, is_binary=False),
    Mode(name=f"and a head of {HEAD_K}, binary", record=True, head_k=HEAD_K, is_binary=True),
    Mode(name="kept sets, experts, JSON", record=True, head_k=0, is_binary=False, experts=True),
    Mode(name="kept sets, experts, binary", record=True, head_k=0, is_binary=True, experts=True),
)
PLAIN, BINARY = 0, 2
"""Rows that the requirement compares."""


class Engine:
    """The embedded engine without HTTP."""

    def __init__(self, folder: Path, *, batch: int, temperature: float) -> None:
        self.shape = read_shape(read_config(folder))
        self.profile = Profile(**PROFILE)
        self.weights: ModelWeights = load_weights(folder, shape=self.shape, profile=self.profile)
        self.batch, self.temperature = batch, temperature

    def asked(self, mode: Mode, *, tokens: int, seed: int) -> GenerateRequest:
        prompt = np.random.default_rng(seed).integers(7, self.shape.vocab_size, PROMPT_TOKENS)
        return GenerateRequest(
            session_id="bench",
            request_id="bench",
            input_ids=prompt,
            sampling=SamplingParams(
                temperature=self.temperature, top_p=0.97, top_k=64, max_new_tokens=tokens, seed=seed
            ),
            record="support" if mode.record else "none",
            head_k=mode.head_k,
            experts_shape=(self.shape.num_layers, self.shape.top_k) if mode.experts else None,
        )

    def _request(self, asked: GenerateRequest, mode: Mode) -> Request:
        body = request_body(asked)
        body["sampling_params"]["ignore_eos"] = True
        if not mode.record:
            del body["return_sampling_mask"]
        return parse_request(
            body,
            rid=asked.request_id,
            default_seed=0,
            vocab_size=self.shape.vocab_size,
            context_length=self.shape.context_length,
            max_total_tokens=1 << 20,
            eos_ids=(),
        )

    def answers(self, mode: Mode, *, tokens: int) -> tuple[list[bytes], float]:
        """One whole batch; returns the answers and output tokens per CPU second."""
        scheduler = Scheduler(
            self.shape,
            self.profile,
            self.weights,
            version=0,
            max_running=self.batch,
            context_length=self.shape.context_length,
            max_total_tokens=1 << 20,
            mask_cap=wire.DEFAULT_MASK_CAP,
            records_routes=mode.experts,
        )
        requests = [
            self._request(self.asked(mode, tokens=tokens, seed=seed), mode)
            for seed in range(self.batch)
        ]
        for request in requests:
            scheduler.submit(request)
        while scheduler.stats.generated_tokens < 2 * self.batch:
            scheduler.step()
        before = scheduler.stats.generated_tokens
        started_s = time.process_time()
        while scheduler.num_running:
            scheduler.step()
        written = [_written(request.answer(weight_version=0), mode) for request in requests]
        cpu_s = time.process_time() - started_s
        return written, (scheduler.stats.generated_tokens - before) / cpu_s


def _written(answer: wire.Answer, mode: Mode) -> bytes:
    if mode.is_binary:
        return wire.generate_frame(answer)
    return orjson.dumps(wire.generate_document(answer), option=orjson.OPT_SERIALIZE_NUMPY)


def read(raw: bytes, asked: GenerateRequest, mode: Mode) -> Generation:
    """What the client does with an answer."""
    if mode.is_binary:
        return parse_frame(raw, asked, {})
    return parse_document(orjson.loads(raw), asked, {})


def microseconds(work: Callable[[], object], *, rounds: int) -> float:
    """CPU time of one call, best of `rounds`."""
    best_s = float("inf")
    for _ in range(rounds):
        started_s = time.process_time()
        work()
        best_s = min(best_s, time.process_time() - started_s)
    return best_s * 1e6


def client_costs(
    engine: Engine, mode: Mode, answers: list[bytes], *, tokens: int, rounds: int
) -> dict[str, Any]:
    """Reading, and bytes of a sampled token on the wire, in memory, as a pickle and on disk."""
    # Without recording the engine was asked for plain logprobs, which `top_p=1` asks for.
    asked = engine.asked(mode, tokens=tokens, seed=0)
    if not mode.record:
        sampling = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=tokens)
        asked = GenerateRequest(
            session_id="bench", request_id="bench", input_ids=(1,), sampling=sampling, record="none"
        )
    read_us = microseconds(lambda: [read(raw, asked, mode) for raw in answers], rounds=rounds)
    turns = [_turn(read(raw, asked, mode)) for raw in answers]
    made = tokens * len(answers)
    kept = [turn.kept for turn in turns if turn.kept is not None]
    return {
        "parse_us_per_token": read_us / made,
        "wire_bytes_per_token": sum(map(len, answers)) / made,
        "record_bytes_per_token": sum(turn.record_bytes for turn in turns) / made,
        "pickle_bytes_per_token": len(pickle.dumps(turns, pickle.HIGHEST_PROTOCOL)) / made,
        "disk_bytes_per_token": sum(len(_line(turn)) for turn in turns) / made,
        "kept_ids_per_token": sum(len(sets.ids) for sets in kept) / made if kept else None,
    }


def _turn(generation: Generation) -> Turn:
    return Turn(
        output_ids=generation.output_ids,
        sampler_logprobs=generation.sampler_logprobs,
        kept=generation.kept,
        head=generation.head,
        experts=generation.experts,
        version_spans=generation.version_spans,
    )


def _line(turn: Turn) -> bytes:
    done = Trajectory(
        session_id="bench",
        group_id="bench",
        task_id="bench",
        prompt_ids=(),
        turns=(turn,),
        stop_reason=StopReason.SUBMITTED,
        outcome=Outcome.PASS,
        reward=1.0,
    )
    return orjson.dumps(encode_trajectory(done, step=1), option=orjson.OPT_SERIALIZE_NUMPY)


def measure(folder: Path, *, is_quick: bool, batch: int, temperature: float) -> dict[str, Any]:
    engine = Engine(folder, batch=batch, temperature=temperature)
    tokens, rounds = (60, 3) if is_quick else (200, 7)
    rates: list[list[float]] = [[] for _ in MODES]
    answers: list[list[bytes]] = [[] for _ in MODES]
    for _ in range(rounds):
        for place, mode in enumerate(MODES):
            answers[place], rate = engine.answers(mode, tokens=tokens)
            rates[place].append(rate)
    plain = max(rates[PLAIN])
    rows = [
        {
            "what": mode.name,
            "tokens_per_cpu_s": max(rates[place]),
            "ratio": max(rates[place]) / plain,
            **client_costs(engine, mode, answers[place], tokens=tokens, rounds=rounds),
        }
        for place, mode in enumerate(MODES)
    ]
    return {
        "rows": rows,
        "batch": batch,
        "temperature": temperature,
        "ratio": rows[BINARY]["ratio"],
        "required_ratio": REQUIRED_RATIO,
        "passed": rows[BINARY]["ratio"] >= REQUIRED_RATIO,
        "vocab_size": engine.shape.vocab_size,
        "machine": {
            "cpus": os.cpu_count(),
            "load_1min": os.getloadavg()[0],
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
        },
    }


COLUMNS = (
    ("tokens_per_cpu_s", "tok/cpu-s", 10, 0),
    ("ratio", "ratio", 6, 2),
    ("parse_us_per_token", "read us", 8, 2),
    ("wire_bytes_per_token", "wire", 8, 1),
    ("record_bytes_per_token", "memory", 8, 1),
    ("pickle_bytes_per_token", "pickle", 8, 1),
    ("disk_bytes_per_token", "disk", 8, 1),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under 60 s")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--model", default="bundled:tiny", help="model folder in BF16")
    parser.add_argument("--batch", type=int, default=8, help="requests at once")
    parser.add_argument("--temperature", type=float, default=1.0, help="above 1: wider kept sets")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = measure(
        resolve_model(arguments.model),
        is_quick=arguments.quick,
        batch=arguments.batch,
        temperature=arguments.temperature,
    )
    if arguments.json:
        print(json.dumps(result))
        return 0 if result["passed"] else 1
    print(
        f"{'bytes and time per sampled token':34}" + "".join(f"{n:>{w}}" for _, n, w, _ in COLUMNS)
    )
    for row in result["rows"]:
        cells = "".join(f"{row[key]:{width}.{digits}f}" for key, _, width, digits in COLUMNS)
        print(f"{row['what']:34}{cells}")
    machine = result["machine"]
    print(
        f"batch {result['batch']}, {result['rows'][BINARY]['kept_ids_per_token']:.1f} kept ids per "
        f"token, vocabulary {result['vocab_size']}; load {machine['load_1min']:.1f} on "
        f"{machine['cpus']} cpus, torch {machine['torch']}"
    )
    verdict = "holds" if result["passed"] else "MISSED"
    print(f"kept sets in binary at least {REQUIRED_RATIO} of without: {verdict}")
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
