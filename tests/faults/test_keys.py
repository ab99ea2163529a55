"""Keys, namespaces, replicas: faults D57 to D67."""

from __future__ import annotations

import numpy as np
import pytest
from by_hand import ByHand, run_of

from kvcache import InvalidInputError, KeyBatch


def test_a_million_tokens_match_as_one_key() -> None:
    """D58: building the key took a Python loop; here it is a view."""
    cache = ByHand(64, 128, full_pages=17_000, swa_pages=17_000, max_len=1_100_000)
    tokens = np.arange(1_000_000, dtype=np.int32)
    keys = KeyBatch(tokens, [0], [1_000_000])
    assert keys.tokens is tokens
    row = int(cache.m.admit(cache.m.match(keys))[0])
    cache.m.extend([row], [1_000_000])
    cache.m.advance([row])
    cache.m.finish([row], keys)
    assert cache.m.match(keys).reuse_len.tolist() == [1_000_000]


def test_equal_tokens_in_two_namespaces_share_nothing() -> None:
    """D59, D60: a caller's extra key equalled an adapter's id."""
    cache = ByHand(4, 8)
    names = [None, ("lora", "x"), ("salt", "x"), "x", b"x", ("lora", ("x",)), 1, "1"]
    handles = [cache.m.namespace(name) for name in names]
    assert len(set(handles)) == len(names)
    key = run_of(1, 16)
    for handle in handles:
        assert cache.match(key, handle) == (0, 0, None)
        cache.put(key, namespace=handle)
        assert cache.match(key, handle) == (16, 16, None)
    assert cache.m.stats().tree_full_pages == 4 * len(names)
    assert [cache.m.namespace(name) for name in names] == handles
    cache.drain()


def test_a_dropped_namespace_never_answers_again() -> None:
    """The kind of D59: a new namespace in an old one's place sees none of its pages, nor does its handle."""
    cache = ByHand(4, 8, max_namespaces=2)
    old = cache.m.namespace("old")
    key = run_of(1, 17)
    cache.put(key, namespace=old)
    found = cache.m.match(KeyBatch.pack([key]), old)
    assert cache.m.drop_namespace(old) == (4, 2)
    cache.m.check()
    new = cache.m.namespace("new")
    assert cache.match(key, new) == (0, 0, None)
    for call in (
        lambda: cache.match(key, old),
        lambda: cache.m.match(KeyBatch.pack([key]), old, previous=found),
        lambda: cache.m.drop_namespace(old),
    ):
        with pytest.raises(InvalidInputError, match="namespace"):
            call()
    # an engine that looks its queue up anew: the hint is of a namespace that is gone, and says nothing
    again = cache.m.match(KeyBatch.pack([key]), new, previous=found)
    assert (again.full_hit_len.tolist(), again.reuse_len.tolist()) == ([0], [0])
    cache.drain()


def test_keys_are_compared_to_the_last_bit() -> None:
    """D61: ids cut to 16 bits collided. Tokens that agree in any 16 bits do not."""
    cache = ByHand(1, None, full_pages=20_000)
    base = 0x1234_5678
    cache.put([base, 1])
    for bit in range(31):
        assert cache.match([base ^ (1 << bit)]) == (0, 0, None)
    rng = np.random.default_rng(3)
    ids = rng.choice(2**31 - 1, 10_000, replace=False)
    keys = KeyBatch(ids, np.arange(ids.size), np.ones(ids.size, np.int64))
    assert int(cache.m.match(keys).full_hit_len.sum()) == int((ids == base).sum())


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_int64_keys_do_not_wrap(dtype: type) -> None:
    cache = ByHand(1, None)
    cache.put([5, 6, 7])
    key = np.array([5, 6, 7], dtype)
    assert cache.m.match(KeyBatch(key, [0], [3])).full_hit_len.tolist() == [3]
    wrapped = np.array([5 + 2**32, 6, 7])
    assert cache.m.match(KeyBatch(wrapped, [0], [3])).full_hit_len.tolist() == [0]


@pytest.mark.parametrize("page", [2, 3, 4, 64])
def test_keys_that_share_less_than_a_page_share_no_node(page: int) -> None:
    """D66: a split at 0; a node filed under the wrong child key."""
    cache = ByHand(page, None)
    shared = run_of(1, page - 1)
    for n in range(2, 12):
        cache.put(shared + run_of(n, 2 * page))
    for n in range(2, 12):
        assert cache.match(shared + run_of(n, 2 * page))[0] == (3 * page - 1) // page * page
    assert cache.match(shared + run_of(99, page)) == (0, 0, None)
    cache.drain()


@pytest.mark.parametrize("length", [0, 1, 3])
def test_a_key_shorter_than_a_page_leaves_nothing(length: int) -> None:
    """D67: an empty key on the finish path."""
    cache = ByHand(4, 8)
    row = cache.start(run_of(1, 9))
    cache.compute(row, length)
    assert cache.finish(row, run_of(1, length)) == 0
    assert cache.m.stats().nodes == 0
    assert cache.m.stats().full_pages_free == 400


def test_a_match_stays_in_its_namespace_when_the_buffer_of_handles_is_reused() -> None:
    """The kind of D26 and D27: what was found in one namespace must not answer in another."""
    cache = ByHand(4, 8, max_namespaces=3)
    mine, other = cache.m.namespace("mine"), cache.m.namespace("other")
    key = run_of(1, 16)
    first = cache.start(key, mine)
    cache.compute(first, 16)
    cache.finish(first, key)
    buffer = np.array([mine])
    found = cache.m.match(KeyBatch.pack([key]), buffer)
    buffer[0] = other
    (row,) = cache.m.admit(found)
    assert cache.m.rows.handles[cache.index(row)] == mine
    with pytest.raises(InvalidInputError, match="that no row uses"):
        cache.m.drop_namespace(mine)
    cache.m.abort([row])
