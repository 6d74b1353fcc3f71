"""What leaves memory is found again, and what is forgotten is gone."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlmix.core.errors import ConfigError
from rlmix.router.dialogue import DialogueBook, digest_of
from rlmix.router.sessions import SessionRow, SessionTable
from rlmix.router.store import SessionStore


class Replica:
    def __init__(self, name):
        self.name = name
        self.num_sessions = 0


def make_table(store, **limits):
    return SessionTable(ledger=store, **{"idle_expiry_s": 100.0, "max_sessions": 2, **limits})


def test_sessions_beyond_the_number_leave_memory_with_their_home_and_view(tmp_path):
    store = SessionStore(tmp_path / "s.sqlite")
    table, home = make_table(store), Replica("a")
    for number in range(5):
        session = table.open(f"s{number}", now_s=number)
        table.settle(session, home)
        session.view, session.moves = "fp8", number
        table.record(session)
    assert (len(table), table.num_spilled, home.num_sessions) == (2, 3, 2)
    back = table.open("s1", now_s=9.0)
    assert (back.home, back.home_name, back.view, back.moves) == (None, "a", "fp8", 1)
    table.settle(back, home)
    assert (back.home_name, home.num_sessions) == ("", 2)
    assert table.release("s0")  # spilled, and still known
    assert not table.release("s0")
    assert table.open("s0", now_s=10.0).home_name == ""
    store.close()


def test_a_new_process_finds_the_rows_of_the_one_before(tmp_path):
    path = tmp_path / "s.sqlite"
    store = SessionStore(path)
    row = SessionRow(session_id="s", home="a", view="bf16", moves=2)
    store.write(row)
    store.append_turn("s", 0, b"{}")
    again = SessionStore(path)  # The first was never closed, as when it was killed.
    assert again.find("s") == row
    assert list(again.turns("s")) == [b"{}"]
    again.expire(older_than_s=60.0)
    assert again.find("s") == row
    again.expire(older_than_s=-1.0)
    assert again.find("s") is None
    assert list(again.turns("s")) == []


def test_a_file_that_is_no_store_is_refused_with_what_to_do(tmp_path):
    path = tmp_path / "s.sqlite"
    path.write_bytes(b"not a database, and long enough to be looked at" * 40)
    with pytest.raises(ConfigError, match="give a folder that can be written to"):
        SessionStore(path)


def test_a_dialogue_that_left_memory_is_read_back_with_its_ids():
    store = SessionStore(None)
    book = DialogueBook(store)
    dialogue = book.open("s")
    for number, (appended, sampled) in enumerate([([1, 2], [3]), ([4], [5, 6])]):
        book.add_turn(
            "s", dialogue, appended=appended, is_new_segment=number == 0,
            digest=digest_of([number], None), length=2 * number + 2, ended_with_stop=True,
            record={"output_ids": sampled},
        )  # fmt: skip
    book.forget("s")
    assert len(book) == 0
    back = book.open("s")
    assert back is not dialogue
    assert back.ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert back.continues(digest_of([1], None), 4)
    assert not back.continues(digest_of([0], None), 4)
    assert (back.segment, back.num_turns) == (0, 2)
    assert book.trajectory("s")["segments"] == [
        {
            "prompt_ids": [1, 2],
            "turns": [
                {"observation_ids": [], "output_ids": [3]},
                {"observation_ids": [4], "output_ids": [5, 6]},
            ],
        }
    ]
    store.close()


def test_little_memory_holds_few_dialogues():
    store = SessionStore(None)
    book = DialogueBook(store, max_bytes=400)
    for number in range(100):
        dialogue = book.open(f"s{number}")
        book.add_turn(
            f"s{number}", dialogue, appended=[1] * 9, is_new_segment=True, digest=b"", length=1,
            ended_with_stop=False, record={"output_ids": [2]},
        )  # fmt: skip
    assert len(book) <= 65  # Below 65 the sum is not taken.
    assert book.open("s0").ids.tolist() == [1] * 9 + [2]
    store.close()


def set_age(store, session_id, number, age_s):
    store._db.execute(
        "UPDATE turns SET seen_s = seen_s - ? WHERE id = ? AND number = ?",
        (age_s, session_id, number),
    )


def test_a_session_that_goes_on_keeps_its_first_turns_and_its_row(tmp_path):
    store = SessionStore(tmp_path / "s.sqlite")
    for number in range(3):
        store.append_turn("long", number, b"%d" % number)
    store.append_turn("over", 0, b"x")
    set_age(store, "long", 0, 1000.0)
    set_age(store, "long", 1, 500.0)
    set_age(store, "over", 0, 1000.0)
    store.expire(older_than_s=100.0)
    assert list(store.turns("long")) == [b"0", b"1", b"2"]  # a part would be no trajectory
    assert list(store.turns("over")) == []
    # The row of a session that never moves is written again while it is used.
    table, home = make_table(store), Replica("a")
    session = table.open("s", now_s=0.0)
    table.settle(session, home)
    store._db.execute("UPDATE sessions SET seen_s = seen_s - 1000.0")
    table.touch(session, now_s=99.0)
    table.touch(session, now_s=101.0)
    store.expire(older_than_s=100.0)
    assert store.find("s") is not None
    store.close()


def test_a_clock_that_is_set_forward_makes_nothing_old(tmp_path, monkeypatch):
    store = SessionStore(tmp_path / "s.sqlite")
    store.append_turn("s", 0, b"x")
    true_time = time.time
    monkeypatch.setattr(time, "time", lambda: true_time() + 86_400.0)
    store.expire(older_than_s=3_600.0)
    assert list(store.turns("s")) == [b"x"]
    store.close()


def test_a_killed_process_without_a_folder_of_its_own_leaves_no_file(tmp_path: Path) -> None:
    code = (
        "import os; from rlmix.router.store import SessionStore; "
        "from rlmix.router.sessions import SessionRow; store = SessionStore(None); "
        "[store.write(SessionRow(session_id=f's{i}', home='a', view='', moves=0)) "
        "for i in range(20_000)]; assert store.num_bytes > 100_000; os.kill(os.getpid(), 9)"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path), "SQLITE_TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, timeout=60)
    assert done.returncode == -9
    assert list(tmp_path.iterdir()) == []
