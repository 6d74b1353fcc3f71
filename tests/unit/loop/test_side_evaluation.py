"""Evaluations beside the loop: nobody waits for them, versions stay, the best is remembered."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rlmix.core.errors import ConfigError, EngineError
from rlmix.evals.checkpoints import best_version, choose_policy
from rlmix.loop.evaluation import keep_version
from rlmix.loop.side_evaluation import (
    SideEvaluation,
    best_of,
    discard_evaluations,
    read_rows,
)
from rlmix.observe.run_dir import RunDir
from rlmix.pools.spec import ReplicaStatus
from rlmix.weights.manifest import Manifest, hash_file, write_manifest
from rlmix.weights.store import list_versions, prune, version_dir

Evaluate = Callable[[str, int, str], Awaitable[dict[str, Any]]]


def publish(store: Path, version: int) -> None:
    """A version of two small files."""
    folder = version_dir(store, "bf16", version)
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text(f"{name} of version {version}")
    files = {name: hash_file(folder / name) for name in ("config.json", "model.safetensors")}
    write_manifest(
        folder, Manifest(kind="weights", version=version, view="bf16", files=files, facts={})
    )


def rate(value: float) -> dict[str, Any]:
    return {"pass_at_1": value, "ci95": [value, value], "tasks": 4}


class Pool:
    """The orders that a fleet gets."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    async def start(self, version: int) -> None:
        self.versions.append(version)

    async def roll_out(self, version: int) -> None:
        self.versions.append(version)

    async def wait_for_version(self, version: int, *, timeout_s: float) -> None:
        assert self.versions[-1] == version

    def status(self) -> list[ReplicaStatus]:
        return []


def side(
    tmp_path: Path, evaluate: Evaluate, *, every_steps: int = 1
) -> tuple[SideEvaluation, Pool]:
    pool = Pool()
    events: list[tuple[str, str]] = []
    made = SideEvaluation(
        tmp_path,
        every_steps=every_steps,
        store=tmp_path / "weights",
        keep=keep_version,
        fleet=pool,
        evaluate=evaluate,
        on_event=lambda kind, reason, **_: events.append((kind, reason)),
        places=8,
    )
    made.events = events  # type: ignore[attr-defined]
    return made, pool


def test_steps_go_on_while_an_evaluation_never_ends_and_its_version_stays(tmp_path: Path) -> None:
    """Ten steps are offered and pruned to one version while version 0 is still being evaluated."""
    store = tmp_path / "weights"
    begun, let_go = asyncio.Event(), asyncio.Event()
    read: dict[int, str] = {}

    async def evaluate(folder: str, version: int, digest: str) -> dict[str, Any]:
        begun.set()
        await let_go.wait()
        place = version_dir(tmp_path / "evaluations/weights", "bf16", version)
        read[version] = (place / "model.safetensors").read_text()
        return rate(0.1 * version)

    async def run() -> None:
        made, pool = side(tmp_path, evaluate)
        publish(store, 0)
        made.offer(0)
        made.start()
        await begun.wait()
        for step in range(1, 11):  # The loop: publish, prune, offer; none of it waits.
            publish(store, step)
            prune(store, "bf16", 1)
            made.offer(step)
        assert made.running == 0
        assert list_versions(store, "bf16") == [10]
        let_go.set()
        await made.finish()
        assert pool.versions == [0, 10]
        skipped = [kind for kind, _ in made.events if kind == "evaluation_skipped"]  # type: ignore[attr-defined]
        assert len(skipped) == 9

    asyncio.run(run())
    assert read == {
        0: "model.safetensors of version 0", 10: "model.safetensors of version 10",
    }  # fmt: skip
    rows = read_rows(tmp_path)
    assert [row["step"] for row in rows] == [0, 10]
    assert all(row["is_unchanged"] for row in rows)
    assert rows[0]["policy_sha256"] != rows[1]["policy_sha256"]


