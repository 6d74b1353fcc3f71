"""How a machine of a cluster is named."""

import pytest

from rlmix.core.errors import ConfigError
from rlmix.core.machine import Machine, find_machine

A = Machine(id="aa11bb22cc33", address="10.0.0.1", host="gpu-1")
B = Machine(id="aa11bb22dd44", address="10.0.0.2", host="gpu-2")
TWIN = Machine(id="ee55ff66", address="10.0.0.3", host="gpu-2")


@pytest.mark.parametrize("name", ["gpu-1", "10.0.0.1", "aa11bb22c", "aa11bb22cc33"])
def test_a_machine_is_found_by_host_address_or_the_start_of_its_id(name: str) -> None:
    assert find_machine(name, [A, B]) == A


def test_an_unknown_name_lists_the_machines_that_there_are() -> None:
    with pytest.raises(ConfigError) as caught:
        find_machine("gpu-9", [B, A])
    assert str(caught.value) == (
        "machine 'gpu-9': the cluster has none of that name; there are gpu-1 (10.0.0.1, aa11bb22), "
        "gpu-2 (10.0.0.2, aa11bb22); name one by host, address, or id (its first 8 characters are "
        "enough)"
    )
    # A start that is too short names nobody, also where only one begins so.
    with pytest.raises(ConfigError, match="none of that name"):
        find_machine("ee55", [A, TWIN])


def test_a_name_that_fits_several_machines_is_refused_with_their_addresses() -> None:
    with pytest.raises(ConfigError, match=r"2 machines of the cluster are called so: gpu-2 \(10"):
        find_machine("gpu-2", [A, B, TWIN])
    with pytest.raises(ConfigError, match="2 machines"):
        find_machine("aa11bb22", [A, B])
