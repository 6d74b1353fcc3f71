"""The token side of an OpenAI-style session: ids only grow, and every turn is written down.

A request that continues what the session has said and heard appends to its ids; any other starts a
new segment. Invariant: within a segment each prompt is the one before, the ids sampled then, and
new ids; so the turns can be trained on exactly as they were sampled.
"""

import asyncio
import hashlib
import time
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import orjson

from rlmix.router.store import SessionStore

MAX_IDS_BYTES = 512 << 20
"""Of all dialogues in memory; the least recently used leave it and are read back when needed."""


class Dialogue:
    """One session's current segment. Only the ids and a digest of the conversation are held."""

    def __init__(self) -> None:
        self.segment = -1
        self.num_turns = 0
        self.ids = array("i")
        self.length = 0
        """Messages (or characters) that the ids stand for."""
        self.digest = b""
        self.ended_with_stop = False
        self.seen_s = time.monotonic()
        self.lock = asyncio.Lock()

    def continues(self, digest: bytes, length: int) -> bool:
        """A conversation whose first `length` parts have this digest goes on from here."""
        return self.segment >= 0 and length == self.length and digest == self.digest


class DialogueBook:
    """All dialogues, in memory or in the store."""

    def __init__(self, store: SessionStore, *, max_bytes: int = MAX_IDS_BYTES) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._held: OrderedDict[str, Dialogue] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def open(self, session_id: str) -> Dialogue:
        dialogue = self._held.get(session_id)
        if dialogue is None:
            dialogue = self._held[session_id] = self._read(session_id)
        self._held.move_to_end(session_id)
        dialogue.seen_s = time.monotonic()
        self._spill()
        return dialogue

    def holds(self, session_id: str, dialogue: Dialogue) -> bool:
        """False when the session was forgotten since; one that is locked is never spilled."""
        return self._held.get(session_id) is dialogue

    def add_turn(
        self,
        session_id: str,
        dialogue: Dialogue,
        *,
        appended: Sequence[int],
        is_new_segment: bool,
        digest: bytes,
        length: int,
        ended_with_stop: bool,
        record: dict[str, Any],
    ) -> None:
        """Write a turn down and go on from it.

        Args:
            appended: ids that came before the sampled ones: the whole prompt in a new segment.
            digest, length: of the conversation with this turn's answer.
            record: what is told of the turn, `output_ids` among it.
        """
        if is_new_segment:
            dialogue.segment += 1
            dialogue.ids = array("i")
        dialogue.ids.extend(appended)
        dialogue.ids.extend(record["output_ids"])
        dialogue.digest, dialogue.length = digest, length
        dialogue.ended_with_stop = ended_with_stop
        row = {
            **record,
            "segment": dialogue.segment,
            "appended_ids": list(appended),
            "digest": digest.hex(),
            "length": length,
            "ended_with_stop": ended_with_stop,
        }
        self._store.append_turn(session_id, dialogue.num_turns, orjson.dumps(row))
        dialogue.num_turns += 1

    def forget(self, session_id: str) -> None:
        self._held.pop(session_id, None)

    def forget_idle(self, idle_s: float) -> None:
        limit_s = time.monotonic() - idle_s
        for session_id in [s for s, d in self._held.items() if d.seen_s < limit_s]:
            if not self._held[session_id].lock.locked():
                del self._held[session_id]

    def trajectory(self, session_id: str) -> dict[str, Any] | None:
        """All turns by segment; None when the session has none."""
        segments: list[dict[str, Any]] = []
        for body in self._store.turns(session_id):
            row = orjson.loads(body)
            for key in ("digest", "length", "ended_with_stop"):
                del row[key]
            segment, appended = row.pop("segment"), row.pop("appended_ids")
            if segment == len(segments):
                segments.append({"prompt_ids": appended, "turns": []})
                appended = []
            segments[segment]["turns"].append({"observation_ids": appended, **row})
        if not segments:
            return None
        num_turns = sum(len(segment["turns"]) for segment in segments)
        return {"session_id": session_id, "num_turns": num_turns, "segments": segments}

    def _read(self, session_id: str) -> Dialogue:
        dialogue = Dialogue()
        for body in self._store.turns(session_id):
            row = orjson.loads(body)
            if row["segment"] != dialogue.segment:
                dialogue.segment, dialogue.ids = row["segment"], array("i")
            dialogue.ids.extend(row["appended_ids"])
            dialogue.ids.extend(row["output_ids"])
            dialogue.digest = bytes.fromhex(row["digest"])
            dialogue.length = row["length"]
            dialogue.ended_with_stop = row["ended_with_stop"]
            dialogue.num_turns += 1
        return dialogue

    def _spill(self) -> None:
        held = sum(len(d.ids) for d in self._held.values()) * 4 if len(self._held) > 64 else 0
        for session_id in list(self._held):
            if held <= self._max_bytes:
                return
            dialogue = self._held[session_id]
            if not dialogue.lock.locked():
                held -= len(dialogue.ids) * 4
                del self._held[session_id]


def digest_of(parts: Sequence[Any], context: Any) -> bytes:
    """Of a conversation's parts in order, and of what else its ids depend on (tools)."""
    document = orjson.dumps([context, *parts], option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(document, digest_size=16).digest()
