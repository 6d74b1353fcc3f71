"""From the plan's command to the process of a real server: words, environment, keys, read-back."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlmix.core.errors import LaunchError
from rlmix.engine.sglang import serve
from rlmix.engine.sglang.environment import (
    is_being_made,
    is_runnable,
    library_path,
    sglang_python,
)
from rlmix.engine.sglang.launch import flags_of, start_command, start_environment
from rlmix.engine.sglang.readback import compare, numerics_of

ARGV = (
    sys.executable, "-m", "sglang.launch_server", "--model-path", "{model_path}",
    "--port", "{port}", "--device", "cpu", "--dtype", "bfloat16", "--tp-size", "1",
    "--attention-backend", "torch_native", "--context-length", "384", "--enable-metrics",
    "--max-running-requests", "8",
)  # fmt: skip
INFO: dict[str, Any] = {
    "version": "0.5.23", "device": "cpu", "dtype": "bfloat16", "tp_size": 1,
    "attention_backend": "torch_native", "context_length": 384, "quantization": None,
    "moe_runner_backend": "auto", "trust_remote_code": False, "max_total_num_tokens": 6144,
}  # fmt: skip
LOADS: dict[str, Any] = {
    "accelerator": None, "num_accelerators": 1, "loads": [{"max_running_requests": 8}],
}  # fmt: skip


def read_back(info: dict[str, Any] | None = None, loads: dict[str, Any] | None = None, **kw: Any):
    return compare(
        kw.get("argv", ARGV),
        {**INFO, **(info or {})},
        {**LOADS, **(loads or {})},
        accelerator=kw.get("accelerator", "cpu"),
        version="0.5.23",
    )


def test_the_started_program_is_the_planned_one_with_our_file_in_place_of_the_module() -> None:
    command = start_command(ARGV)
    assert command[:3] == [sys.executable, "-P", serve.__file__]
    # The system chooses the port on the machine that serves; everything else is as planned.
    assert command[3:] == ["0" if word == "{port}" else word for word in ARGV[3:]]


def test_a_missing_interpreter_is_told_with_the_script_that_makes_it() -> None:
    with pytest.raises(LaunchError, match=r"run scripts/sglang-env here, or set sglang\.python"):
        start_command(("/no/such/python", *ARGV[1:]))


def test_keys_are_in_the_environment_and_not_in_the_command(tmp_path: Path) -> None:
    env = start_environment(
        ARGV, ready_path=tmp_path / "r", api_key="for-all", admin_key="for-us", environ={}
    )
    assert env[serve.API_KEY_VARIABLE] == "for-all"
    assert env[serve.ADMIN_KEY_VARIABLE] == "for-us"
    assert env[serve.READY_VARIABLE] == str(tmp_path / "r")
    assert not {"for-all", "for-us"} & set(start_command(ARGV))
    # Without keys the server asks for none, and no variable says otherwise.
    bare = start_environment(
        ARGV, ready_path=tmp_path / "r", api_key=None, admin_key=None, environ={}
    )
    assert set(bare) == {serve.READY_VARIABLE}


def test_only_a_server_on_the_cpu_gets_the_stand_in_for_the_driver(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    stand_in = tmp_path / "no-gpu-driver"
    stand_in.mkdir()
    assert library_path(python, {}) == {"LD_LIBRARY_PATH": str(stand_in)}
    assert library_path(python, {"LD_LIBRARY_PATH": "/x"}) == {"LD_LIBRARY_PATH": f"{stand_in}:/x"}

    def added(argv: tuple[str, ...]) -> dict[str, str]:
        return start_environment(
            argv, ready_path=tmp_path / "r", api_key=None, admin_key=None, environ={}
        )

    on_cpu = (str(python), *ARGV[1:])
    on_gpu = tuple("cuda" if word == "cpu" else word for word in on_cpu)
    assert added(on_cpu)["LD_LIBRARY_PATH"] == str(stand_in)
    assert "LD_LIBRARY_PATH" not in added(on_gpu)


def test_the_environment_is_the_named_one_the_variable_s_or_the_script_s(tmp_path: Path) -> None:
    def found(named: str | None, **environ: str) -> Path:
        return sglang_python(named, version="0.5.23", environ=environ)

    assert found("/opt/sglang/bin/python", RLMIX_SGLANG_ENV="/other") == Path(
        "/opt/sglang/bin/python"
    )
    assert found(None, RLMIX_SGLANG_ENV="/other") == Path("/other/bin/python")
    assert found(None) == Path.home() / ".cache/rlmix/sglang-0.5.23/bin/python"
    assert found("~/x/python") == Path.home() / "x/python"
    assert not is_runnable(tmp_path)
    # The script locks first and stamps last; an environment of your own has neither.
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    assert not is_being_made(python)
    (tmp_path / "env.lock").touch()
    assert is_being_made(python)
    (tmp_path / "env" / ".rlmix-sglang").touch()
    assert not is_being_made(python)
    assert is_runnable(Path(sys.executable))


def test_flags_are_read_with_their_values() -> None:
    assert flags_of(["--a", "1", "--b", "--c", "x", "y", "--d"]) == {
        "a": "1", "b": True, "c": "x", "d": True,
    }  # fmt: skip


def test_a_server_as_planned_has_no_difference_and_what_it_hides_is_listed() -> None:
    found = read_back()
    assert found.differences == ()
    assert found.unverified == ("accelerator=cpu",)
    assert read_back({"dtype": "auto", "attention_backend": None}).unverified == (
        "dtype=bfloat16",
        "attention-backend=torch_native",
        "accelerator=cpu",
    )


@pytest.mark.parametrize(
    ("info", "loads", "said"),
    [
        ({"version": "0.5.22"}, {}, "version is '0.5.22', the plan says '0.5.23'"),
        ({"dtype": "float16"}, {}, "dtype is 'float16', the plan says 'bfloat16'"),
        ({"quantization": "fp8"}, {}, "quantization is 'fp8', the plan has none"),
        ({"context_length": 256}, {}, "context-length is 256, the plan says '384'"),
        ({"trust_remote_code": True}, {}, "trust_remote_code is on"),
        ({"max_total_num_tokens": 300}, {}, "its cache holds 300 tokens"),
        ({}, {"num_accelerators": 2}, "accelerators is 2, the plan says '1'"),
        (
            {},
            {"loads": [{"max_running_requests": 4}]},
            "max_running_requests is 4, the plan says 8",
        ),
        ({}, {"accelerator": "NVIDIA H100 80GB HBM3"}, "accelerator is 'NVIDIA H100 80GB HBM3'"),
    ],
)
def test_every_difference_is_told_with_both_values(
    info: dict[str, Any], loads: dict[str, Any], said: str
) -> None:
    (line,) = read_back(info, loads).differences
    assert line.startswith(said)


def test_the_chip_is_recognised_by_its_marketing_name() -> None:
    found = read_back({}, {"accelerator": "NVIDIA H100 80GB HBM3"}, accelerator="h100")
    assert (found.differences, found.unverified) == ((), ())


def test_kv_and_quantisation_have_two_names_of_one_setting() -> None:
    argv = (*ARGV, "--kv-cache-dtype", "bf16")
    assert read_back({"kv_cache_dtype": "bfloat16"}, argv=argv).differences == ()
    (line,) = read_back({"kv_cache_dtype": "fp8_e4m3"}, argv=argv).differences
    assert line == "kv-cache-dtype is 'fp8_e4m3', the plan says 'bf16'"


def test_the_numerics_key_of_a_real_server_says_so_and_names_its_kernels() -> None:
    expected = {
        "accelerator": "cpu", "weights": "bf16", "view": "bf16", "activations": "bf16",
        "kv": "bf16", "attention": "torch_native", "linear_attention": "none", "state": "none",
        "moe": "auto", "tp": "1", "version": "0.5.23",
    }  # fmt: skip
    key = numerics_of(expected, {**INFO, "moe_runner_backend": "triton"})
    assert key.compact().startswith("cpu/bf16/a=bf16/kv=bf16/attn=torch_native")
    assert key.compact().endswith("/sglang-0.5.23/real")
    assert key.moe == "triton"
    # `auto` says nothing, so the plan's word stands.
    assert numerics_of(expected, INFO).moe == "auto"
    # An engine of another version is another sampler, whatever else is the same.
    upgraded = numerics_of(expected, {**INFO, "version": "0.5.24", "moe_runner_backend": "triton"})
    assert upgraded.compact() == key.compact().replace("sglang-0.5.23", "sglang-0.5.24")
    assert upgraded.compact() != key.compact()
    # Experts alone in NVFP4 are other numbers than all matrices.
    fp4 = numerics_of({**expected, "weights": "nvfp4", "view": "nvfp4:experts"}, INFO)
    assert fp4.compact().startswith("cpu/nvfp4:experts/a=bf16")


def test_serve_knows_the_value_of_a_flag_and_finds_a_free_port() -> None:
    assert serve.value_of(["--port", "0", "--host", "::1"], "--host") == "::1"
    assert serve.value_of(["--port"], "--port") is None
    assert 1024 <= serve.free_port("127.0.0.1") < 65536


def test_serve_imports_nothing_of_rlmix_since_its_environment_has_none(tmp_path: Path) -> None:
    """It is started by path; only SGLang's own absence ends it, and after the keys were taken."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-P", serve.__file__, "--port", "0"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert "No module named 'sglang'" in done.stderr
    text = Path(serve.__file__).read_text()
    assert "from rlmix" not in text
    assert "import rlmix" not in text


def test_the_ready_file_is_whole_from_the_first_moment(tmp_path: Path) -> None:
    serve._write(tmp_path / "ready.json", {"url": "http://127.0.0.1:1", "pid": 7})
    assert json.loads((tmp_path / "ready.json").read_text())["pid"] == 7
    assert [path.name for path in tmp_path.iterdir()] == ["ready.json"]
