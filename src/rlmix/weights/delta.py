"""The change from one safetensors file to the next, as bytes, and back.

Invariant: what `apply_file` writes has the bytes of the file that `encode_file` was given; the
caller compares the hash that it returns with the published one. A delta is made of two published
files of one view and is never quantised again.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
import zstandard

from rlmix.core.errors import WeightSyncError
from rlmix.weights import changes
from rlmix.weights.manifest import FileEntry, sync_path

MAGIC = b"rlmixd1\n"
SUFFIX = ".delta"


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPlace:
    """One tensor of a safetensors file."""

    name: str
    dtype: str
    begin: int
    """Byte offset in the file."""
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaFile:
    """An encoded file."""

    data: bytes
    num_elements: int
    """Of the data types that are coded by element; scales of other types are not counted."""
    num_changed: int


def read_header(path: Path) -> tuple[bytes, list[TensorPlace]]:
    """The file up to its first tensor, and its tensors by offset.

    Raises:
        WeightSyncError: no safetensors file.
    """
    try:
        with path.open("rb") as file:
            head = file.read(8)
            size = int.from_bytes(head, "little")
            if size > path.stat().st_size:
                raise ValueError(f"its header is said to have {size} bytes")
            text = file.read(size)
        document = json.loads(text)
        document.pop("__metadata__", None)
        places = [
            TensorPlace(
                name=name,
                dtype=entry["dtype"],
                begin=8 + size + entry["data_offsets"][0],
                end=8 + size + entry["data_offsets"][1],
            )
            for name, entry in document.items()
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightSyncError(f"weights: {path} is no safetensors file: {error}") from error
    return head + text, sorted(places, key=lambda place: (place.begin, place.end))


def encode_file(old: Path, new: Path) -> DeltaFile | None:
    """The change between two files; None when they do not hold the same tensors in the same
    places, so that the new one has to be published whole.

    Raises:
        WeightSyncError: one of them is no safetensors file.
    """
    old_header, places = read_header(old)
    new_header, new_places = read_header(new)
    if places != new_places:
        return None
    before, after = _mapped(old), _mapped(new)
    sections = [_compress(b"" if new_header == old_header else new_header)]
    num_elements = num_changed = 0
    for dtype, kind in changes.KINDS.items():
        words = [p for p in places if p.dtype == dtype]
        pairs = [(_words(before, p, kind), _words(after, p, kind)) for p in words]
        coded = changes.encode(pairs, kind)
        sections.append(coded.data if words else b"")
        num_elements += coded.num_elements
        num_changed += coded.num_changed
    rest = [p for p in places if p.dtype not in changes.KINDS]
    sections.append(
        b"".join(
            _framed(_compress(_xor_planes(before[p.begin : p.end], after[p.begin : p.end])))
            for p in rest
        )
    )
    data = MAGIC + b"".join(_framed(section) for section in sections)
    return DeltaFile(data=data, num_elements=num_elements, num_changed=num_changed)


def apply_file(old: Path, data: bytes, new: Path) -> FileEntry:
    """Write the new file and wait until it is on disk.

    Returns:
        Size and hash of what was written, for the caller to compare.
    Raises:
        WeightSyncError: the delta is damaged or belongs to another file.
    """
    if not data.startswith(MAGIC):
        raise WeightSyncError(f"weights: the delta of {old.name} is damaged: it has another start")
    header, places = read_header(old)
    before = _mapped(old)
    try:
        sections = changes.sections(data[len(MAGIC) :], 2 + len(changes.KINDS))
        changed_header = _decompress(sections[0])
    except (ValueError, zstandard.ZstdError) as error:
        raise WeightSyncError(f"weights: the delta of {old.name} is damaged: {error}") from error
    streams: dict[str, Iterator[np.ndarray]] = {}
    for (dtype, kind), section in zip(changes.KINDS.items(), sections[1:-1], strict=True):
        olds = [_words(before, p, kind) for p in places if p.dtype == dtype]
        if olds:
            streams[dtype] = changes.apply(olds, section, kind)
    rest = _pieces(sections[-1])
    digest, size = xxhash.xxh3_128(), 0
    with new.open("wb") as file:
        for block in _blocks(changed_header or header, before, places, streams, rest):
            digest.update(block)
            size += file.write(block)
    sync_path(new)
    return FileEntry(size_bytes=size, xxh3_128=digest.hexdigest())


def _blocks(
    header: bytes,
    before: np.ndarray,
    places: list[TensorPlace],
    streams: dict[str, Iterator[np.ndarray]],
    rest: Iterator[bytes],
) -> Iterator[bytes]:
    """The new file's bytes in order."""
    yield header
    try:
        for place in places:
            if place.dtype in streams:
                yield next(streams[place.dtype]).tobytes()
            else:
                yield _from_xor_planes(before[place.begin : place.end], next(rest))
    except StopIteration:
        raise WeightSyncError("weights: a delta holds fewer tensors than its base") from None
    except (ValueError, zstandard.ZstdError) as error:
        raise WeightSyncError(f"weights: a delta does not fit its base: {error}") from error


def _mapped(path: Path) -> np.ndarray:
    return np.memmap(path, dtype=np.uint8, mode="r")


def _words(mapped: np.ndarray, place: TensorPlace, kind: changes.Kind) -> np.ndarray:
    raw = mapped[place.begin : place.end]
    # A copy where the tensor does not start at a multiple of its width.
    return raw if kind.bits < 16 else np.frombuffer(raw.tobytes(), dtype="<u2")


def _xor_planes(old: np.ndarray, new: np.ndarray) -> bytes:
    """XOR of the bytes, fourth bytes together where they are float32."""
    width = 4 if len(old) % 4 == 0 else 1
    return changes.planes((old ^ new).view(f"<u{width}"))


def _from_xor_planes(old: np.ndarray, packed: bytes) -> bytes:
    width = 4 if len(old) % 4 == 0 else 1
    change = changes.from_planes(_decompress(packed), np.dtype(f"<u{width}"))
    return (old ^ change.view(np.uint8)).tobytes()


def _compress(raw: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=changes.ZSTD_LEVEL).compress(raw)


def _framed(section: bytes) -> bytes:
    return len(section).to_bytes(8, "little") + section


def _decompress(packed: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(packed)


def _pieces(section: bytes) -> Iterator[bytes]:
    place = 0
    while place < len(section):
        size = int.from_bytes(section[place : place + 8], "little")
        yield section[place + 8 : place + 8 + size]
        place += 8 + size
