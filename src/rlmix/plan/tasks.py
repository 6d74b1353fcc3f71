"""What a run needs for its tasks: images, disk, and what is missing. Pure: facts in, a plan out."""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_NAMED = 5
GIB = float(1 << 30)
MIB = float(1 << 20)
ENGINES = ("docker", "podman", "apptainer")
WITHOUT_IMAGES = ("weak", "unisolated")
"""Backends that see this machine's files at this machine's places."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskFacts:
    """One task of a prepared set, as its files say."""

    task_id: str
    image: str
    """Name for engines; empty: none."""
    rootfs: str
    """Its unpacked image; empty: it has no programs of its own."""
    has_rootfs: bool
    """The unpacked image is there."""
    has_repository: bool
    """Its prepared repository is there."""
    is_checked: bool
    """Its gates have been run."""
    image_bytes: int
    repository_bytes: int
    memory_mib: int
    """What it asks for; 0: it does not say."""
    needs_machine: bool
    """Files outside of the repository: an image, or folders of its harness."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SetFacts:
    """A prepared set and this machine, as they were found."""

    source: str
    path: str
    revision: str
    num_train: int
    num_held_out: int
    tasks: Sequence[TaskFacts]
    excluded: Sequence[tuple[str, str]]
    """(task, reason) of those that preparation left out."""
    failed: Sequence[tuple[str, str]]
    """The same of those that failed their gates."""
    tools: Sequence[str]
    """What this machine lacks for the backend, in sentences."""
    engine_images: frozenset[str] | None
    """Names that the engine has; None: not asked."""
    free_bytes: int
    """On the disk of the sandboxes' templates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TasksPlan:
    """The tasks of a run."""

    source: str
    path: str
    revision: str
    train: int
    held_out: int
    excluded: int
    failed_gates: int
    unchecked: int
    images: tuple[str, ...]
    """Names of all images, sorted."""
    in_image: int
    """Tasks that run in an image of their own; the others use what the sandbox has."""
    disk_gib: dict[str, float]
    """`images` (unpacked, each once), `prepared`, `templates` (copies that workers keep at most),
    `total`. Of the files as they are; a container engine's layers are shared and take less."""
    sandbox_memory_gib: float
    """Files of all sandboxes at a time, which lie in memory, at most."""
    missing: tuple[str, ...]
    """What is to be done, a sentence each."""
    refusals: tuple[str, ...]
    """Those of them without which sessions cannot run."""


def plan_tasks(
    facts: SetFacts,
    *,
    backend: str,
    workers: int,
    sessions: int,
    disk_mib: int,
    memory_mib: int,
    max_templates: int,
) -> TasksPlan:
    """What the tasks need and lack.

    Args:
        backend: of sandboxes, as configured.
        workers: processes that keep templates.
        sessions: sandboxes of agents at a time, all workers together.
        disk_mib, memory_mib: bounds of one sandbox.
        max_templates: that one worker keeps.
    """
    tasks = facts.tasks
    images = {task.image or task.rootfs: task.image_bytes for task in tasks if task.needs_machine}
    largest = sorted((task.repository_bytes for task in tasks), reverse=True)
    disk = {
        "images": sum(images.values()) / GIB,
        "prepared": sum(largest) / GIB,
        "templates": workers * sum(largest[:max_templates]) / GIB,
    }
    refusals = list(_refusals(facts, backend=backend, disk_mib=disk_mib))
    notes = list(_notes(facts, memory_mib=memory_mib, templates_gib=disk["templates"]))
    return TasksPlan(
        source=facts.source,
        path=facts.path,
        revision=facts.revision,
        train=facts.num_train,
        held_out=facts.num_held_out,
        excluded=len(facts.excluded),
        failed_gates=len(facts.failed),
        unchecked=sum(not task.is_checked for task in tasks),
        images=tuple(sorted({task.image for task in tasks if task.image})),
        in_image=sum(bool(task.image if backend in ENGINES else task.rootfs) for task in tasks),
        disk_gib={**disk, "total": sum(disk.values())},
        # An agent's sandbox and a verdict's, each with a repository and a /tmp.
        sandbox_memory_gib=2 * sessions * 2 * disk_mib * MIB / GIB,
        missing=(*refusals, *notes),
        refusals=tuple(refusals),
    )


