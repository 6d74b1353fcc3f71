"""Any text survives encoding, and words, digits and signs never share a piece."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from rlmix.model.bundle import resolve_model
from rlmix.model.chat import ChatRenderer
from rlmix.model.tokenizer import SPECIAL_TOKENS, build_tokenizer, frequent_words


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    return ChatRenderer(resolve_model("bundled:tiny"))


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_round_trips(text):
    renderer = ChatRenderer(resolve_model("bundled:tiny"))
    ids = renderer.content_ids(text)
    assert renderer.content_text(ids) == text
    assert all(0 <= token < renderer.vocab_size for token in ids)


def test_the_name_of_a_special_token_in_tool_output_stays_plain_text(renderer):
    for token in SPECIAL_TOKENS:
        ids = renderer.content_ids(f"a {token} b")
        assert renderer.content_text(ids) == f"a {token} b"
        assert len(ids) > 4
        assert set(ids).isdisjoint(range(len(SPECIAL_TOKENS)))


def test_digits_go_one_by_one_and_words_keep_the_space_or_underscore_before_them():
    tokenizer: Tokenizer = build_tokenizer([" count", "count", "_items", " =", "sed"])
    assert tokenizer.encode("count_items = 127").tokens == [
        "count",
        "_items",
        " =",
        " ",
        "1",
        "2",
        "7",
    ]


def test_words_are_ranked_by_count_then_alphabet_and_rare_ones_are_left_out():
    texts = ["ab cd cd ef", "xy cd", "ab", "xy"]
    # " cd" three times, "ab" and "xy" twice each, " ef" once.
    assert frequent_words(texts, min_count=2) == [" cd", "ab", "xy"]


def test_the_vocabulary_of_the_bundle_is_small_and_its_words_are_single_tokens(renderer):
    assert renderer.vocab_size <= 768
    assert len(renderer.content_ids("sed -i '12s/</<=/' ")) <= 14
