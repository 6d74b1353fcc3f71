"""Whose key goes where."""

import orjson
import pytest

from rlmix.router.admin import parse_record
from rlmix.router.states import ReplicaState
from rlmix.router.upstream import ReplicaRecord


def record(**changes: str) -> ReplicaRecord:
    body = {
        "pool": "h100", "url": "http://10.0.0.7:30000", "numerics_key": "k", "speed": 1.0,
        "max_running": 8, "version": 0, "state": ReplicaState.READY.value, **changes,
    }  # fmt: skip
    return parse_record("h100-0", orjson.dumps(body), known=None)


def test_the_run_s_own_replicas_get_its_token() -> None:
    assert record().authorization("Bearer run", {}) == {"Authorization": "Bearer run"}
    assert record().authorization(None, {}) == {}


def test_a_server_of_somebody_else_gets_its_own_key_and_never_the_run_s() -> None:
    theirs = record(token_env="THEIR_KEY")
    assert theirs.authorization("Bearer run", {"THEIR_KEY": "theirs"}) == {
        "Authorization": "Bearer theirs"
    }
    # Unset: they ask for none, and are sent none.
    assert theirs.authorization("Bearer run", {}) == {}


def test_the_record_holds_the_variable_s_name_and_not_its_value() -> None:
    with pytest.raises(ValueError, match="token_env"):
        record(token_env=7)  # type: ignore[arg-type]
    assert record(token_env="THEIR_KEY").token_env == "THEIR_KEY"
