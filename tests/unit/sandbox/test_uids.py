import pytest

from rlmix.core.errors import SandboxError
from rlmix.sandbox.uids import NUM_PER_WORKER, UidPool, UidRange, uid_range

WHOLE_MACHINE = "         0          0 4294967295\n"


def test_two_workers_draw_from_different_ranges() -> None:
    first, second = uid_range(WHOLE_MACHINE, pid=100), uid_range(WHOLE_MACHINE, pid=101)
    assert first == UidRange(first=(1 << 30) + 100 * 1024, count=1024)
    assert second is not None
    assert second.first == first.first + NUM_PER_WORKER


def test_a_container_with_65536_ids_falls_back_to_nobody() -> None:
    assert uid_range("0 100000 65536\n", pid=1) == UidRange(first=65534, count=1)


def test_a_container_with_one_id_has_none_to_give() -> None:
    assert uid_range("0 1000 1\n", pid=1) is None


def test_live_sandboxes_never_share_an_id_and_ended_ones_return_theirs() -> None:
    pool = UidPool(UidRange(first=7000, count=2))
    first, second = pool.take(), pool.take()
    assert {first, second} == {7000, 7001}
    with pytest.raises(SandboxError, match=r"lower session\.concurrency"):
        pool.take()
    pool.give_back(first)
    assert pool.take() == first


def test_without_ids_everybody_keeps_the_workers() -> None:
    pool = UidPool(None)
    assert not pool.drops
    assert pool.take() is None
