"""What a scripted engine remembers of weights: a digest of each tensor, so that a checksum tells
whether all of an update arrived. No torch."""

import json
from collections.abc import Mapping
from pathlib import Path

import xxhash

LENGTH_BYTES = 8
"""A safetensors file begins with the length of its JSON head, little-endian."""


def folder_digests(folder: Path) -> dict[str, str]:
    """Digest of each tensor in a model folder; of its config.json when it has no weights."""
    digests: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        raw = file.read_bytes()
        start = LENGTH_BYTES + int.from_bytes(raw[:LENGTH_BYTES], "little")
        head = json.loads(raw[LENGTH_BYTES:start])
        for name, entry in head.items():
            if name != "__metadata__":
                first, end = entry["data_offsets"]
                digests[name] = digest(raw[start + first : start + end])
    config = folder / "config.json"
    if not digests and config.is_file():
        digests[config.name] = digest(config.read_bytes())
    return digests


def digest(raw: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(raw)


def checksum(digests: Mapping[str, str]) -> str:
    """One for all tensors."""
    return digest("".join(f"{name}={digests[name]};" for name in sorted(digests)).encode())
