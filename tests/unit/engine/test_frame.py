"""Bytes on the wire: what goes in comes out, and a damaged frame is an error."""

import struct
import zlib

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from rlmix.core.errors import EngineError
from rlmix.engine.frame import decode_frame, encode_frame

ARRAYS = {
    "ids": np.array([5, 6, 7], dtype=np.int32),
    "logprobs": np.array([-0.1, -2.5, 0.0], dtype=np.float32),
    "experts": np.arange(10, dtype=np.uint8).reshape(5, 1, 2),
}
FRAME = encode_frame({"id": "r1", "n": 3}, ARRAYS)
HEADER = struct.Struct("<4sIIQI")


def with_head(document, *, body=b"", version=1):
    """A frame with a right checksum around any head."""
    head = orjson.dumps(document)
    rest = head + body
    return HEADER.pack(b"RLMX", version, len(head), len(body), zlib.crc32(rest)) + rest


def test_meta_and_arrays_come_back_aligned_and_without_a_copy():
    meta, arrays = decode_frame(FRAME)
    assert meta == {"id": "r1", "n": 3}
    assert list(arrays) == ["ids", "logprobs", "experts"]
    for name, values in ARRAYS.items():
        assert arrays[name].dtype == values.dtype
        assert arrays[name].tolist() == values.tolist()
        assert not arrays[name].flags.owndata
        assert not arrays[name].flags.writeable
        assert arrays[name].ctypes.data % 4 == 0


def test_a_token_costs_its_bytes_and_a_turn_a_few_hundred_more():
    ids = np.zeros(1000, dtype=np.int32)
    assert len(encode_frame({}, {"ids": ids})) == 4000 + HEADER.size + 48


@settings(max_examples=50, deadline=None)
@given(
    arrays_of.arrays(np.float32, st.integers(0, 9), elements=st.floats(width=32, allow_nan=True)),
    arrays_of.arrays(np.int16, arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0)),
)
def test_any_array_comes_back_bit_for_bit(floats, shorts):
    _, arrays = decode_frame(encode_frame({}, {"a": floats, "b": shorts}))
    assert arrays["a"].tobytes() == floats.tobytes()
    assert arrays["b"].shape == shorts.shape
    assert arrays["b"].tobytes() == shorts.tobytes()


def test_every_cut_and_every_changed_bit_is_noticed():
    for end in range(len(FRAME)):
        with pytest.raises(EngineError, match=f"binary answer of {end} bytes"):
            decode_frame(FRAME[:end])
    for place in range(len(FRAME)):
        for bit in (1, 128):
            changed = bytearray(FRAME)
            changed[place] ^= bit
            with pytest.raises(EngineError):
                decode_frame(bytes(changed))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"text": ""}', "shorter than its header"),
        (b"x" * 64, "starts with b'xxxx', not b'RLMX'"),
        (with_head({}, version=2), "layout version 2, this reader knows 1"),
        (FRAME + b"12345678", "its header announces"),
        (with_head([1]), "no meta object"),
        (with_head({"meta": {}}), "no list of arrays"),
        (with_head({"meta": {}, "arrays": [["a", "<f8", [1]]]}), "is not .name, dtype, shape"),
        (with_head({"meta": {}, "arrays": [["a", "<i4", [-1]]]}), r"array a has shape \[-1\]"),
        (with_head({"meta": {}, "arrays": [["a", "<i4", [2**60]]]}), "reaches beyond the end"),
        (with_head({"meta": {}, "arrays": []}, body=b"12345678"), "its arrays end after"),
    ],
)
def test_what_is_not_a_frame_is_refused_in_one_sentence(raw, message):
    with pytest.raises(EngineError, match=message) as caught:
        decode_frame(raw)
    assert "\n" not in str(caught.value)
