"""Hand-made rows in the schema of each public set; their content is invented."""

import json
from typing import Any

FIX = (
    "diff --git a/pack/sums.py b/pack/sums.py\n--- a/pack/sums.py\n+++ b/pack/sums.py\n"
    "@@ -1,2 +1,2 @@\n def total(a, b):\n-    return a - b\n+    return a + b\n"
)
TESTS = (
    "diff --git a/tests/test_sums.py b/tests/test_sums.py\nnew file mode 100644\n--- /dev/null\n"
    "+++ b/tests/test_sums.py\n@@ -0,0 +1,2 @@\n+def test_adds():\n+    assert total(2, 3) == 5\n"
)
GO_TESTS = TESTS.replace("tests/test_sums.py", "pkg/sums_test.go")

SWE_BENCH: dict[str, Any] = {
    "repo": "owner/pack",
    "instance_id": "owner__pack-7",
    "base_commit": "a" * 40,
    "patch": FIX,
    "test_patch": TESTS,
    "problem_statement": "total() subtracts \u2013 na\u00efve",
    "hints_text": "",
    "created_at": "2025-01-01T00:00:00Z",
    "version": "1.0",
    "FAIL_TO_PASS": '["tests/test_sums.py::test_adds"]',
    "PASS_TO_PASS": "['tests/test_sums.py::test_zero', \"tests/test_sums.py::test_it's\"]",
    "environment_setup_commit": "b" * 40,
}
SWE_GYM = {
    **SWE_BENCH,
    "FAIL_TO_PASS": ["tests/test_sums.py::test_adds"],
    "PASS_TO_PASS": ["tests/test_sums.py::test_zero"],
}
SWE_REBENCH = {
    **SWE_GYM,
    "test_patch": GO_TESTS,
    "FAIL_TO_PASS": ["TestAdds"],
    "PASS_TO_PASS": ["TestZero"],
    "install_config": {
        "install": ["go mod download"],
        "test_cmd": ["go build ./...", "go test -v ./..."],
        "log_parser": "parse_log_gotest",
        "base_image_name": "go_1.22",
        "docker_specs": {"go_version": "1.22"},
    },
    "image_name": "swerebench/owner_pack:7",
}
SWE_SMITH: dict[str, Any] = {
    "instance_id": "owner__pack.abcd1234.func_basic__x1",
    "repo": "swesmith/owner__pack.abcd1234",
    "patch": FIX,
    "FAIL_TO_PASS": ["tests/test_sums.py::test_adds"],
    "PASS_TO_PASS": ["tests/test_sums.py::test_zero", "tests/test_other.py::test_x"],
    "image_name": "jyangballin/swesmith.x86_64.owner_1776_pack.abcd1234",
    "problem_statement": "total() is wrong",
}
R2E: dict[str, Any] = {
    "repo_name": "pack",
    "docker_image": "namanjain12/pack_final:" + "c" * 40,
    "commit_hash": "c" * 40,
    "parsed_commit_content": "{}",
    "execution_result_content": "{}",
    "expected_output_json": json.dumps(
        {"TestSums.test_adds": "PASSED", "TestSums.test_net": "FAILED", "test_zero": "PASSED"}
    ),
    "modified_files": ["pack/sums.py"],
    "modified_entity_summaries": [{"name": "total", "type": "function"}],
    "relevant_files": ["pack/sums.py"],
    "num_non_test_files": 1,
    "prompt": "long prompt",
    "problem_statement": "[ISSUE]\ntotal() subtracts\n[/ISSUE]",
}
NEMOTRON: dict[str, Any] = {
    "responses_create_params": {
        "input": [],
        "metadata": {
            "instance_id": "owner__pack-7",
            "base_commit": "a" * 40,
            "dataset_name": "SWE-Gym/SWE-Gym",
            "split": "train",
            "instance_dict": json.dumps(
                {k: v for k, v in SWE_GYM.items() if k not in ("instance_id", "base_commit")}
            ),
        },
    },
    "agent_ref": {"type": "responses_api_agents", "name": "swe_agents"},
}
MIMO_INSTANCE: dict[str, Any] = {
    "dataset_type": "opensource-code",
    "instance_id": "format-code-task-000123",
    "docker_image": "internal/registry/task:123",
    "cwd": "/testbed",
    "problem_statement": "total() subtracts",
    "test_patch": TESTS
    + "diff --git a/mimo_test_command.sh b/mimo_test_command.sh\nnew file mode 100755\n"
    "--- /dev/null\n+++ b/mimo_test_command.sh\n@@ -0,0 +1,2 @@\n+#!/bin/bash\n"
    "+python -m pytest tests/test_sums.py\n",
    "test_command": "bash /testbed/mimo_test_command.sh",
    "verifier_timeout_sec": 1800,
}


def mimo(**changes: Any) -> dict[str, Any]:
    return {
        "data_source": "mimo",
        "prompt": [{"role": "user", "content": "x"}],
        "reward_model": {"style": "rule", "ground_truth": ""},
        "extra_info": {"instance_json": json.dumps({**MIMO_INSTANCE, **changes}), "index": 0},
    }


PRO_V1: dict[str, Any] = {
    "repo": "owner/app",
    "instance_id": "instance_owner__app-" + "d" * 40 + "-vnan",
    "base_commit": "e" * 40,
    "patch": FIX,
    "test_patch": TESTS,
    "problem_statement": "total() subtracts",
    "requirements": "- total() adds",
    "interface": "No new interface",
    "repo_language": "python",
    "fail_to_pass": "['tests/test_sums.py::test_adds']",
    "pass_to_pass": "[]",
    "issue_specificity": "['bug']",
    "issue_categories": "['logic']",
    "before_repo_set_cmd": "git reset --hard\ngit checkout d -- tests/test_sums.py",
    "selected_test_files_to_run": '["tests/test_sums.py"]',
    "dockerhub_tag": "owner.app-d",
}
RUN_SCRIPT = "#!/bin/bash\r\nset -e\npytest -v ${1//,/ }\n"
PARSER = "import sys, json\n"
TASK_TOML = """version = "1.4"

[metadata]
difficulty = "hard"

[agent]
timeout_sec = 3000.0
network_mode = "no-network"

[verifier]
timeout_sec = 3000.0

[environment]
build_timeout_sec = 1800.0
docker_image = "ghcr.io/owner/pro:one"
cpus = 1
memory_mb = 4096
storage_mb = 10240
"""
PRO_V2_FILES = {
    "instruction.md": "total() subtracts \u2013 mend it\n",
    "task.toml": TASK_TOML,
    "environment/Dockerfile": "FROM ghcr.io/owner/pro:one\nWORKDIR /testbed\n",
    "solution/gold_patch.diff": FIX,
    "solution/solve.sh": "git apply gold_patch.diff\n",
    "tests/test.sh": "bash run_script.sh\n",
    "tests/run_script.sh": RUN_SCRIPT,
    "tests/parser.py": PARSER,
    "tests/config.json": json.dumps(
        {
            "repo": "owner/app",
            "fail_to_pass": "['tests/test_sums.py::test_adds']",
            "pass_to_pass": [],
            "selected_test_files_to_run": ["tests/test_sums.py"],
        }
    ),
    "tests/test_patch.patch": TESTS,
}
