"""A tiny random Qwen3-MoE as view folders, and embedded servers as real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.unit.engine.serving import MASK_CAP, MAX_RUNNING

TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def build_model(seed, **changes):
    """Float32 Hugging Face model whose weights are exact in BF16, and large enough to give a
    distribution that is neither flat nor certain."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**TINY, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
            parameter.copy_(parameter.bfloat16())
    return model.float().eval()


def write_view(model, folder, view):
    """The model as a folder that the embedded engine serves."""
    from safetensors.torch import save_file

    from rlmix.numerics import views
    from rlmix.numerics.view_config import quantization_config

    folder.mkdir(parents=True)
    config = model.config.to_dict()
    section = quantization_config(view)
    if section is not None:
        config["quantization_config"] = section
    (folder / "config.json").write_text(json.dumps(config, default=str))
    state = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    save_file(views.encode_view(state, view), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def tiny_model():
    return build_model(0)


@pytest.fixture(scope="session")
def view_folders(tiny_model, tmp_path_factory):
    """{(view, version): folder}; version 1 has other weights."""
    root = tmp_path_factory.mktemp("views")
    other = build_model(1)
    return {
        (view, version): write_view(model, root / view / f"v{version}", view)
        for view in ("bf16", "fp8", "nvfp4")
        for version, model in ((0, tiny_model), (1, other))
    }


@contextmanager
def running_server(folder, ready_file: Path, *, weights="bf16", **options):
    """URL and process of an embedded server; options are flags, e.g. kv="fp8"."""
    flags = {
        "accelerator": "cpu",
        "weights": weights,
        "activations": "fp32",
        "kv": "fp32",
        "attention": "triton",
        "max_running_requests": 8,
        "pool": "test",
        "replica": "test-0",
        "log_level": "warning",
        **options,
    }
    argv = [sys.executable, "-m", "rlmix.engine.embedded", "--model-path", str(folder)]
    argv += ["--ready-file", str(ready_file), "--parent-pid", str(os.getpid())]
    for name, value in flags.items():
        argv += [f"--{name.replace('_', '-')}", str(value)]
    process = subprocess.Popen(argv, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        deadline = time.monotonic() + 180
        while not ready_file.exists():
            assert process.poll() is None, "the server ended before it was ready"
            assert time.monotonic() < deadline, "the server was not ready after 180 s"
            time.sleep(0.02)
        yield json.loads(ready_file.read_text())["url"], process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        assert process.wait(20) in (0, -signal.SIGKILL)


@pytest.fixture(scope="session")
def make_model():
    return build_model


@pytest.fixture(scope="session")
def make_view():
    return write_view


@pytest.fixture(scope="session")
def start_server():
    return running_server


@pytest.fixture(scope="module")
def server(view_folders, tmp_path_factory, start_server):
    """URL of a BF16 server; a module has one of its own."""
    ready = tmp_path_factory.mktemp("server") / "ready.json"
    options = {"max_running_requests": MAX_RUNNING, "sampling_mask_max_tokens": MASK_CAP}
    with start_server(view_folders["bf16", 0], ready, **options) as (url, _):
        yield url
