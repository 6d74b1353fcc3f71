"""The session table: exact ids, true counts, bounded memory."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from rlmix.router.sessions import SessionTable


@dataclass
class Replica:
    name: str
    num_sessions: int = 0


def make_table(*, idle_expiry_s=10.0, max_sessions=100) -> SessionTable[Replica]:
    return SessionTable(idle_expiry_s=idle_expiry_s, max_sessions=max_sessions)


def test_a_session_counts_at_its_home_and_only_there():
    table, a, b = make_table(), Replica("a"), Replica("b")
    session = table.open("s", now_s=0.0)
    table.settle(session, a)
    assert (a.num_sessions, b.num_sessions) == (1, 0)
    table.settle(session, b)
    assert (a.num_sessions, b.num_sessions) == (0, 1)
    assert table.release("s")
    assert (a.num_sessions, b.num_sessions) == (0, 0)
    assert not table.release("s")


def test_a_session_released_while_it_waited_for_a_place_never_counts():
    table, a = make_table(), Replica("a")
    session = table.open("s", now_s=0.0)
    table.release("s")
    table.settle(session, a)
    assert a.num_sessions == 0
    assert session.home is None


def test_idle_sessions_expire_and_busy_ones_do_not():
    table, a = make_table(idle_expiry_s=10.0), Replica("a")
    for i in range(3):
        table.settle(table.open(f"s{i}", now_s=float(i)), a)
    table.open("s1", now_s=1.0).in_flight = 1
    assert table.expire(now_s=9.9) == 0
    assert table.expire(now_s=30.0) == 2
    assert [session.session_id for session in table] == ["s1"]
    assert (a.num_sessions, table.num_expired) == (1, 2)


def test_a_session_in_use_moves_to_the_end_so_that_the_idle_are_found_first():
    table = make_table(idle_expiry_s=10.0)
    first = table.open("first", now_s=0.0)
    table.open("second", now_s=1.0)
    table.touch(first, now_s=8.0)
    assert table.expire(now_s=12.0) == 1
    assert [session.session_id for session in table] == ["first"]


def test_above_the_upper_number_the_longest_idle_is_forgotten():
    table, a = make_table(max_sessions=2), Replica("a")
    for i in range(3):
        session = table.open(f"s{i}", now_s=float(i))
        table.settle(session, a)
        session.in_flight = int(i == 0)
    assert [session.session_id for session in table] == ["s0", "s2"]
    assert (len(table), a.num_sessions, table.num_expired) == (2, 2, 1)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["open", "settle", "release", "expire", "busy", "idle"]),
            st.integers(0, 5),
            st.integers(0, 2),
        ),
        max_size=60,
    )
)
def test_counts_always_equal_the_number_of_sessions_at_home(steps):
    table = make_table(idle_expiry_s=3.0, max_sessions=4)
    replicas = [Replica(str(i)) for i in range(3)]
    for now_s, (what, number, home) in enumerate(steps):
        session_id = f"s{number}"
        if what == "release":
            table.release(session_id)
        elif what == "expire":
            table.expire(now_s=float(now_s))
        else:
            session = table.open(session_id, now_s=float(now_s))
            if what == "settle":
                table.settle(session, replicas[home])
            elif what in ("busy", "idle"):
                session.in_flight = int(what == "busy")
        homes = [session.home for session in table]
        assert [r.num_sessions for r in replicas] == [homes.count(r) for r in replicas]
        assert sum(session.in_flight == 0 for session in table) <= 5
