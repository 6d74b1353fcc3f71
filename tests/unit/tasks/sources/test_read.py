"""Each set's schema read into the common record; every bad row named with file, row and column."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rlmix.core.errors import ConfigError, DataError
from rlmix.tasks.record import BadRow
from rlmix.tasks.sources.read import PUBLIC_SETS, ReadSet, read_set
from rlmix.tasks.sources.rows import names_of
from tests.unit.tasks.sources import rows


def read(tmp_path: Path, name: str, *values: dict[str, Any], suffix: str = "jsonl") -> ReadSet:
    file = tmp_path / f"data.{suffix}"
    if suffix == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(values)), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in values))
    return read_set(name, file, revision="r1")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_swe_bench_lists_may_be_json_or_python_text(tmp_path: Path, suffix: str) -> None:
    found = read(tmp_path, "swe_bench", rows.SWE_BENCH, suffix=suffix)
    assert found.bad == ()
    (task,) = found.tasks
    assert task.public.prompt == "total() subtracts \u2013 na\u00efve"
    assert (task.public.base.kind, task.public.base.commit) == ("commit", "a" * 40)
    assert task.public.image is not None
    assert task.public.image.ref == "swebench/sweb.eval.x86_64.owner_1776_pack-7:latest"
    assert (task.public.language, task.public.revision) == ("python", "r1")
    assert task.hidden.test_command == "python -m pytest -rA --tb=short tests/test_sums.py"
    assert task.hidden.fail_to_pass == ("tests/test_sums.py::test_adds",)
    assert task.hidden.pass_to_pass == (
        "tests/test_sums.py::test_zero",
        "tests/test_sums.py::test_it's",
    )
    assert task.hidden.hidden_patch == rows.TESTS
    assert task.gold is not None
    assert (task.gold.patch, task.gold.is_reversed) == (rows.FIX, False)


def test_swe_gym_has_lists_and_images_of_its_own(tmp_path: Path) -> None:
    (task,) = read(tmp_path, "swe_gym", rows.SWE_GYM, suffix="parquet").tasks
    assert task.public.image is not None
    assert task.public.image.ref == "xingyaoww/sweb.eval.x86_64.owner_s_pack-7:latest"
    assert task.hidden.pass_to_pass == ("tests/test_sums.py::test_zero",)


def test_the_record_that_a_rollout_sees_holds_neither_fix_nor_tests(tmp_path: Path) -> None:
    (task,) = read(tmp_path, "swe_bench", rows.SWE_BENCH).tasks
    seen = repr(task.public)
    assert "return a + b" not in seen
    assert "test_adds" not in seen


def test_django_names_become_those_of_its_runner(tmp_path: Path) -> None:
    row = {
        **rows.SWE_BENCH,
        "repo": "django/django",
        "test_patch": rows.TESTS.replace("tests/test_sums.py", "tests/admin_views/tests.py"),
        "FAIL_TO_PASS": '["test_adds (admin_views.tests.SumTests)"]',
        "PASS_TO_PASS": "[]",
    }
    (task,) = read(tmp_path, "swe_bench", row).tasks
    assert task.hidden.test_command == (
        "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 admin_views.tests"
    )
    assert task.hidden.name_style == "django"


def test_swe_rebench_brings_its_own_command(tmp_path: Path) -> None:
    (task,) = read(tmp_path, "swe_rebench", rows.SWE_REBENCH, suffix="parquet").tasks
    assert task.hidden.test_command == "go build ./... && go test -v ./..."
    assert (task.public.workdir, task.hidden.name_style) == ("/pack", "without_timing")
    assert task.public.image is not None
    assert task.public.image.ref == "swerebench/owner_pack:7"


def test_swe_smith_says_that_its_patch_is_the_bug(tmp_path: Path) -> None:
    (task,) = read(tmp_path, "swe_smith", rows.SWE_SMITH).tasks
    assert task.gold is not None
    assert task.gold.is_reversed
    assert (task.public.base.kind, task.public.repository) == ("tree", "owner/pack")
    # Only files with a failing test are run, so only their names are asked for.
    assert task.hidden.test_command.endswith(" tests/test_sums.py")
    assert task.hidden.pass_to_pass == ("tests/test_sums.py::test_zero",)


def test_r2e_takes_what_is_expected_to_pass_and_hides_what_the_image_holds(tmp_path: Path) -> None:
    (task,) = read(tmp_path, "r2e_gym", rows.R2E, suffix="parquet").tasks
    assert task.public.prompt == "total() subtracts"
    assert task.hidden.fail_to_pass == ("TestSums.test_adds", "test_zero")
    assert task.hidden.image_paths == (
        "/r2e_tests",
        "/testbed/run_tests.sh",
        "/testbed/r2e_tests",
    )
    assert task.hidden.from_image["/r2e_tests"] == "r2e_tests"
    assert task.gold is not None
    assert task.gold.commit == "c" * 40


@pytest.mark.parametrize("as_text", [True, False])
def test_nemotron_holds_a_row_of_another_set_as_text_or_object(
    tmp_path: Path, as_text: bool
) -> None:
    row = json.loads(json.dumps(rows.NEMOTRON))
    metadata = row["responses_create_params"]["metadata"]
    if not as_text:
        metadata["instance_dict"] = json.loads(metadata["instance_dict"])
    (task,) = read(tmp_path, "nemotron", row).tasks
    assert task.public.task_id == "owner__pack-7"
    assert task.public.base.commit == "a" * 40


def test_mimo_is_unpacked_from_its_json_text(tmp_path: Path) -> None:
    (tmp_path / "image-mapping.jsonl").write_text(
        '{"dataset_image": "other", "dockerhub_image": "hub/other"}\n'
    )
    (task,) = read(tmp_path, "mimo", rows.mimo(), suffix="parquet").tasks
    assert task.public.image is not None
    assert task.public.image.ref == "xiaomimimo/mimo-v2.6-rl-oss:format-code-task-000123"
    assert (task.public.workdir, task.public.base.kind) == ("/testbed", "tree")
    assert (task.public.limits.verify_s, task.public.limits.memory_mib) == (1800, 8192)
    assert (task.hidden.runner, task.hidden.fail_to_pass, task.gold) == ("pytest", (), None)


def test_the_image_of_a_mimo_task_may_come_from_its_mapping(tmp_path: Path) -> None:
    (tmp_path / "image-mapping.jsonl").write_text(
        '{"dataset_image": "internal/registry/task:123", "dockerhub_image": "hub/one:2"}\n'
    )
    (task,) = read(tmp_path, "mimo", rows.mimo()).tasks
    assert task.public.image is not None
    assert task.public.image.ref == "hub/one:2"


def pro_scripts(folder: Path) -> None:
    place = folder / "run_scripts" / rows.PRO_V1["instance_id"]
    place.mkdir(parents=True)
    (place / "run_script.sh").write_bytes(rows.RUN_SCRIPT.encode())
    (place / "parser.py").write_text(rows.PARSER)


def test_pro_v1_takes_its_scripts_from_beside_the_data(tmp_path: Path) -> None:
    pro_scripts(tmp_path)
    (task,) = read(tmp_path, "swe_bench_pro", rows.PRO_V1, suffix="parquet").tasks
    assert task.public.prompt == "total() subtracts\n\n- total() adds\n\nNo new interface"
    assert task.hidden.files["run_script.sh"] == rows.RUN_SCRIPT  # Line ends included.
    assert task.hidden.fail_to_pass == ("tests/test_sums.py::test_adds",)
    assert task.hidden.pass_to_pass == ()
    assert task.hidden.test_command == "tests/test_sums.py"
    assert task.gold is not None
    assert task.gold.commit == "d" * 40
    assert task.public.image is not None
    assert task.public.image.ref == "jefzda/sweap-images:owner.app-d"


def test_pro_v1_without_its_scripts_names_the_missing_file(tmp_path: Path) -> None:
    found = read(tmp_path, "swe_bench_pro", rows.PRO_V1)
    assert found.tasks == ()
    assert "run_script.sh; the scripts lie beside the data" in found.bad[0].sentence()


@pytest.mark.parametrize("name", ["../other", "\0", "\ud800", "/etc"])
def test_an_id_of_pro_v1_names_a_folder_of_its_scripts_and_nothing_else(
    tmp_path: Path, name: str
) -> None:
    found = read(tmp_path, "swe_bench_pro", {**rows.PRO_V1, "instance_id": name})
    assert found.tasks == ()
    assert any("names no folder of run_scripts/" in bad.sentence() for bad in found.bad)


def harbor(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = folder / "one" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode())
    return folder


def test_a_folder_of_pro_v2_is_a_task(tmp_path: Path) -> None:
    (task,) = read_set("swe_bench_pro_v2", harbor(tmp_path, rows.PRO_V2_FILES)).tasks
    assert (task.public.task_id, task.public.repository) == ("one", "owner/app")
    limits = task.public.limits
    assert (limits.cpus, limits.memory_mib, limits.disk_mib) == (1.0, 4096, 10240)
    assert (limits.agent_s, limits.verify_s) == (3000, 3000)
    assert (task.public.workdir, task.hidden.runner) == ("/testbed", "pro")
    assert task.hidden.fail_to_pass == ("tests/test_sums.py::test_adds",)
    assert task.gold is not None


def test_a_plain_harbor_folder_rests_on_its_script(tmp_path: Path) -> None:
    files = {k: v for k, v in rows.PRO_V2_FILES.items() if k != "tests/config.json"}
    files["task.toml"] = 'version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "10G"\n'
    (task,) = read_set("harbor", harbor(tmp_path, files)).tasks
    assert (task.hidden.test_command, task.hidden.runner) == ("/tests/test.sh", "harbor")
    assert task.public.writable == ("/tests", "/logs", "/solution")
    assert "/tests/test.sh" in task.hidden.files
    assert task.public.limits.memory_mib == 2048
    assert task.public.image is not None
    assert task.public.image.ref == "ghcr.io/owner/pro:one"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("environment = 3", ""),
        ('[environment]\ncpus = "two"', "cpus = 'two' is no number from 0 on"),
        ('[environment]\nmemory = "xG"', "memory = 'xG'; allowed: such as '4G' or '512M'"),
        ("[agent]\ntimeout_sec = inf", "timeout_sec = inf is no number from 0 on"),
        ("[verifier]\ntimeout_sec = -1", "timeout_sec = -1 is no number from 0 on"),
    ],
)
def test_odd_settings_of_a_task_folder_make_a_bad_row(
    tmp_path: Path, settings: str, said: str
) -> None:
    folder = harbor(tmp_path, {**rows.PRO_V2_FILES, "task.toml": settings + "\n"})
    found = read_set("swe_bench_pro_v2", folder)
    assert [bad.problem for bad in found.bad] == ([said] if said else [])


def test_line_separators_of_unicode_and_a_byte_order_mark_end_no_row(tmp_path: Path) -> None:
    row = {**rows.SWE_BENCH, "problem_statement": "one\u2028two\u0085three"}
    file = tmp_path / "data.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(row, ensure_ascii=False).encode() + b"\r\n\r\n")
    (task,) = read_set("swe_bench", file).tasks
    assert task.public.prompt == "one\u2028two\u0085three"


BAD: list[tuple[str, dict[str, Any], list[str]]] = [
    ("swe_bench", {"repo": None}, ["repo: missing"]),
    ("swe_rebench", {"repo": "pack"}, ["repo: 'pack' is not owner/name"]),
    ("swe_bench", {"problem_statement": "  "}, ["problem_statement: empty"]),
    ("swe_bench", {"base_commit": "main"}, ["base_commit: 'main' is no commit id"]),
    ("swe_bench", {"FAIL_TO_PASS": "[]"}, ["FAIL_TO_PASS: an empty list"]),
    ("swe_bench", {"FAIL_TO_PASS": "__import__('os')"}, ["FAIL_TO_PASS: neither a JSON nor a"]),
    ("swe_bench", {"FAIL_TO_PASS": "[1, 2]"}, ["FAIL_TO_PASS: not a list of texts"]),
    ("swe_bench", {"patch": "just words"}, ["patch: holds no git diff"]),
    ("swe_bench", {"repo": "sympy/sympy"}, ["repo: nobody reads its runner bin/test"]),
    ("swe_bench", {"repo": 3, "patch": 4}, ["repo: a int, not a text", "patch: a int"]),
    ("swe_rebench", {"install_config": {"test_cmd": "make check"}}, ["install_config: nobody"]),
    ("swe_smith", {"FAIL_TO_PASS": ["TestX"]}, ["FAIL_TO_PASS: 'TestX' is no pytest id"]),
    ("swe_smith", {"patch": rows.TESTS}, ["patch: the bug lies in tests/test_sums.py"]),
    ("swe_bench", {"problem_statement": "half \ud800"}, ["problem_statement: holds a NUL or half"]),
    ("swe_smith", {"problem_statement": "NUL \0"}, ["problem_statement: holds a NUL or half of"]),
    ("swe_smith", {"instance_id": "a\nb"}, ["instance_id: no id: longer than 300"]),
    ("swe_smith", {"instance_id": "a" * 301}, ["instance_id: no id: longer than 300"]),
    ("r2e_gym", {"commit_hash": "--output=/tmp/x"}, ["commit_hash: '--output=/tmp/x' is no"]),
    ("r2e_gym", {"expected_output_json": "{"}, ["expected_output_json: no valid JSON"]),
    ("r2e_gym", {"expected_output_json": '{"a": "FAILED"}'}, ["no test is expected to pass"]),
]  # fmt: skip
GOOD = {
    "swe_bench": rows.SWE_BENCH,
    "swe_rebench": rows.SWE_REBENCH,
    "swe_smith": rows.SWE_SMITH,
    "r2e_gym": rows.R2E,
}


@pytest.mark.parametrize(("name", "changes", "said"), BAD)
def test_a_bad_row_is_named_with_every_problem(
    tmp_path: Path, name: str, changes: dict[str, Any], said: list[str]
) -> None:
    found = read(tmp_path, name, GOOD[name], {**GOOD[name], **changes, "extra": 1})
    assert len(found.tasks) == 1
    sentences = [bad.sentence() for bad in found.bad]
    assert len(sentences) >= len(said)
    for part in said:
        assert any(part in sentence and "data.jsonl, row 1" in sentence for sentence in sentences)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"verifier_timeout_sec": "1800"}, "verifier_timeout_sec: '1800' is no whole number"),
        ({"verifier_timeout_sec": True}, "verifier_timeout_sec: True is no whole number"),
        ({"cwd": "testbed"}, "cwd: 'testbed' is no absolute path"),
        ({"dataset_type": "webdev"}, "dataset_type: 'webdev'; allowed: opensource-code"),
        ({"test_command": ""}, "test_command: empty"),
    ],
)
def test_a_bad_mimo_instance_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    (bad,) = read(tmp_path, "mimo", rows.mimo(**changes)).bad
    assert said in bad.sentence()
    assert bad.task_id == "format-code-task-000123"


def test_an_id_that_comes_twice_is_refused_the_second_time(tmp_path: Path) -> None:
    found = read(tmp_path, "swe_bench", rows.SWE_BENCH, rows.SWE_BENCH)
    assert len(found.tasks) == 1
    assert found.bad == (
        BadRow(
            file=str(tmp_path / "data.jsonl"),
            row=1,
            column="instance_id",
            problem=f"also in {tmp_path / 'data.jsonl'}, row 0",
            task_id="owner__pack-7",
        ),
    )
    assert found.num_rows == 2


GOOD_LINE = json.dumps(rows.SWE_BENCH).encode()
BROKEN_LINES = {
    "half an object": (b'{"repo": "owner/pack",', "no valid JSON"),
    "no UTF-8": (b'{"repo": "caf\xe9"}', "no valid JSON"),
    "a list": (b"[1, 2]", "not a JSON object"),
    "a number": (b"7", "not a JSON object"),
    "NULs": (b"\0\0\0", "no valid JSON"),
    "a name that comes twice": (b'{"repo": "a/b", "repo": "c/d"}', "'repo' stands twice"),
    "nesting without end": (b"[" * 100_000, "no valid JSON"),
}


@pytest.mark.parametrize("name", BROKEN_LINES)
def test_a_row_that_cannot_be_decoded_is_listed_and_the_others_are_read(
    tmp_path: Path, name: str
) -> None:
    line, said = BROKEN_LINES[name]
    file = tmp_path / "data.jsonl"
    file.write_bytes(b"\n".join([line, b"", GOOD_LINE, line]))  # The last one without a line end.
    found = read_set("swe_bench", file)
    assert [task.public.task_id for task in found.tasks] == ["owner__pack-7"]
    assert [(bad.row, bad.column) for bad in found.bad] == [(0, "row"), (3, "row")]
    assert said in found.bad[0].sentence()
    assert found.num_rows == 3


def test_a_row_without_an_end_is_listed_and_not_held_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlmix.tasks.sources.rows.MAX_ROW_BYTES", 1 << 20)
    monkeypatch.setattr("rlmix.tasks.sources.rows._SKIP_BYTES", 1000)
    (tmp_path / "data.jsonl").write_bytes(b"x" * (3 << 20) + b"\n" + GOOD_LINE)
    found = read_set("swe_bench", tmp_path)
    assert [bad.sentence() for bad in found.bad] == [
        f"{tmp_path}/data.jsonl, row 0, column row: longer than 1 MiB"
    ]
    assert len(found.tasks) == 1


def parquet_with_bad_text(file: Path) -> None:
    """Two rows, the first with a `repo` that is no UTF-8, as a writer that does not check leaves
    it."""
    good = {name: str(value) for name, value in rows.SWE_BENCH.items()}
    table = pyarrow.Table.from_pylist([good, good])
    bad = pyarrow.array([b"caf\xe9/pack", b"owner/pack"]).view(pyarrow.string())
    place = table.schema.get_field_index("repo")
    pyarrow.parquet.write_table(table.set_column(place, "repo", bad), file)


def test_a_parquet_row_with_bad_text_names_its_column(tmp_path: Path) -> None:
    parquet_with_bad_text(tmp_path / "data.parquet")
    found = read_set("swe_bench", tmp_path)
    assert len(found.tasks) == 1
    (bad,) = found.bad
    assert (bad.row, bad.column) == (0, "repo")
    assert "cannot be decoded: 'utf-8' codec can't decode byte 0xe9" in bad.problem


def test_a_damaged_row_group_costs_its_own_rows(tmp_path: Path) -> None:
    file = tmp_path / "data.parquet"
    many = [{**rows.SWE_BENCH, "instance_id": f"owner__pack-{n}"} for n in range(6)]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(many), file, row_group_size=2, compression="gzip"
    )
    group = pyarrow.parquet.ParquetFile(file).metadata.row_group(1)
    start = min(group.column(n).dictionary_page_offset or group.column(n).data_page_offset
                for n in range(group.num_columns))  # fmt: skip
    content = bytearray(file.read_bytes())
    content[start : start + 200] = b"\xff" * 200
    file.write_bytes(content)
    found = read_set("swe_bench", file)
    assert [task.public.task_id[-1] for task in found.tasks] == ["0", "1", "4", "5"]
    (bad,) = found.bad
    assert bad.row == 2
    assert bad.problem.startswith("rows 2 to 3 cannot be read: ")


def test_a_file_that_is_no_parquet_says_so(tmp_path: Path) -> None:
    (tmp_path / "data.parquet").write_text("{}")
    with pytest.raises(DataError, match=r"data\.parquet: cannot be read as parquet"):
        read_set("swe_bench", tmp_path)
    (tmp_path / "data.parquet").rename(tmp_path / "data.json")
    (tmp_path / "data.json").write_text("[")
    with pytest.raises(DataError, match=r"data\.json: no valid JSON"):
        read_set("swe_bench", tmp_path)


def test_an_empty_place_and_an_unknown_set_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no data there; allowed: a file ending in \.parquet"):
        read_set("swe_bench", tmp_path)
    with pytest.raises(DataError, match=r"holds a task\.toml"):
        read_set("harbor", tmp_path)
    (tmp_path / "x.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"tasks.source='swebench'; allowed: harbor, mimo"):
        read_set("swebench", tmp_path)
    assert len(PUBLIC_SETS) == 10


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ('["a", "b"]', ("a", "b")),
        ("['a', \"it's\"]", ("a", "it's")),
        (["a", "a"], ("a",)),
        (None, ()),
        ("[]", ()),
        ("null", ()),
    ],
)
def test_names_are_decoded(value: Any, names: tuple[str, ...]) -> None:
    assert names_of(value) == names


@pytest.mark.parametrize("value", ["a", "[a]", "{'a': 1}", "['a', 1]", "[" * 5000, 7, "f'{x}'"])
def test_what_is_no_list_of_texts_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"neither a JSON nor a Python list|not a list of texts"):
        names_of(value)
