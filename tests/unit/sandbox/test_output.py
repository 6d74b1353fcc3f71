from hypothesis import given
from hypothesis import strategies as st

from rlmix.sandbox.output import OutputRing, readable


def written(limit: int, *chunks: bytes) -> tuple[str, bool]:
    ring = OutputRing(limit)
    for chunk in chunks:
        ring.write(chunk)
    return ring.text()


def test_short_output_is_whole() -> None:
    assert written(10, b"ab", b"cd\n") == ("abcd\n", False)


def test_long_output_keeps_head_and_tail_and_says_how_much_is_missing() -> None:
    text, cut = written(10, b"0123456789" * 100)
    assert cut
    assert text == "01234\n[990 bytes cut]\n56789"


def test_output_a_little_over_the_limit_is_cut_from_the_whole() -> None:
    assert written(4, b"abcdef") == ("ab\n[2 bytes cut]\nef", True)


def test_a_character_is_never_split_at_the_cut() -> None:
    # 8 bytes are kept on each side; the euro sign has 3, so neither side holds a whole number.
    text, cut = written(4, "€".encode() * 1000)
    assert cut
    assert "\ufffd" not in text
    assert text.startswith("€€\n[")
    assert text.endswith("]\n€€")


def test_endless_output_needs_bounded_memory() -> None:
    ring = OutputRing(100)
    for _ in range(1000):
        ring.write(b"y\n" * 4096)
    assert ring.total_bytes == 1000 * 8192
    assert len(ring._head) + len(ring._tail) <= 3 * 200


def test_control_characters_are_dropped_and_broken_bytes_replaced() -> None:
    assert readable(b"a\x00b\x1b[31m\tc\r\n\xff") == "ab[31m\tc\n\ufffd"


@given(st.lists(st.binary(max_size=40), max_size=20), st.integers(2, 30))
def test_the_text_never_exceeds_the_limit_plus_one_marker_line(
    chunks: list[bytes], limit: int
) -> None:
    text, cut = written(limit, *chunks)
    assert len(text) <= limit + (len("\n[000 bytes cut]\n") if cut else 0)