def _refusals(facts: SetFacts, *, backend: str, disk_mib: int) -> list[str]:
    tasks, found = facts.tasks, list(facts.tools)
    if not facts.num_train:
        found.append(
            f"no task of {facts.path} may be trained on: prepare the set again, or check it"
        )
    gone = [task.task_id for task in tasks if not task.has_repository]
    if gone:
        found.append(
            f"the prepared repositories of {_named(gone)} are not there; run `rlmix tasks prepare "
            f"{facts.source}` again"
        )
    if backend in ENGINES:
        without = [task.task_id for task in tasks if task.needs_machine and not task.image]
        if without:
            found.append(f"{_named(without)}: the set names no image for sandbox.backend={backend}")
        known = facts.engine_images
        if known is not None:
            absent = sorted({t.image for t in tasks if t.image and t.image not in known})
            if absent:
                found.append(
                    f"images that {backend} does not have: {_named(absent)}; get them with "
                    "`rlmix tasks pull` and the same keys"
                )
    else:
        lost = [task.rootfs for task in tasks if task.rootfs and not task.has_rootfs]
        if lost:
            found.append(
                f"unpacked images that are not there: {_named(sorted(set(lost)))}; put them back, "
                f"or run `rlmix tasks prepare {facts.source}` with --images"
            )
    needy = [task.task_id for task in tasks if task.needs_machine]
    if backend in WITHOUT_IMAGES and needy:
        found.append(
            f"sandbox.backend={backend} cannot run {_named(needy)}, which bring files outside of "
            "their repository; allowed: namespaces, docker, podman"
        )
    large = [task.task_id for task in tasks if task.repository_bytes > disk_mib * MIB]
    if large:
        most = max(task.repository_bytes for task in tasks) / MIB
        found.append(
            f"sandbox.disk_mib={disk_mib} is less than the repositories of {_named(large)} take; "
            f"set it above {most:.0f}"
        )
    return found


def _notes(facts: SetFacts, *, memory_mib: int, templates_gib: float) -> list[str]:
    found = []
    if facts.excluded:
        first = facts.excluded[0]
        found.append(
            f"{len(facts.excluded)} tasks are not prepared, e.g. {first[0]}: {first[1]}; all stand "
            f"in {facts.path}/excluded.jsonl"
        )
    unchecked = [task.task_id for task in facts.tasks if not task.is_checked]
    if unchecked:
        found.append(
            f"{_named(unchecked)} never passed a gate; run `rlmix tasks check {facts.source} "
            f"--path {facts.path}`"
        )
    hungry = [task.task_id for task in facts.tasks if task.memory_mib > memory_mib]
    if hungry:
        most = max(task.memory_mib for task in facts.tasks)
        found.append(
            f"{_named(hungry)} ask for up to {most} MiB of memory, and sandbox.memory_mib="
            f"{memory_mib}"
        )
    if templates_gib * GIB > facts.free_bytes:
        found.append(
            f"templates take up to {templates_gib:.1f} GiB where {facts.free_bytes / GIB:.1f} GiB "
            "are free, unless they lie on the disk of the set and are linked"
        )
    return found


def _named(names: Sequence[str]) -> str:
    """A few names, and how many more."""
    shown = ", ".join(names[:MAX_NAMED])
    more = len(names) - MAX_NAMED
    return f"{shown} and {more} more" if more > 0 else shown


def task_lines(plan: TasksPlan) -> list[str]:
    """For people; what is missing comes last."""
    disk = plan.disk_gib
    lines = [
        f"tasks: {plan.source} at {plan.revision} from {plan.path}: {plan.train} to train on, "
        f"{plan.held_out} held out; {plan.excluded} not prepared, {plan.failed_gates} failed their "
        f"gates, {plan.unchecked} unchecked",
        f"  disk, GiB: images {disk['images']:.2f}, prepared {disk['prepared']:.2f}, templates up "
        f"to {disk['templates']:.2f}; files of sandboxes up to {plan.sandbox_memory_gib:.2f} of "
        "memory",
    ]
    if plan.images:
        lines.append(
            f"  images: {len(plan.images)} ({_named(plan.images)}); {plan.in_image} tasks run in "
            "their own"
        )
    return lines + [f"  missing: {sentence}" for sentence in plan.missing]
