"""Servers on several machines: what they listen on and are called."""

import pytest

from rlmix.core.addresses import (
    NODE_VARIABLE,
    bind_address,
    is_loopback,
    meeting_address,
    reachable,
    with_host,
)

THERE = {NODE_VARIABLE: "10.0.0.7"}


@pytest.mark.parametrize(
    ("host", "is_local"),
    [("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("[::1]", True), ("localhost", True),
     ("0.0.0.0", False), ("10.0.0.7", False), ("node7", False), ("", False)],
)  # fmt: skip
def test_only_loopback_is_closed_to_other_machines(host: str, is_local: bool) -> None:
    assert is_loopback(host) is is_local


def test_node_is_the_machine_s_own_address_and_loopback_outside_a_cluster() -> None:
    argv = ("python", "--host", "node", "--pool", "node")
    assert with_host(argv, THERE) == ("python", "--host", "10.0.0.7", "--pool", "node")
    assert with_host(argv, {}) == ("python", "--host", "127.0.0.1", "--pool", "node")
    assert bind_address("127.0.0.1", THERE) == "127.0.0.1"
    assert bind_address("0.0.0.0", THERE) == "0.0.0.0"


def test_a_server_on_every_address_is_called_by_one_that_others_can_reach() -> None:
    assert reachable("http://0.0.0.0:31000", THERE) == "http://10.0.0.7:31000"
    assert reachable("http://[::]:31000", {NODE_VARIABLE: "fd00::7"}) == "http://[fd00::7]:31000"
    assert reachable("http://127.0.0.1:31000", THERE) == "http://127.0.0.1:31000"
    assert meeting_address("0.0.0.0", THERE) == "10.0.0.7"
    assert meeting_address("node", {}) == "127.0.0.1"
    assert meeting_address("10.0.0.9", THERE) == "10.0.0.9"
