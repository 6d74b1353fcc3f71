import numpy as np
import pytest
import torch

from rlmix.engine.embedded.kv import KvCache
from rlmix.engine.embedded.prefix import PrefixCache
from rlmix.engine.embedded.shape import ModelShape

SHAPE = ModelShape(
    vocab_size=100,
    hidden=8,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=4,
    num_experts=0,
    top_k=0,
    norm_topk_prob=True,
    moe_layers=frozenset(),
    rms_eps=1e-6,
    rope_theta=10000.0,
    tie_embeddings=False,
    context_length=64,
    eos_ids=(),
)
SOURCE, TARGET = 0, 1


@pytest.fixture
def cache():
    return KvCache(SHAPE, num_slots=2, context_length=64)


@pytest.fixture
def prefixes(cache):
    return PrefixCache(cache, dtype=torch.float32)


def fill(cache, ids):
    """Values that say which ids they were computed from: each depends on the whole prefix."""
    state = 0.0
    for position, token in enumerate(ids):
        state = (state * 31 + token + 1) % 997
        cache.values[:, :, SOURCE, :, position] = state


def keep(cache, prefixes, ids, salt=""):
    fill(cache, ids)
    prefixes.store(SOURCE, np.array(ids), salt=salt)


def found(cache, prefixes, ids, salt=""):
    """Length found, after checking that the values are those of these very ids."""
    cache.values[:, :, TARGET] = -1
    length = prefixes.load(TARGET, np.array(ids), salt=salt)
    fill(cache, ids)
    expected = cache.values[:, :, SOURCE, :, :length]
    assert torch.equal(cache.values[:, :, TARGET, :, :length], expected)
    assert (cache.values[:, :, TARGET, :, length:] == -1).all()
    return length


def test_the_next_turn_of_a_session_finds_everything_it_has_said(cache, prefixes):
    keep(cache, prefixes, [1, 2, 3, 4, 5])
    assert found(cache, prefixes, [1, 2, 3, 4, 5, 6, 7, 8]) == 5


def test_the_last_token_is_always_computed(cache, prefixes):
    keep(cache, prefixes, [1, 2, 3])
    assert found(cache, prefixes, [1, 2, 3]) == 2
    assert found(cache, prefixes, [1]) == 0


def test_contexts_that_part_share_what_they_have_in_common(cache, prefixes):
    keep(cache, prefixes, [1, 2, 3, 4, 5])
    keep(cache, prefixes, [1, 2, 3, 9, 9, 9])
    keep(cache, prefixes, [1, 2, 7])
    assert prefixes.num_tokens == 5 + 3 + 1
    assert found(cache, prefixes, [1, 2, 3, 4, 5, 0]) == 5
    assert found(cache, prefixes, [1, 2, 3, 9, 9, 9, 0]) == 6
    assert found(cache, prefixes, [1, 2, 7, 0]) == 3
    assert found(cache, prefixes, [1, 2, 3, 9, 5, 5]) == 4
    assert found(cache, prefixes, [8, 8, 8]) == 0


def test_storing_what_is_known_adds_nothing(cache, prefixes):
    keep(cache, prefixes, [1, 2, 3, 4])
    keep(cache, prefixes, [1, 2])
    keep(cache, prefixes, [1, 2, 3, 4])
    assert prefixes.num_tokens == 4


def test_salts_do_not_see_each_other(cache, prefixes):
    keep(cache, prefixes, [1, 2, 3, 4], salt="v1")
    assert found(cache, prefixes, [1, 2, 3, 4, 5], salt="v2") == 0
    assert found(cache, prefixes, [1, 2, 3, 4, 5], salt="v1") == 4


def test_the_least_recently_used_end_goes_first(cache, prefixes):
    keep(cache, prefixes, [1, 2, 3, 4])
    keep(cache, prefixes, [1, 2, 5, 6])
    keep(cache, prefixes, [7, 8, 9])
    assert found(cache, prefixes, [1, 2, 3, 4, 0]) == 4
    prefixes.shrink(7)  # 9 tokens: the branch [5, 6] is the oldest end
    assert prefixes.num_tokens == 7
    assert found(cache, prefixes, [1, 2, 5, 6, 0]) == 2
    assert found(cache, prefixes, [7, 8, 9, 0]) == 3
    prefixes.shrink(0)
    assert prefixes.num_tokens == 0
    assert found(cache, prefixes, [7, 8, 9, 0]) == 0


def test_clearing_forgets_everything(cache, prefixes):
    keep(cache, prefixes, [1, 2, 3])
    prefixes.clear()
    assert found(cache, prefixes, [1, 2, 3, 4]) == 0
    keep(cache, prefixes, [1, 2, 3])
    assert found(cache, prefixes, [1, 2, 3, 4]) == 3


def test_random_contexts_are_found_as_a_plain_list_finds_them(cache, prefixes):
    generator = np.random.default_rng(0)
    stored = []
    for _ in range(200):
        ids = generator.integers(0, 3, generator.integers(1, 12)).tolist()
        best = 0
        for other in stored:
            common = 0
            while common < min(len(other), len(ids) - 1) and other[common] == ids[common]:
                common += 1
            best = max(best, common)
        assert found(cache, prefixes, ids) == best
        keep(cache, prefixes, ids)
        stored.append(ids)


def test_bfloat16_holds_every_number_of_both_cache_formats():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = codes[torch.isfinite(codes)]
    assert torch.equal(finite.bfloat16().float(), finite)
