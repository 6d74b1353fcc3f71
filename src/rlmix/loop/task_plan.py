"""Looks at a prepared set and at this machine, for the plan. Reads, asks an engine once, starts
nothing."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from rlmix.config.schema.train import TrainConfig
from rlmix.loop.specs import BUNDLED_SOURCES
from rlmix.plan.tasks import ENGINES, SetFacts, TaskFacts, TasksPlan, plan_tasks
from rlmix.sandbox.bubblewrap import find_bwrap, interpreter_prefix
from rlmix.sandbox.repository import MAX_TEMPLATES
from rlmix.tasks.prepared import PreparedSource, reasons_in

ENGINE_S = 5.0
"""A plan must be there within seconds; an engine that is slower is not asked."""


def tasks_plan(config: TrainConfig) -> TasksPlan | None:
    """The tasks of a run; None where they are made and nothing has to be there.

    Raises:
        ConfigError: tasks.path holds no prepared set of tasks.source.
        DataError: a file of the set is damaged.
    """
    tasks, sandbox = config.tasks, config.sandbox
    if tasks.source in BUNDLED_SOURCES or tasks.path is None:
        return None
    folder = Path(tasks.path)
    train = PreparedSource(folder, name=tasks.source, split="train", limit=tasks.limit)
    held_out = PreparedSource(folder, name=tasks.source, split="eval", limit=None)
    gates = reasons_in(folder / "gates.jsonl")
    records = [
        source.record(task_id)
        for source, wanted in ((train, True), (held_out, bool(config.loop.eval_tasks)))
        if wanted
        for task_id in source.task_ids()
    ]
    backend = "namespaces" if sandbox.backend == "auto" else sandbox.backend
    facts = SetFacts(
        source=tasks.source,
        path=tasks.path,
        revision=train.revision,
        num_train=len(train.task_ids()),
        num_held_out=len(held_out.task_ids()),
        tasks=[
            TaskFacts(
                task_id=record["task_id"],
                image=(record["image"] or {}).get("ref", ""),
                rootfs=record["rootfs"],
                has_rootfs=bool(record["rootfs"]) and Path(record["rootfs"]).is_dir(),
                has_repository=(folder / record["folder"] / "manifest.json").is_file(),
                is_checked=record["task_id"] in gates,
                image_bytes=record["image_bytes"],
                repository_bytes=record["repository_bytes"],
                memory_mib=record["limits"]["memory_mib"],
                needs_machine=bool(record["rootfs"] or record["writable"]),
            )
            for record in records
        ],
        excluded=list(reasons_in(folder / "excluded.jsonl").items()),
        failed=[(name, reason) for name, reason in gates.items() if reason],
        tools=_tools(backend, has_images=any(record["rootfs"] for record in records)),
        engine_images=_engine_images(backend),
        free_bytes=shutil.disk_usage(tempfile.gettempdir()).free,
    )
    return plan_tasks(
        facts,
        backend=backend,
        workers=config.session.workers,
        sessions=config.session.workers * config.session.concurrency,
        disk_mib=sandbox.disk_mib,
        memory_mib=sandbox.memory_mib,
        max_templates=MAX_TEMPLATES,
    )


def _tools(backend: str, *, has_images: bool) -> list[str]:
    """Programs that the backend needs and this machine lacks."""
    from rlmix.core.errors import SandboxError

    found = []
    if shutil.which("git") is None:
        found.append("no `git` on PATH; install git")
    if backend in ENGINES and shutil.which(backend) is None:
        found.append(f"no `{backend}` on PATH; install it, or take another sandbox.backend")
    if backend == "namespaces":
        try:
            find_bwrap()
        except SandboxError as error:
            found.append(str(error))
        if has_images and interpreter_prefix().startswith("/usr"):
            found.append(
                f"rlmix runs with the interpreter in {interpreter_prefix()}, which images have of "
                "their own; use one outside of /usr (`uv python install`, pyenv)"
            )
    return found


def _engine_images(backend: str) -> frozenset[str] | None:
    """Names of the images that Docker or Podman has here; None when nobody can say."""
    program = shutil.which(backend) if backend in ("docker", "podman") else None
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "image", "ls", "--format", "{{.Repository}}:{{.Tag}}"],
            capture_output=True, text=True, timeout=ENGINE_S, check=True,
            env={key: os.environ[key] for key in os.environ if key != "PYTHONPATH"},
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    names = done.stdout.split()
    # Podman writes the registry in front of a name that Docker leaves bare.
    return frozenset([*names, *(name.removeprefix("docker.io/") for name in names)])
