"""SWE-bench Pro as tables: v1 (731 rows, lists as texts, scripts beside the data) and V2.

V1 keeps `run_script.sh` and `parser.py` of each instance in a folder named after it, as its harness
repository does; V2 has whole task folders (`harbor.py`).
"""

import re
from pathlib import Path

from rlmix.tasks.record import Base, GoldRecord, ImageRef, Limits, SourceTask, TaskRecord
from rlmix.tasks.sources.harbor import WORKDIR, pro_hidden
from rlmix.tasks.sources.patches import is_diff
from rlmix.tasks.sources.rows import Row

V1_IMAGE = "jefzda/sweap-images:{tag}"
_FIX_IN_ID = re.compile(r"-([0-9a-f]{40})(?:-v|$)")


def script_folder(path: Path) -> Path:
    """Where the scripts of v1 lie: `run_scripts/` beside the data."""
    parent = path if path.is_dir() else path.parent
    return parent / "run_scripts"


def read_swe_bench_pro(row: Row, *, source: str, revision: str, scripts: Path) -> SourceTask | None:
    row.task_id = row.text("instance_id")
    parts = [row.text("problem_statement")]
    parts += [row.text(name, needed=False) for name in ("requirements", "interface")]
    base, repository = row.text("base_commit", needed=False), row.text("repo")
    patch, test_patch = row.text("patch"), row.text("test_patch")
    for column, diff in (("patch", patch), ("test_patch", test_patch)):
        if diff and not is_diff(diff):
            row.refuse(column, "holds no git diff")
    required = row.names("fail_to_pass")
    kept = row.names("pass_to_pass", needed=False)
    selected = row.names("selected_test_files_to_run", needed=False)
    texts = {name: _script(row, scripts, name) for name in ("run_script.sh", "parser.py")}
    tag = row.text("dockerhub_tag", needed=False)
    image = row.text("docker_image", needed=False) or (V1_IMAGE.format(tag=tag) if tag else "")
    if not image:
        row.refuse("dockerhub_tag", "missing, and no docker_image either")
    if row.problems:
        return None
    fix = _FIX_IN_ID.search(row.task_id)
    return SourceTask(
        public=TaskRecord(
            task_id=row.task_id,
            source=source,
            revision=revision,
            repository=repository,
            language=row.text("repo_language", needed=False),
            prompt="\n\n".join(part for part in parts if part.strip()),
            image=ImageRef(ref=image),
            workdir=WORKDIR,
            base=Base(kind="commit", commit=base) if base else Base(kind="tree"),
            limits=Limits(verify_s=3000),
        ),
        hidden=pro_hidden(
            row.task_id,
            run_script=texts["run_script.sh"],
            parser=texts["parser.py"],
            selected=selected,
            patch=test_patch,
            required=required,
            kept=kept,
        ),
        gold=GoldRecord(task_id=row.task_id, patch=patch, commit=fix[1] if fix else ""),
    )


def _script(row: Row, scripts: Path, name: str) -> str:
    if Path(row.task_id).name != row.task_id or not row.task_id.isprintable():
        row.refuse("instance_id", "names no folder of run_scripts/")
        return ""
    file = scripts / row.task_id / name
    try:
        with file.open(encoding="utf-8", newline="") as stream:
            return stream.read()
    except OSError:
        row.refuse(
            "instance_id", f"no script {file}; the scripts lie beside the data, in run_scripts/"
        )
    except UnicodeDecodeError:
        row.refuse("instance_id", f"{file} is no UTF-8 text")
    return ""
