"""What a prepared set needs and lacks, from facts written by hand."""

from dataclasses import asdict, replace
from typing import Any

from rlmix.plan.tasks import SetFacts, TaskFacts, TasksPlan, plan_tasks, task_lines

GIB, MIB = 1 << 30, 1 << 20


def task(name: str, **changes: Any) -> TaskFacts:
    facts = TaskFacts(
        task_id=name,
        image="hub/a:1",
        rootfs="/images/a",
        has_rootfs=True,
        has_repository=True,
        is_checked=True,
        image_bytes=3 * GIB,
        repository_bytes=32 * MIB,
        memory_mib=0,
        needs_machine=True,
    )
    return replace(facts, **changes)


def plan(*tasks: TaskFacts, backend: str = "namespaces", **changes: Any) -> TasksPlan:
    facts = SetFacts(
        source="swe_gym",
        path="/sets/gym",
        revision="r1",
        num_train=len(tasks),
        num_held_out=1,
        tasks=tasks,
        excluded=[],
        failed=[],
        tools=[],
        engine_images=None,
        free_bytes=100 * GIB,
    )
    return plan_tasks(
        replace(facts, **changes), backend=backend, workers=2, sessions=8, disk_mib=64,
        memory_mib=512, max_templates=2,
    )  # fmt: skip


def test_an_image_counts_once_and_templates_are_bounded_per_worker() -> None:
    found = plan(*(task(f"t{n}") for n in range(4)), task("b", image="hub/b:1", image_bytes=GIB))
    assert found.images == ("hub/a:1", "hub/b:1")
    # 3 + 1 GiB of images; five repositories of 32 MiB; two workers keep two templates each.
    assert found.disk_gib == {
        "images": 4.0, "prepared": 0.15625, "templates": 0.125, "total": 4.28125,
    }  # fmt: skip
    # Eight agents and eight verdicts, each with two file systems of 64 MiB.
    assert found.sandbox_memory_gib == 2.0
    assert (found.in_image, found.missing, found.refusals) == (5, (), ())


def test_what_stops_sessions_is_refused_and_the_rest_is_told() -> None:
    found = plan(
        task("lost", has_rootfs=False),
        task("gone", has_repository=False),
        task("large", repository_bytes=65 * MIB),
        task("new", is_checked=False, memory_mib=8192),
        excluded=[("bad", "no unpacked image x")],
        tools=["no `git` on PATH; install git"],
        free_bytes=1,
    )
    refused = "\n".join(found.refusals)
    assert "no `git` on PATH" in refused
    assert "the prepared repositories of gone are not there" in refused
    assert "unpacked images that are not there: /images/a" in refused
    assert "sandbox.disk_mib=64 is less than the repositories of large take; set it above 65" in (
        refused
    )
    told = "\n".join(found.missing[len(found.refusals) :])
    assert "1 tasks are not prepared, e.g. bad: no unpacked image x" in told
    assert "new never passed a gate; run `rlmix tasks check swe_gym --path /sets/gym`" in told
    assert "new ask for up to 8192 MiB of memory, and sandbox.memory_mib=512" in told
    assert "templates take up to 0.2 GiB where 0.0 GiB are free" in told


def test_an_engine_needs_names_of_images_and_the_images() -> None:
    names = frozenset({"hub/a:1"})
    found = plan(task("a"), task("b", image="hub/b:1"), backend="docker", engine_images=names)
    assert found.refusals == (
        "images that docker does not have: hub/b:1; get them with `rlmix tasks pull` and the same "
        "keys",
    )
    # Unpacked folders are of no use to an engine, so their absence is no fault either.
    assert plan(task("a", has_rootfs=False), backend="docker").refusals == ()
    nameless = plan(task("a", image=""), backend="podman")
    assert nameless.refusals == ("a: the set names no image for sandbox.backend=podman",)


def test_weak_sandboxes_cannot_run_what_brings_its_own_machine() -> None:
    (said,) = plan(task("a"), task("b", needs_machine=False), backend="weak").refusals
    assert said.startswith("sandbox.backend=weak cannot run a, which bring files outside")


def test_a_set_of_which_nothing_is_left_is_refused() -> None:
    (said,) = plan().refusals
    assert said.startswith("no task of /sets/gym may be trained on")


def test_many_names_are_cut_and_the_lines_are_for_people() -> None:
    found = plan(*(task(f"t{n}", is_checked=False) for n in range(7)))
    lines = task_lines(found)
    assert lines[0].startswith("tasks: swe_gym at r1 from /sets/gym: 7 to train on, 1 held out;")
    assert lines[-1].startswith("  missing: t0, t1, t2, t3, t4 and 2 more never passed a gate")
    assert set(asdict(found)) >= {"images", "disk_gib", "missing"}
