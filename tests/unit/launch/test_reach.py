"""An address where no cluster is costs no minutes, and is said in one sentence."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlmix.config.compose import load_config
from rlmix.core.errors import ConfigError
from rlmix.launch.reach import unreachable
from rlmix.loop.preflight import launch_faults


@pytest.fixture
def closed_port() -> Iterator[int]:
    """Taken, and nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def test_nobody_at_the_address_is_told_and_what_may_be_there_is_not(closed_port: int) -> None:
    said = unreachable(f"127.0.0.1:{closed_port}", {})
    assert said.startswith(f"launch.address=127.0.0.1:{closed_port}: nothing answers there (Conn")
    assert "launch.address=null" in said
    assert "\n" not in said
    said = unreachable("auto", {"RAY_ADDRESS": f"127.0.0.1:{closed_port}"})
    assert said.startswith(f"launch.address=auto: RAY_ADDRESS=127.0.0.1:{closed_port}: nothing")
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert unreachable(f"127.0.0.1:{server.getsockname()[1]}", {}) == ""


def test_a_number_that_is_no_port_is_not_taken_for_the_port_of_somebody_else() -> None:
    """99,999 is 34,463 modulo 65,536, and a resolver may go there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        beyond = server.getsockname()[1] + 65_536
        said = unreachable("auto", {"RAY_ADDRESS": f"127.0.0.1:{beyond}"})
    assert said.startswith(
        f"launch.address=auto: RAY_ADDRESS=127.0.0.1:{beyond}: no port; a port is"
    )
    for port in ("0", "65536", "9" * 5000):
        assert "1 to 65535" in unreachable(f"127.0.0.1:{port}", {})


def test_auto_is_for_machines_that_belong_to_a_ray(tmp_path: Path) -> None:
    (tmp_path / "41").mkdir()
    (tmp_path / "41" / "comm").write_text("bash\n")
    said = unreachable("auto", {}, processes=tmp_path)
    assert said.startswith("launch.address=auto: this machine belongs to no Ray (no raylet")
    assert "launch.address=null" in said
    (tmp_path / "42").mkdir()
    (tmp_path / "42" / "comm").write_text("raylet\n")
    assert unreachable("auto", {}, processes=tmp_path) == ""
    assert unreachable("auto", {}, processes=tmp_path / "nothing like it") == ""


def test_a_run_is_refused_before_it_starts(closed_port: int) -> None:
    asked = ["launch=ray", "net.bind=node", f"launch.address=127.0.0.1:{closed_port}"]
    config = load_config("train", asked).config
    (line,) = launch_faults(config, {})
    assert "nothing answers there" in line


def test_doctor_says_so_at_once_and_without_words_of_ray(closed_port: int) -> None:
    """Ray alone tries for more than 100 s, and fills the terminal with its warnings."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    begun_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "rlmix", "doctor", "launch=ray", "net.bind=node",
         f"launch.address=127.0.0.1:{closed_port}"],
        env=environment, capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("error: launch.address=127.0.0.1:")
    assert "rpc_client" not in done.stderr
    assert time.monotonic() - begun_s < 60


@pytest.mark.parametrize(
    "address", ["local", "ray://10.0.0.1:10001", "10.0.0.1", "h:port", "h:99999", "h:0"]
)
def test_other_forms_of_an_address_are_refused(address: str) -> None:
    """`local` would start a Ray without a token; a client's address has no node here."""
    with pytest.raises(ConfigError, match="use auto, or HOST:PORT"):
        load_config("train", ["launch=ray", "net.bind=node", f"launch.address={address}"])
