"""What a walk costs: nodes that no longer tell two things apart are joined, prefixes are not read again."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from by_hand import ByHand, run_of

from kvcache import CacheConfig, InvalidInputError, KeyBatch, KVCacheManager, StaleMatchError
from kvcache.tree import arrays as a
from kvcache.tree.join import are_alike
from kvcache.tree.windows import kept_windows


def alike_pairs(cache: ByHand) -> int:
    """Pairs of a node and its only child that could be one."""
    f = cache.m.tree.nodes
    bump = int(cache.m.tree.meta[a.M_BUMP])
    nodes = [n for n in range(1, bump) if f[a.SWA_LOCKS, n] >= 0 and f[a.PARENT, n] != 0]
    return sum(
        bool(f[a.PARENT, f[a.PARENT, n]] != 0 and are_alike(f, f[a.PARENT, n], n)) for n in nodes
    )


@pytest.mark.parametrize("window", [None, 8])
def test_a_row_that_commits_token_by_token_leaves_no_chain(window: int | None) -> None:
    """It left a node a token: a match of 8,000 tokens went through 8,000 of them."""
    cache = ByHand(1, window, full_pages=600, swa_pages=600)
    key = run_of(1, 500)
    row = cache.start(key)
    for n in range(1, 501):
        cache.m.extend([row], [n])
        cache.m.advance([row])
        cache.m.commit([row], KeyBatch.pack([key[:n]]))
        cache.m.slide([row])
        assert cache.m.stats().nodes <= 4
    cache.finish(row, key)
    assert cache.m.stats().nodes <= 3
    assert cache.match(key[:-1])[:2] == (499, 499)


def test_a_fork_that_was_evicted_leaves_one_edge() -> None:
    cache = ByHand(4, None)
    trunk, tail = run_of(1, 40), run_of(2, 20)
    cache.put(trunk + tail)
    cache.put(trunk + run_of(3, 40))
    assert cache.m.stats().nodes == 3
    cache.match(trunk + tail, touch=True)
    cache.evict(full=10)  # all of the second tail
    assert cache.m.stats().nodes == 2
    row = cache.start(trunk + tail)
    cache.m.abort([row])
    cache.m.check()
    assert cache.m.stats().nodes == 1
    assert cache.match(trunk + tail)[0] == 60


def test_a_match_still_holds_when_the_node_it_ended_in_was_joined() -> None:
    cache = ByHand(4, None)
    key = run_of(1, 40)
    first = cache.start(key)
    cache.compute(first, 20)
    cache.commit(first, key)
    found = cache.m.match(KeyBatch.pack([key[:20]]))
    cache.compute(first, 40)
    cache.commit(first, key)  # one node of 40 tokens: that of the first 20 is gone
    assert cache.m.stats().nodes == 1
    again = cache.m.match(KeyBatch.pack([key]), previous=found)
    assert again.full_hit_len.tolist() == [40]
    (row,) = cache.m.admit(found).tolist()
    cache.m.check()
    assert cache.m.rows.owned_len[cache.index(row)] == 20
    cache.drain()


def test_nodes_of_different_recency_stay_apart() -> None:
    """Joined they would be evicted as one: the upper half with the lower, or the lower after the upper."""
    cache = ByHand(4, None)
    a_key, other = run_of(1, 16), run_of(2, 8)
    cache.put(a_key)
    cache.put(other)
    cache.m.abort([cache.start(a_key[:9])])  # its first half becomes the most recent
    assert cache.m.stats().nodes == 3
    for freed, left in ((2, (8, 8)), (1, (8, 4)), (1, (8, 0)), (1, (4, 0))):
        assert cache.evict(full=freed) == (freed, 0)
        assert (cache.match(a_key)[0], cache.match(other)[0]) == left


def test_nodes_of_different_swa_recency_stay_apart() -> None:
    cache = ByHand(4, 4, checkpoints="every=4")
    key, other = run_of(1, 8), run_of(2, 8)
    cache.put(key)
    cache.put(other)
    cache.m.abort([cache.start([*key, 0])])  # its last window, [4, 8), becomes the most recent
    assert cache.m.stats().nodes == 3
    assert cache.evict(swa=1) == (0, 1)
    assert cache.match(key[:4]) == (4, 0, 4)
    for text in (key, other):
        assert cache.match(text) == (8, 8, None)
    assert cache.match(other[:4]) == (4, 4, None)


def joined() -> tuple[ByHand, list[int], Any, int]:
    """A match of the first 20 tokens of a row, whose node was then joined with that of the next 20."""
    cache = ByHand(4, None, max_rows=2)
    key = run_of(1, 40)
    row = cache.start(key)
    cache.compute(row, 20)
    cache.commit(row, key)
    found = cache.m.match(KeyBatch.pack([key[:20]]))
    cache.compute(row, 40)
    cache.finish(row, key)
    assert cache.m.stats().nodes == 1
    return cache, key, found, row


def test_a_match_holds_when_the_joined_node_lost_pages_behind_it() -> None:
    cache, key, found, _ = joined()
    cache.evict(full=3)
    (row,) = cache.m.admit(found).tolist()
    cache.m.check()
    assert cache.m.rows.owned_len[cache.index(row)] == 20
    cache.finish(row, key[:20])
    cache.drain()


@pytest.mark.parametrize("again", [False, True])
def test_a_match_is_stale_when_the_joined_node_lost_one_of_its_pages(again: bool) -> None:
    """Also where other pages have come in their place, and were joined in their turn."""
    cache, key, found, _ = joined()
    cache.evict(full=6)  # 16 tokens are left
    if again:
        other = key[:16] + run_of(2, 24)
        row = cache.start(other)
        cache.compute(row, 40)
        cache.finish(row, other)
        assert cache.m.stats().nodes == 1
    with pytest.raises(StaleMatchError):
        cache.m.admit(found)
    assert cache.m.match(KeyBatch.pack([key]), previous=found).full_hit_len.tolist() == [16]
    cache.drain()


def test_a_match_is_stale_when_the_record_of_the_new_owner_was_taken_again() -> None:
    cache, key, found, _ = joined()
    cache.m.flush()
    cache.put(run_of(3, 40))  # in the records that came free
    with pytest.raises(StaleMatchError):
        cache.m.admit(found)
    assert cache.m.match(KeyBatch.pack([key]), previous=found).full_hit_len.tolist() == [0]
    cache.drain()


@pytest.mark.parametrize("seed", range(6))
def test_random_lives_leave_nothing_that_an_unlock_could_have_joined(seed: int) -> None:
    """Prefixes that are locked and unlocked as a whole are one edge for each fork and each liveness."""
    rng = random.Random(seed)
    cache = ByHand(2, 6, full_pages=200, swa_pages=120, max_rows=4)
    texts = [run_of(i % 2, 20) + run_of(10 + i, 30) for i in range(4)]
    for _ in range(60):
        text = rng.choice(texts)
        cache.put(text[: rng.randint(2, 50)], chunk=rng.choice([None, 6, 10]))
        if rng.random() < 0.3:
            cache.evict(rng.randint(0, 20), rng.randint(0, 20))
    for text in texts:
        cache.m.abort([cache.start([*text, 0])])
    cache.m.check()
    assert alike_pairs(cache) <= 2


# hints


@pytest.mark.parametrize("seed", range(8))
def test_hints_keep_the_same_windows_in_any_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    page, keep, owned = int(rng.choice([1, 4])), int(rng.integers(1, 6)), int(rng.integers(0, 9))
    end = owned + int(rng.integers(1, 60))
    hints = rng.integers(-2, (end + 4) * page, int(rng.integers(0, 40)))
    every = int(rng.choice([0, 3 * page]))
    marks = np.zeros(end - owned + 1, np.int64)
    found = []
    for order in (hints, np.sort(hints), np.sort(hints)[::-1].copy(), rng.permutation(hints)):
        kept = np.zeros((end - owned + 2, 2), np.int64)
        frontier = max(owned, end - 2 * keep - 9)
        args = (owned, end, frontier, keep, end - 1, -1, every, page, order, marks, kept)
        found.append(kept[: kept_windows(*args)].tolist())
        assert not marks.any()
    assert found[0] == found[1] == found[2] == found[3]
    assert found[0][-1][1] == end


# keys that contradict their prefix


def lone(debug: bool) -> tuple[KVCacheManager, np.ndarray, np.ndarray]:
    cache = KVCacheManager(CacheConfig(4, None, 64, 0, 2, 64, debug=debug))
    key = np.arange(40, dtype=np.int32)
    rows = cache.admit(cache.match(KeyBatch(key, [0], [39])))
    cache.extend(rows, [40])
    cache.advance(rows)
    cache.commit(rows, KeyBatch(key, [0], [24]))
    return cache, rows, key


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("length", [24, 26, 40, 22])
def test_a_key_that_contradicts_the_end_of_its_prefix_is_refused(length: int, debug: bool) -> None:
    cache, rows, key = lone(debug)
    covered = min(length, 24)
    last_page = (covered - 1) // 4 * 4
    for at in range(last_page, covered):
        wrong = key.copy()
        wrong[at] += 1000
        with pytest.raises(InvalidInputError, match="must repeat the prefix"):
            cache.commit(rows, KeyBatch(wrong, [0], [length]))
    cache.commit(rows, KeyBatch(key, [0], [length]))
    cache.check()


def test_only_debug_reads_the_whole_prefix_again() -> None:
    """Reading it at every commit costs a prefill in chunks the square of its length."""
    for debug in (False, True):
        cache, rows, key = lone(debug)
        wrong = key.copy()
        wrong[3] += 1000
        if debug:
            with pytest.raises(InvalidInputError, match="position 3"):
                cache.commit(rows, KeyBatch(wrong, [0], [40]))
        else:
            cache.commit(rows, KeyBatch(wrong, [0], [40]))
        cache.check()
