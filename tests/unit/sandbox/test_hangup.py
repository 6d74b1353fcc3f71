"""A run ignores the loss of its terminal; what runs in its sandboxes behaves as anywhere else."""

import signal

import pytest

from .conftest import Lab


@pytest.fixture(scope="module", autouse=True)
def ignored() -> object:
    """As the driver does before it starts anything; `lab` is made after it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_program_in_a_sandbox_dies_of_a_hangup(ignored: object, lab: Lab) -> None:
    commands = (
        "(sh -c 'kill -HUP $$; printf al; echo ive'); echo $?",
        "grep SigIgn /proc/self/status",
    )
    hung_up, ignoring = lab.run(*commands)
    assert "alive" not in hung_up.output
    assert hung_up.output.split()[-1] == str(128 + signal.SIGHUP)
    # The first bit is that of signal 1.
    assert int(ignoring.output.split()[-1], 16) & 1 == 0
