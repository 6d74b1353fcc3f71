"""MiMo-V2.6-RL-oss, config `code`: eight fields in a JSON text, neither fix nor base commit."""

from pathlib import Path

from rlmix.tasks.evidence.runners import RUNNERS, runner_of
from rlmix.tasks.record import (
    Base,
    HiddenRecord,
    ImageRef,
    Limits,
    SourceTask,
    TaskRecord,
)
from rlmix.tasks.sources.patches import is_diff, language_of, paths_in, tests_among
from rlmix.tasks.sources.rows import Row, read_rows

IMAGE = "xiaomimimo/mimo-v2.6-rl-oss:{id}"
AGENT_S, MEMORY_MIB, CPUS = 4800, 8192, 4
"""The recipe that was published with the set: seconds per trajectory, size of a pod."""
SCRIPT = "mimo_test_command.sh"


def image_names(file: Path) -> dict[str, str]:
    """Image by the set's own name of it, from `image-mapping.jsonl` beside the data."""
    mapping = file.parent / "image-mapping.jsonl"
    if not mapping.is_file():
        return {}
    rows = [row for _, row in read_rows(mapping) if isinstance(row, dict)]
    return {str(row.get("dataset_image")): str(row.get("dockerhub_image")) for row in rows}


def read_mimo(row: Row, *, source: str, revision: str, images: dict[str, str]) -> SourceTask | None:
    instance = row.inner("extra_info").inner("instance_json")
    row.task_id = instance.task_id = instance.text("instance_id")
    kind = instance.text("dataset_type")
    if kind and kind != "opensource-code":
        instance.refuse("dataset_type", f"{kind!r}; allowed: opensource-code")
    own_image, workdir = instance.text("docker_image"), instance.text("cwd")
    prompt, patch = instance.text("problem_statement"), instance.text("test_patch")
    command, seconds = instance.text("test_command"), instance.number_of("verifier_timeout_sec")
    if patch and not is_diff(patch):
        instance.refuse("test_patch", "holds no git diff")
    if workdir and not workdir.startswith("/"):
        instance.refuse("cwd", f"{workdir!r} is no absolute path")
    if row.problems:
        return None
    paths = paths_in(patch)
    tests = tests_among(paths) or paths
    return SourceTask(
        public=TaskRecord(
            task_id=row.task_id,
            source=source,
            revision=revision,
            repository="",
            language=language_of(tests),
            prompt=prompt,
            image=ImageRef(ref=images.get(own_image, IMAGE.format(id=row.task_id))),
            workdir=workdir,
            base=Base(kind="tree"),
            limits=Limits(cpus=CPUS, memory_mib=MEMORY_MIB, agent_s=AGENT_S, verify_s=seconds),
        ),
        hidden=HiddenRecord(
            task_id=row.task_id,
            test_command=command,
            runner=_runner(command, patch),
            hidden_patch=patch,
            image_paths=("/logs", "/tests", f"{workdir}/{SCRIPT}"),
        ),
        gold=None,
    )


def _runner(command: str, patch: str) -> str:
    """The runner that the command shows, else the one that its script in the patch shows."""
    for text in (command, patch if SCRIPT in command else ""):
        found = runner_of(text)
        if found is not None:
            return next(name for name, runner in RUNNERS.items() if runner is found)
    return ""
