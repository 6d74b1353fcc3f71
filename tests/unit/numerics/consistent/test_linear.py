"""Products, trees and oracles."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rlmix.numerics.consistent.contract import TREE_LEAVES, min_rows, rounded
from rlmix.numerics.consistent.linear import linear, row_parallel_linear
from rlmix.numerics.consistent.oracle import linear_f64, tree_linear
from rlmix.numerics.consistent.tree import tree_sum

SHAPES = [(128, 256), (256, 128), (128, 8), (96, 593)]
ROWS = [*range(1, 35), 63, 64, 65, 100, 255, 300]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_a_row_has_the_same_bits_alone_and_in_any_company(
    inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    x, weight = random(400, inputs, dtype=dtype), random(outputs, inputs, seed=1, dtype=dtype)
    for operator in (linear, functools.partial(row_parallel_linear, leaves=TREE_LEAVES)):
        whole = operator(x, weight)
        for rows in ROWS:
            assert torch.equal(operator(x[7 : 7 + rows], weight), whole[7 : 7 + rows]), rows


def test_too_few_rows_are_really_another_product_in_the_library() -> None:
    """The premise of the padding; where it stops being true the padding costs for nothing."""
    if not torch.backends.mkl.is_available():
        pytest.skip("the premise is about MKL")
    x, weight = random(64, 128), random(256, 128, seed=1)
    assert not torch.equal(x[:1] @ weight.t(), (x @ weight.t())[:1])
    assert min_rows() >= 4


def test_bf16_products_are_added_in_float32_and_rounded_once() -> None:
    # 256 + 17 = 273. BF16 sums would stay at 256; rounded once it is 272 (a tie, to even).
    x = torch.ones(1, 18, dtype=torch.bfloat16)
    x[0, 0] = 256
    weight = torch.ones(1, 18, dtype=torch.bfloat16)
    assert linear(x, weight).item() == 272.0
    # 273 + 1 = 274 is a BF16 number; rounding before the residual would end at 272 again.
    residual = torch.ones(1, 1, dtype=torch.bfloat16)
    assert linear(x, weight, residual=residual).item() == 274.0


def test_a_value_may_be_rounded_and_stay_float32_while_its_gradient_is_not_rounded() -> None:
    x = torch.tensor([1.0 + 2**-10], requires_grad=True)
    y = rounded(x, torch.bfloat16)
    assert y.dtype == torch.float32
    assert y.item() == 1.0
    (y * (1 + 2**-20)).sum().backward()
    assert x.grad.item() == 1 + 2**-20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_backward_are_those_of_float64(dtype: torch.dtype) -> None:
    x, weight = random(37, 256, dtype=dtype), random(96, 256, seed=1, dtype=dtype)
    residual, grad = random(37, 96, seed=2, dtype=dtype), random(37, 96, seed=3, dtype=dtype)
    bound = 2e-5 if dtype == torch.float32 else 2**-8
    for operator in (linear, functools.partial(row_parallel_linear, leaves=TREE_LEAVES)):
        inputs = [tensor.clone().requires_grad_() for tensor in (x, weight, residual)]
        y = operator(inputs[0], inputs[1], residual=inputs[2])
        y.backward(grad)
        exact = [tensor.double().requires_grad_() for tensor in (x, weight, residual)]
        expected = exact[0] @ exact[1].t() + exact[2]
        expected.backward(grad.double())
        pairs = [
            (y.detach(), expected.detach()),
            *((a.grad, b.grad) for a, b in zip(inputs, exact, strict=True)),
        ]
        for ours, theirs in pairs:
            assert torch.isfinite(ours).all()
            assert float((ours - theirs).abs().max() / theirs.abs().max()) < bound


def test_the_tree_adds_neighbours_first() -> None:
    # In float32, 2^25 + 2 = 2^25 but 2 - 2^25 is exact: 2 in pairs, 0 from left to right.
    values = [2.0**25, 2.0, 2.0, -(2.0**25)]
    parts = [torch.tensor([value]) for value in values]
    assert tree_sum(parts).item() == 2.0
    assert [part.item() for part in parts] == values
    with pytest.raises(ValueError, match="3 parts"):
        tree_sum(parts[:3])


def test_a_weight_stored_the_other_way_round_is_refused_since_its_bits_may_differ() -> None:
    with pytest.raises(ValueError, match="side by side"):
        linear(random(4, 6), random(6, 8).t())


def test_leaves_must_fit() -> None:
    with pytest.raises(ValueError, match="K=6"):
        row_parallel_linear(random(4, 6), random(2, 6), leaves=4)


WORLDS = (2, 4)


def reduce_on_ranks(rank: int, port: int, results: mp.Queue) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=max(WORLDS))
    x, weight, residual = random(9, 128), random(64, 128, seed=1), random(9, 64, seed=2)
    for world in WORLDS:
        group = dist.new_group(list(range(world)))
        if rank >= world:
            continue
        width = 128 // world
        span = slice(rank * width, (rank + 1) * width)
        y = row_parallel_linear(
            x[:, span], weight[:, span], leaves=TREE_LEAVES, group=group, residual=residual
        )
        results.put((world, rank, y.numpy()))
    dist.barrier()
    dist.destroy_process_group()


def test_processes_of_a_tensor_parallel_group_give_the_bits_of_one() -> None:
    one = row_parallel_linear(
        random(9, 128), random(64, 128, seed=1), leaves=TREE_LEAVES, residual=random(9, 64, seed=2)
    )
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["rlmix.numerics.consistent.linear"])  # torch once, not 4 times
    results = context.Queue()
    ranks = [
        context.Process(target=reduce_on_ranks, args=(rank, store.port, results))
        for rank in range(max(WORLDS))
    ]
    for process in ranks:
        process.start()
    found = [results.get(timeout=60) for _ in range(sum(WORLDS))]
    for process in ranks:
        process.join(timeout=30)
        assert process.exitcode == 0
    assert sorted(entry[:2] for entry in found) == [(w, r) for w in WORLDS for r in range(w)]
    for world, rank, y in found:
        assert torch.equal(torch.from_numpy(y), one), (world, rank)


def test_the_tree_oracle_does_not_care_how_k_is_split_over_processes() -> None:
    x, weight = random(5, 64), random(7, 64, seed=1)
    whole = tree_linear(x, weight)
    parts = [tree_linear(x[:, k : k + 16], weight[:, k : k + 16]) for k in range(0, 64, 16)]
    assert torch.equal(tree_sum(parts), whole)
    assert torch.equal(tree_linear(x[2:3], weight), whole[2:3])
    # 1 + 2 = 3, 3 + 4 = 7, 3 + 7 = 10
    ones = torch.ones(1, 4)
    assert tree_linear(torch.tensor([[1.0, 2, 3, 4]]), ones).item() == 10.0


def test_the_float64_oracle_forgets_the_order_of_bf16_products() -> None:
    x = random(16, 512, dtype=torch.bfloat16).float()
    weight = random(64, 512, seed=1, dtype=torch.bfloat16).float()
    order = torch.randperm(512, generator=torch.Generator().manual_seed(2))
    assert torch.equal(linear_f64(x[:, order], weight[:, order]), linear_f64(x, weight))
    assert not torch.equal(linear(x[:, order], weight[:, order]), linear(x, weight))
