"""NVIDIA Nemotron and NeMo-Gym JSONL: a SWE-bench or R2E row inside request metadata."""

from rlmix.tasks.record import SourceTask
from rlmix.tasks.sources.r2e import read_r2e
from rlmix.tasks.sources.rows import Row
from rlmix.tasks.sources.swe_bench import read_swe_bench


def read_nemotron(row: Row, *, source: str, revision: str) -> SourceTask | None:
    metadata = row.inner("responses_create_params").inner("metadata")
    instance = metadata.inner("instance_dict")
    row.task_id = str(metadata.values.get("instance_id", ""))
    for column in ("instance_id", "base_commit"):
        instance.values.setdefault(column, metadata.values.get(column))
    if row.problems:
        return None
    if "expected_output_json" in instance.values:
        return read_r2e(instance, source=source, revision=revision)
    return read_swe_bench(instance, source=source, revision=revision)
