"""Strangers do no harm: what one client sends never makes another's calls slow. Counted, not timed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sympy import ZZ
from sympy.polys.matrices import DomainMatrix

from kvcache import CacheConfig, KeyBatch, KVCacheManager
from kvcache.tree import arrays as a
from kvcache.tree.hashing import child_tag, hash_words

KNOWN, SECRET = 0, 0x5DEECE66D1234567
LEAVES = 600


def crafted_pages(page_size: int, seed: int) -> Any:
    """[LEAVES, page_size] pages that have one hash under `seed`, for whoever knows it.

    With the second half of a page fixed, the sum of products is linear in the first one: a short lattice
    basis of what leaves it as it is gives any number of pages with small tokens.
    """
    half = page_size // 2
    keys = [int(k) for k in hash_words(seed, page_size)[a.M_TOKEN_KEYS - a.M_HASH_MULTIPLIER :]]
    w = [(5000 + key) % 2**32 for key in keys[half : 2 * half]]
    rows = [[ZZ(i == j) for j in range(half)] + [ZZ(w[i] << 40)] for i in range(half)]
    basis = DomainMatrix(rows, (half, half + 1), ZZ).lll().to_Matrix().tolist()
    free = np.array([[int(x) for x in row[:half]] for row in basis if row[half] == 0])
    rng = np.random.default_rng(0)
    first = 50_000 + rng.integers(-8, 9, (4 * LEAVES, len(free))) @ free
    first = np.unique(first, axis=0)[:LEAVES]
    assert len(first) == LEAVES
    assert first.min() >= 0
    return np.hstack([first, np.full((LEAVES, page_size - half), 5000)]).astype(np.int32)


def served(pages: Any, seed: int, bigram: bool = False) -> KVCacheManager:
    """A cache that has served a prompt for each page; bigram keys begin with one token more."""
    num, page_size = pages.shape
    cache = KVCacheManager(
        CacheConfig(
            page_size,
            None,
            2 * num,
            0,
            num,
            page_size + 1,
            bigram=bigram,
            checkpoints=(),
            hash_seed=seed,
        )
    )
    if bigram:
        pages = np.insert(pages, 0, 7, axis=1)
    length = pages.shape[1]
    keys = KeyBatch(pages.reshape(-1), np.arange(num) * length, [length] * num)
    rows = cache.admit(cache.match(keys))
    cache.extend(rows, keys.lens)
    cache.advance(rows)
    cache.finish(rows, keys)
    assert cache.match(keys).full_hit_len.tolist() == [page_size] * num
    cache.check()
    return cache


def probes(cache: KVCacheManager) -> Any:
    """[nodes] how many other entries of the child table a look-up of each node goes through."""
    tree = cache.tree
    slots = np.flatnonzero(tree.table[:, a.NODE])
    mask = len(tree.table) - 1
    return (slots - (tree.table[slots, a.TAG].astype(np.int64) & 0xFFFFFFFF & mask)) & mask


def hashes(cache: KVCacheManager) -> Any:
    return cache.tree.nodes[a.HASH, cache.tree.table[cache.tree.table[:, a.NODE] != 0, a.NODE]]


@pytest.mark.parametrize("bigram", [False, True], ids=["plain", "bigram"])
@pytest.mark.parametrize("page_size", [16, 33])
def test_pages_crafted_without_the_seed_cost_what_random_ones_do(
    page_size: int, bigram: bool
) -> None:
    pages = crafted_pages(page_size, KNOWN)
    # the attack is one: whoever knows the seed fills one place of the table
    assert len(np.unique(hashes(served(pages, KNOWN, bigram)))) == 1
    assert probes(served(pages, KNOWN, bigram)).max() == LEAVES - 1
    cache = served(pages, SECRET, bigram)
    assert len(np.unique(hashes(cache))) == LEAVES
    random = np.random.default_rng(1).integers(0, 100_000, pages.shape).astype(np.int32)
    most = probes(served(random, SECRET, bigram))
    assert probes(cache).max() <= 2 * most.max()
    assert probes(cache).sum() <= 2 * most.sum()


@pytest.mark.parametrize("page_size", [1, 2, 3, 64])
def test_pages_that_differ_in_one_token_spread(page_size: int) -> None:
    """Tokens in a row at one place, and tokens with all low bits equal, at any place."""
    for step in (1, 1 << 16):
        for place in {0, page_size // 2, page_size - 1}:
            pages = np.full((LEAVES, page_size), 3, np.int32)
            pages[:, place] = np.arange(LEAVES) * step
            cache = served(pages, SECRET)
            assert len(np.unique(hashes(cache))) == LEAVES
            assert probes(cache).max() <= 20


def test_a_hash_tells_order_length_and_the_token_before_the_page() -> None:
    pages = np.array([[1, 2, 3, 4], [4, 3, 2, 1], [3, 4, 1, 2], [2, 1, 4, 3]], np.int32)
    assert len(np.unique(hashes(served(pages, SECRET)))) == 4
    cache = served(pages, SECRET, bigram=True)
    plain = served(pages, SECRET)
    assert not np.intersect1d(hashes(cache), hashes(plain)).size


def test_seeds_agree_on_results_and_on_nothing_else() -> None:
    pages = np.random.default_rng(2).integers(0, 50, (LEAVES, 4)).astype(np.int32)
    pages = np.unique(pages, axis=0)
    one, other = served(pages, KNOWN), served(pages, SECRET)
    np.testing.assert_array_equal(one.pools.slab.numpy(), other.pools.slab.numpy())
    assert len(np.intersect1d(hashes(one), hashes(other))) < 3
    assert "hash_seed" not in repr(other.config)


def test_one_hash_below_many_parents_spreads() -> None:
    tags = {int(child_tag(parent, 12345)) & 1023 for parent in range(1, 1025)}
    assert len(tags) > 550  # 647 of 1,024 were they random
