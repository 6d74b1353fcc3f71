"""What every test may rely on, however the suite was started."""

import signal

import pytest

# A shell that starts the suite in the background makes it ignore SIGINT, and every child would
# inherit that; tests that interrupt a child need the usual disposition.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under `-n 2 --dist loadgroup` a file stays whole, and so do contract and e2e.

    Files share fixtures of module scope; the contract suite shares one real SGLang server, which
    takes gigabytes and must not be started in each process.
    """
    for item in items:
        folder = item.path.parent
        group = folder.name if folder.name in ("contract", "e2e") else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
