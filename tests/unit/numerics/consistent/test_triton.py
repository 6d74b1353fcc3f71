"""Structure of the Triton kernels, through Triton's interpreter; needs Triton and numpy below 2.4.

The interpreter shows which additions happen in which order, not what a GPU makes of them.
"""

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from rlmix.numerics.consistent.contract import CPU_TILING
from rlmix.numerics.consistent.oracle import attend_f64
from rlmix.numerics.consistent.triton_kernels import attend_triton, linear_triton

HAS_TRITON = importlib.util.find_spec("triton") is not None
CAN_INTERPRET = HAS_TRITON and tuple(map(int, np.__version__.split(".")[:2])) < (2, 4)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check_linear(*, device: str, is_interpreted: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = random(37, 80, seed=0).to(device, dtype)
        weight = random(50, 80, seed=1).to(device, dtype)
        whole = linear_triton(x, weight, block_m=16, block_n=16, is_interpreted=is_interpreted)
        assert float((whole.double() - x.double() @ weight.double().t()).abs().max()) < 1e-4
        for block_m, block_n in [(32, 16), (64, 64)]:
            blocks = {"block_m": block_m, "block_n": block_n}
            other = linear_triton(x, weight, **blocks, is_interpreted=is_interpreted)
            assert torch.equal(other, whole)
            row = linear_triton(x[20:21], weight, **blocks, is_interpreted=is_interpreted)
            assert torch.equal(row, whole[20:21])


def check_attention(*, device: str, is_interpreted: bool) -> None:
    q, k, v = (
        random(2, 70, 4, 16, seed=0),
        random(2, 2, 70, 16, seed=1),
        random(2, 2, 70, 16, seed=2),
    )
    q, k, v = q.to(device), k.to(device), v.to(device)
    positions = torch.arange(70, device=device).expand(2, -1)

    def run(first: int, last: int, block_q: int) -> torch.Tensor:
        return attend_triton(
            q[:, first:last],
            k,
            v,
            positions[:, first:last],
            kv_tile=32,
            block_q=block_q,
            is_interpreted=is_interpreted,
        )

    whole = run(0, 70, 16)
    expected = attend_f64(q.cpu(), k.cpu(), v.cpu(), positions.cpu())
    assert float((whole.cpu() - expected).abs().max()) < 1e-5
    assert torch.equal(run(0, 70, 64), whole)
    for at in (0, 1, 31, 32, 64, 69):
        assert torch.equal(run(at, at + 1, 16), whole[:, at : at + 1]), at
    assert torch.equal(run(20, 50, 32), whole[:, 20:50])


@pytest.mark.skipif(not CAN_INTERPRET, reason="needs Triton and a numpy below 2.4")
def test_tiles_of_rows_and_queries_change_no_bit_in_the_interpreter() -> None:
    if not INTERPRETED:  # the switch is read when Triton is imported, so in a process of its own
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:]
        return
    check_linear(device="cpu", is_interpreted=True)
    check_attention(device="cpu", is_interpreted=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs any CUDA GPU of SM80 or later")
def test_tiles_of_rows_and_queries_change_no_bit_on_a_gpu() -> None:
    """Bit equality, and float64 to 1e-4 (linear) and 1e-5 (attention), with IEEE float32."""
    check_linear(device="cuda", is_interpreted=False)
    check_attention(device="cuda", is_interpreted=False)


def test_the_kernels_can_be_read_without_triton() -> None:
    if HAS_TRITON:
        pytest.skip("Triton is installed")
    with pytest.raises(ImportError):
        linear_triton(random(4, 32, seed=0), random(4, 32, seed=1), block_m=16, block_n=16)
    assert CPU_TILING.kv_tile % 16 == 0