def test_the_best_version_is_kept_and_found_by_name(tmp_path: Path) -> None:
    with RunDir.create(tmp_path, "r") as run:
        rates = {0: 0.2, 2: 0.7, 4: 0.7, 6: 0.5}

        async def evaluate(folder: str, version: int, digest: str) -> dict[str, Any]:
            return rate(rates[version])

        async def go() -> None:
            for step in rates:  # Each finished before the next, as with quick evaluations.
                made, _ = side(run.path, evaluate, every_steps=2)
                publish(run.weights, step)
                made.offer(step)
                made.offer(step)  # Offered twice, evaluated once.
                made.start()
                await made.finish()

        asyncio.run(go())
        assert best_version(run.path)[1] == 2  # The earliest of equals.
        kept = run.path / "evaluations/weights"
        assert list_versions(kept, "bf16") == [0, 2, 6]
        choice = choose_policy(tmp_path, "r:best", model_path="bundled:tiny", is_model_given=False)
        assert (choice.step, choice.label) == (2, "r:2")
        assert choice.folder == version_dir(kept, "bf16", 2)
        discard_evaluations(run.path, 1)
        assert [row["step"] for row in read_rows(run.path)] == [0]
        assert best_version(run.path)[1] == 0


def test_a_failed_evaluation_is_an_event_and_the_next_one_is_made(tmp_path: Path) -> None:
    async def evaluate(folder: str, version: int, digest: str) -> dict[str, Any]:
        if version == 0:
            raise EngineError("no engine\nlong log")
        return rate(0.5)

    async def run() -> list[tuple[str, str]]:
        made, _ = side(tmp_path, evaluate)
        publish(tmp_path / "weights", 0)
        publish(tmp_path / "weights", 1)
        made.offer(0)
        made.offer(1)
        made.start()
        await made.finish()
        return made.events  # type: ignore[attr-defined, no-any-return]

    events = asyncio.run(run())
    assert events[1] == ("evaluation_failed", "no engine")
    assert events[-1] == ("evaluation_done", "pass@1 0.500 (0.500 to 0.500)")
    assert [row["step"] for row in read_rows(tmp_path)] == [1]


def test_only_due_versions_are_evaluated_and_no_value_is_never_the_best(tmp_path: Path) -> None:
    async def evaluate(folder: str, version: int, digest: str) -> dict[str, Any]:
        return rate(0.5)

    async def run() -> None:
        made, pool = side(tmp_path, evaluate, every_steps=5)
        for step in range(8):
            publish(tmp_path / "weights", step)
            made.offer(step)
        made.start()
        await made.finish()
        assert pool.versions == [0, 5]

    asyncio.run(run())
    assert best_of([{"step": 1, "pass_at_1": None}]) is None
    assert best_of([{"step": 1, "pass_at_1": float("nan")}]) is None


def test_a_policy_is_found_by_run_and_step_and_what_is_missing_is_told(tmp_path: Path) -> None:
    def choose(checkpoint: str | None, *, is_model_given: bool = False) -> Any:
        return choose_policy(
            tmp_path, checkpoint, model_path="bundled:tiny", is_model_given=is_model_given
        )

    assert choose(None, is_model_given=True).label == "bundled:tiny"
    with pytest.raises(ConfigError, match="no run here yet; start one with `rlmix train`; or set"):
        choose(None)
    yaml = "model:\n  # Policy.\n  path: bundled:tiny\nrun:\n  name: r\n"
    with RunDir.create(tmp_path, "r", config_yaml=yaml) as run:
        warm = choose("r:0")
        assert (warm.step, warm.digest) == (0, choose(None, is_model_given=True).digest)
        with pytest.raises(ConfigError, match="holds no step 7; it holds 0"):
            choose("r:7")
        with pytest.raises(ConfigError, match=r"no complete checkpoint yet.*eval\.checkpoint=r:0"):
            choose("r")
        with pytest.raises(ConfigError, match="has made no evaluation; train with"):
            choose("r:best")
        publish(run.path / "evaluation", 3)
        assert choose("r:3").step == 3
