"""Named arrays and a small JSON head in one block of bytes: how recorded tokens travel.

Layout, little-endian: magic, layout version, two lengths and a checksum (`_HEADER`); then JSON
`{"meta": ..., "arrays": [[name, dtype, shape], ...]}`; then the arrays in that order. Head and
arrays are padded to 8 bytes, so that the reader's arrays are aligned views of what it received.
Invariant: a frame that was cut, lengthened or changed anywhere is an error, never other numbers.
"""

import math
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from rlmix.core.errors import EngineError

FRAME_VERSION = 1
"""Of the layout; a reader refuses every other."""

_MAGIC = b"RLMX"
_HEADER = struct.Struct("<4sIIQI")
"""Magic, version, bytes of the head, bytes of the arrays, CRC-32 of everything behind."""
_ALIGNMENT = 8
DTYPES = ("<i4", "<f4", "<i2", "|u1")


def encode_frame(meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
    """One frame. `arrays` may be int32, float32, int16 or uint8, of any shape."""
    parts: list[bytes] = []
    table = []
    for name, values in arrays.items():
        dtype = values.dtype.newbyteorder("<").str
        assert dtype in DTYPES, f"{name}: {dtype}"
        table.append([name, dtype, values.shape])
        parts.append(_padded(values.astype(dtype, copy=False).tobytes()))
    head = _padded(orjson.dumps({"meta": meta, "arrays": table}), fill=b" ")
    body = b"".join((head, *parts))
    header = _HEADER.pack(_MAGIC, FRAME_VERSION, len(head), len(body) - len(head), zlib.crc32(body))
    return header + body


def decode_frame(raw: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Meta and arrays of a frame; the arrays are read-only views of `raw`.

    Raises:
        EngineError: not a frame, of another layout version, or not the bytes that were sent.
    """
    try:
        return _decode(raw)
    except ValueError as error:
        raise EngineError(f"engine: binary answer of {len(raw)} bytes: {error}") from error


def _decode(raw: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    if len(raw) < _HEADER.size:
        raise ValueError(f"shorter than its header of {_HEADER.size}")
    magic, version, head_bytes, array_bytes, checksum = _HEADER.unpack_from(raw)
    if magic != _MAGIC:
        raise ValueError(f"starts with {magic!r}, not {_MAGIC!r}")
    if version != FRAME_VERSION:
        raise ValueError(
            f"layout version {version}, this reader knows {FRAME_VERSION}; engine and client must "
            "be of one release"
        )
    expected = _HEADER.size + head_bytes + array_bytes
    if len(raw) != expected:
        raise ValueError(f"its header announces {expected}")
    if zlib.crc32(memoryview(raw)[_HEADER.size :]) != checksum:
        raise ValueError("the checksum differs, so it was changed on its way")
    start = _HEADER.size + head_bytes
    head = orjson.loads(memoryview(raw)[_HEADER.size : start])
    if not isinstance(head, dict) or not isinstance(head.get("meta"), dict):
        raise ValueError("its head has no meta object")
    arrays: dict[str, np.ndarray] = {}
    for name, dtype, shape in _table(head):
        size = math.prod(shape)
        end = start + size * np.dtype(dtype).itemsize
        if end > len(raw):
            raise ValueError(f"array {name} of shape {shape} reaches beyond the end")
        arrays[name] = np.frombuffer(raw, dtype=dtype, count=size, offset=start).reshape(shape)
        start = end + (-end) % _ALIGNMENT
    if start != len(raw):
        raise ValueError(f"its arrays end after {start} bytes")
    return head["meta"], arrays


def _table(head: Mapping[str, Any]) -> list[tuple[str, str, list[int]]]:
    """The announced arrays, each entry checked."""
    entries = head.get("arrays")
    if not isinstance(entries, list):
        raise ValueError("its head has no list of arrays")
    for entry in entries:
        is_entry = isinstance(entry, list) and len(entry) == 3
        if not is_entry or not isinstance(entry[2], list) or entry[1] not in DTYPES:
            raise ValueError(f"array entry {entry!r} is not [name, dtype, shape]")
        if not all(type(length) is int and length >= 0 for length in entry[2]):
            raise ValueError(f"array {entry[0]} has shape {entry[2]}")
    return [(str(name), dtype, shape) for name, dtype, shape in entries]


def _padded(data: bytes, *, fill: bytes = b"\0") -> bytes:
    return data + fill * (-len(data) % _ALIGNMENT)
