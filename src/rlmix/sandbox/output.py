"""Bounded collection of a command's output, and its conversion to text for a model.

Invariant: memory is bounded by twice the limit, however much a command prints.
"""

_CONTROL = {code: None for code in (*range(32), 127) if code not in (9, 10)}
"""Control characters other than tab and newline mean nothing to a chat template."""
_BYTES_PER_CHAR = 4
"""UTF-8's longest character."""


class OutputRing:
    """Keeps the first and the last bytes written to it, and counts the rest."""

    def __init__(self, limit_chars: int) -> None:
        self._limit_chars = limit_chars
        self._half_bytes = max(1, limit_chars // 2) * _BYTES_PER_CHAR
        self._head = bytearray()
        self._tail = bytearray()
        self.total_bytes = 0

    def write(self, data: bytes) -> None:
        self.total_bytes += len(data)
        room = self._half_bytes - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data[-self._half_bytes :]
            if len(self._tail) > 2 * self._half_bytes:
                del self._tail[: -self._half_bytes]

    def text(self) -> tuple[str, bool]:
        """(readable text of at most the limit plus a marker line, whether anything was cut)."""
        return self._cut(bytes(self._head), bytes(self._tail[-self._half_bytes :]))

    def _cut(self, head: bytes, tail: bytes) -> tuple[str, bool]:
        if len(head) + len(tail) == self.total_bytes:
            whole = readable(head + tail)
            if len(whole) <= self._limit_chars:
                return whole, False
            first, last = whole, whole
        else:
            first, last = readable(_whole_end(head)), readable(_whole_start(tail))
        half = self._limit_chars // 2
        kept_head, kept_tail = first[:half], last[max(0, len(last) - half) :]
        cut = self.total_bytes - len(kept_head.encode()) - len(kept_tail.encode())
        return f"{kept_head}\n[{max(cut, 1)} bytes cut]\n{kept_tail}", True


def readable(data: bytes) -> str:
    """Bytes as text: undecodable ones replaced, control characters dropped."""
    return data.decode("utf-8", errors="replace").translate(_CONTROL)


def _whole_end(data: bytes) -> bytes:
    """Without the start of a character whose end is missing."""
    for back in range(1, min(_BYTES_PER_CHAR, len(data)) + 1):
        byte = data[-back]
        if byte < 0x80:
            return data
        if byte >= 0xC0:
            size = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data[:-back] if size > back else data
    return data


def _whole_start(data: bytes) -> bytes:
    """Without the end of a character whose start is missing."""
    start = 0
    while start < min(_BYTES_PER_CHAR - 1, len(data)) and 0x80 <= data[start] < 0xC0:
        start += 1
    return data[start:]
