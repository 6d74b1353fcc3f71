"""The loss that `scripts/bench_loss.py` measures is one loss; the measuring itself is no test."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    specification = importlib.util.spec_from_file_location("bench_loss", SCRIPTS / "bench_loss.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_contestants_compute_the_same_loss_and_gradients(bench: ModuleType) -> None:
    found = {name: bench.one(name, 2048, 5000, 8) for name in ("ours", "dense", "in_forward")}
    bench.check_same(found, "2048 x 5000")
    assert found["ours"]["loss"] == pytest.approx(found["dense"]["loss"], rel=1e-4)
    assert found["ours"]["grads"] == pytest.approx(found["dense"]["grads"], rel=1e-4)


def test_a_contestant_with_another_gradient_is_found_out(bench: ModuleType) -> None:
    ours = {"loss": 1.0, "grads": [2.0, 3.0]}
    with pytest.raises(SystemExit, match=r"ours and dense do not compute the same.*3 and 3\.1"):
        bench.check_same({"ours": ours, "dense": {"loss": 1.0, "grads": [2.0, 3.1]}}, "1 x 1")


def test_ratios_are_dense_over_ours_at_the_largest_size_that_dense_held(bench: ModuleType) -> None:
    def row(tokens: int, ours: float, dense: float | None) -> dict[str, float | None]:
        sizes = {"tokens": tokens, "vocab": 100, "ours_mib": ours, "dense_mib": dense}
        return {**sizes, "ours_s": 4.0, "dense_s": dense and dense / 100}

    rows = [row(1024, 300.0, 900.0), row(2048, 300.0, 3600.0), row(4096, 300.0, None)]
    assert bench.ratios(rows) == {"peak_ratio": 12.0, "time_ratio": 9.0}
    assert bench.ratios(rows[2:]) == {"peak_ratio": None, "time_ratio": None}
