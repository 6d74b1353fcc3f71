"""The embedded engine's process: arguments, real formats, end of life."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

from rlmix.engine.client import EngineClient
from rlmix.engine.embedded.attention import Chunk
from rlmix.engine.embedded.forward import Forward, Step
from rlmix.engine.embedded.kv import KvCache
from rlmix.engine.embedded.profile import Profile
from rlmix.engine.embedded.shape import read_shape
from rlmix.engine.embedded.weights import load_weights, read_config
from rlmix.engine.protocol import GenerateRequest, SamplingParams

PROMPT = tuple(range(30, 60))

B200 = {
    "accelerator": "b200",
    "weights": "nvfp4",
    "activations": "bf16",
    "kv": "fp8",
    "attention": "trtllm_mha",
}


def stepwise_logprobs(folder, profile, ids, *, num_prompt, temperature):
    """Logprobs of ids[num_prompt:], one forward per token, in the engine's own arithmetic."""
    shape = read_shape(read_config(folder))
    weights = load_weights(folder, shape=shape, profile=profile)
    forward = Forward(shape, profile, KvCache(shape, num_slots=1, context_length=256))
    chunk = Chunk(slot=0, start=0, num_tokens=num_prompt, needs_logits=True)
    step = Step(
        token_ids_T=torch.tensor(ids[:num_prompt]),
        positions_T=torch.arange(num_prompt),
        num_decoding=0,
        longest_decoding=0,
        chunks=(chunk,),
    )
    logprobs = []
    for position in range(num_prompt, len(ids)):
        row = torch.log_softmax(forward.logits(weights, step)[0] / temperature, -1)
        logprobs.append(row[ids[position]].item())
        step = Step(
            token_ids_T=torch.tensor([ids[position]]),
            positions_T=torch.tensor([position]),
            num_decoding=1,
            longest_decoding=position + 1,
            chunks=(),
        )
    return logprobs


def test_an_nvfp4_replica_with_fp8_cache_is_its_own_forward_to_the_last_digits(
    view_folders, tmp_path, start_server
):
    """A batch of 6 with kept sets, replayed token by token: the same numbers to 1e-6."""
    folder = view_folders["nvfp4", 0]
    sampling = SamplingParams(
        temperature=0.7, top_p=0.9, top_k=64, max_new_tokens=20, stop_token_ids=()
    )

    async def scenario(url):
        client = EngineClient(url, timeout_s=30)
        try:
            return await asyncio.gather(
                *(
                    client.generate(
                        GenerateRequest(
                            session_id=f"s{number}",
                            request_id=f"r{number}",
                            input_ids=PROMPT[number:],
                            sampling=sampling,
                            record="none",
                        )
                    )
                    for number in range(6)
                )
            ), await client.generate(
                GenerateRequest(
                    session_id="head",
                    request_id="head",
                    input_ids=PROMPT,
                    sampling=SamplingParams(
                        temperature=0.7, top_p=1.0, top_k=-1, max_new_tokens=20, seed=4
                    ),
                    record="none",
                )
            )
        finally:
            await client.close()

    flags = {**B200, "max_running_requests": 6, "weight_version": 12}
    with start_server(folder, tmp_path / "ready.json", **flags) as (url, process):
        turns, plain = asyncio.run(scenario(url))
        rss_mib = psutil.Process(process.pid).memory_info().rss / 2**20
    assert all(turn.version_spans[0].version == 12 for turn in turns)
    assert plain.numerics_key.startswith("b200/nvfp4/a=bf16/kv=fp8/attn=trtllm_mha")
    replayed = stepwise_logprobs(
        folder,
        Profile(**B200),
        [*PROMPT, *plain.output_ids],
        num_prompt=len(PROMPT),
        temperature=0.7,
    )
    assert plain.sampler_logprobs == pytest.approx(replayed, abs=1e-6)
    assert rss_mib < 400


def test_sigterm_ends_the_server_with_exit_code_0(view_folders, tmp_path, start_server):
    with start_server(view_folders["bf16", 0], tmp_path / "ready.json") as (_, process):
        started_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert time.monotonic() - started_s < 30


def test_the_server_dies_with_a_parent_that_was_killed(tmp_path):
    """The scripted engine shares the flag and starts faster."""
    ready = tmp_path / "ready.json"
    code = (
        "import os, subprocess, sys, time\n"
        "flags = '--accelerator cpu --weights bf16 --kv bf16 --attention triton'.split()\n"
        "flags += ['--max-running-requests', '4', '--model-path', '.']\n"
        f"flags += ['--ready-file', {str(ready)!r}, '--parent-pid', str(os.getpid())]\n"
        "child = subprocess.Popen([sys.executable, '-m', 'rlmix.engine.scripted', *flags])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(parent.stdout.readline()))
    deadline = time.monotonic() + 120
    while not ready.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    gone, _ = psutil.wait_procs([child], timeout=5)
    assert gone


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_path": "/nowhere"}, "is not a folder"),
        ({"accelerator": "tpu"}, "accelerator='tpu'; it reproduces b300"),
        ({"weights": "nvfp4"}, "is the bf16 view; this replica serves nvfp4"),
        ({"max_running_requests": "0"}, "at least 1"),
        ({"weight_version": "new"}, "decimal"),
    ],
)
def test_a_wrong_argument_ends_the_process_with_exit_code_2_and_the_reason(
    view_folders, changes, text
):
    flags = {
        "model_path": str(view_folders["bf16", 0]),
        "accelerator": "cpu",
        "weights": "bf16",
        "kv": "bf16",
        "attention": "triton",
        "max_running_requests": "4",
        **changes,
    }
    argv = [sys.executable, "-m", "rlmix.engine.embedded"]
    for name, value in flags.items():
        argv += [f"--{name.replace('_', '-')}", value]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=180)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr
