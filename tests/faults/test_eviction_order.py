"""Eviction order and hit rate: faults D29 to D37, and what design.md 5.8 says about windows."""

from __future__ import annotations

import pytest
from by_hand import ByHand, run_of

from kvcache import KeyBatch
from kvcache.tree import arrays as a
from kvcache.tree.arrays import FULL_LOCKS, FULL_PREV, M_NODES, OUT, SWA_PREV


def test_the_kept_window_goes_last_on_its_branch() -> None:
    """D29: the retained suffix lost its protection when a split had been undone."""
    cache = ByHand(4, 8, checkpoints="hints")
    key = run_of(1, 64)
    cache.put(key, hints=[16, 32])
    cache.put(key[:60] + run_of(2, 8))  # splits [56, 64) at 60
    cache.evict(full=1)  # the older leaf's last page goes first ...
    assert cache.match(key)[0] < 64
    cache.put(key, hints=[16, 32])  # ... and comes back
    for checkpoint in (16, 32, 64):
        assert cache.match(key[:checkpoint]) == (checkpoint, checkpoint, None)
    cache.evict(swa=6)  # two windows of this branch, one of the sibling
    assert cache.match(key[:16])[1] == cache.match(key[:32])[1] == 0
    assert cache.match(key) == (64, 64, None)
    cache.drain()


def test_dead_swa_goes_before_hot_swa() -> None:
    """D30: refreshing was not window-aware: pages outside every window looked as hot as the path."""
    cache = ByHand(4, 8, checkpoints="every=4")
    a, c = run_of(1, 80), run_of(2, 8)
    for length in range(8, 81, 8):
        cache.put(a[:length])
    cache.put(c)
    cache.match(c, touch=True)
    cache.match(a, touch=True)
    cache.match(a, touch=True)
    cache.evict(swa=2)
    assert cache.match(c) == (8, 8, None)
    assert cache.match(a) == (80, 80, None)
    assert cache.match(a[:8])[1] < 8, "the oldest window of A, in nobody's use, went"
    cache.drain()


def test_an_swa_hit_makes_the_window_recent() -> None:
    """D31: a hit refreshed Full recency only."""
    cache = ByHand(4, 8)
    a, b = run_of(1, 25), run_of(2, 25)
    cache.put(a)
    cache.put(b)
    cache.match(a, touch=True)
    assert cache.evict(swa=2)[1] == 2
    assert cache.match(a) == (24, 24, None)
    assert cache.match(b)[1] == 0
    cache.drain()


def test_no_tombstone_leaf_survives_its_window() -> None:
    """D31, second half; design.md 5.8: Full KV that nobody can reuse goes with the window."""
    cache = ByHand(4, 8)
    key = run_of(1, 41)
    cache.put(key)
    freed = cache.evict(swa=2)
    assert freed == (10, 2)
    assert cache.match(key) == (0, 0, None)


def test_a_trimmed_leaf_falls_back_to_a_length_that_can_be_reused() -> None:
    """The kind: whatever is evicted, the end of every unlocked leaf can be reused."""
    cache = ByHand(4, 8, checkpoints="hints")
    key = run_of(1, 41)
    cache.put(key, hints=[16])
    assert cache.evict(full=1) == (6, 2)
    assert cache.match(key) == (16, 16, None)
    assert cache.evict(full=1) == (4, 2)
    cache.drain()


def test_every_session_finds_its_prefix_in_a_roomy_pool() -> None:
    """D32: reuse fell to nothing at a quarter of the capacity."""
    cache = ByHand(4, 8, full_pages=8 * 12 * 4, swa_pages=8 * 2 * 4)
    keys = [run_of(n, 48) for n in range(1, 9)]
    for key in keys:
        cache.put(key)
    assert [cache.put(key + run_of(50 + n, 4)) for n, key in enumerate(keys)] == [48] * 8
    assert cache.m.stats().evicted_full_pages == 0
    cache.drain()


@pytest.mark.parametrize("window", [None, 4])
def test_a_partial_hit_does_not_refresh_what_it_did_not_cover(window: int | None) -> None:
    """D33: the split refreshed the lower part."""
    cache = ByHand(4, window, checkpoints="every=4")
    a, c = run_of(1, 16), run_of(2, 8)
    cache.put(a)
    cache.put(c)
    cache.match(a[:8], touch=True)
    nodes = int(cache.m.tree.meta[M_NODES])
    cache.match(a[:8], touch=True)
    assert int(cache.m.tree.meta[M_NODES]) == nodes, "a match splits nothing"
    cache.evict(full=2)
    assert cache.match(a)[0] == 8
    assert cache.match(c)[0] == 8
    cache.evict(full=1)
    assert cache.match(a)[0] == 8, "the matched half is the more recent one"
    assert cache.match(c)[0] == 4
    cache.drain()


def test_what_was_never_read_is_as_old_as_its_insert() -> None:
    """D35: recency 0 at admission: new entries went before old ones."""
    cache = ByHand(4, None)
    x, y = run_of(1, 8), run_of(2, 8)
    cache.put(y)
    cache.match(y, touch=True)
    cache.put(x)
    cache.evict(full=1)
    assert cache.match(x)[0] == 8
    assert cache.match(y)[0] == 4
    cache.drain()


def test_a_match_that_does_not_touch_leaves_the_order() -> None:
    """The kind of D35: looking is not using, where the caller says so."""
    cache = ByHand(4, None)
    x, y = run_of(1, 8), run_of(2, 8)
    cache.put(x)
    cache.put(y)
    cache.m.match(KeyBatch.pack([x]), touch=False)
    cache.evict(full=1)
    assert (cache.match(x)[0], cache.match(y)[0]) == (4, 8)


def test_locked_nodes_are_in_no_list() -> None:
    """D36: every eviction scanned the locked nodes at the old end again."""
    cache = ByHand(4, 8, max_rows=8, checkpoints="every=4")
    for n in range(1, 7):
        cache.put(run_of(n, 16))
    rows = [cache.start(run_of(n, 17)) for n in range(1, 7)]
    nodes = cache.m.tree.nodes
    assert nodes[FULL_PREV, 0] == 0, "no unlocked node: the list is empty, nothing is scanned"
    assert cache.evict(full=5) == (0, 0)
    window_only = cache.m.stats().tree_swa_pages - cache.m.stats().locked_swa_pages
    assert window_only == 6 * 2
    assert cache.evict(swa=100) == (0, window_only)
    assert nodes[SWA_PREV, 0] == 0
    locked = nodes[FULL_LOCKS] > 0
    assert locked.sum() > len(rows)
    assert (nodes[FULL_PREV, locked] == OUT).all()
    cache.drain()


def test_a_broken_window_gives_up_its_rest_before_another_is_touched() -> None:
    """design.md 5.8."""
    cache = ByHand(4, 16)
    a, b = run_of(1, 41), run_of(2, 41)
    cache.put(a)
    cache.put(b)
    assert cache.evict(swa=1)[1] == 1
    assert cache.match(b) == (40, 40, None)
    broken, whole = cache.m.stats().tree_swa_pages, 4
    assert broken == 7
    cache.evict(swa=3)
    assert cache.m.stats().tree_swa_pages == whole
    assert cache.match(b) == (40, 40, None)
    cache.drain()


def test_in_a_window_that_was_read_the_deep_pages_are_the_more_recent() -> None:
    """The kind of D30: of two windows that overlap, the one that was read last stands."""
    page, pages = 4, 8
    cache = ByHand(page, 4 * page, checkpoints=f"every={page}")
    key = run_of(1, pages * page)
    cache.put(key)
    for end in range(1, pages):  # a node for every page
        cache.put(key[: end * page] + run_of(1 + end, page))
    cache.match(key, touch=True)
    cache.match(key[: 6 * page], touch=True)
    cache.m.evict(0, 0)  # what waits to be noted is noted
    nodes = cache.m.tree.nodes
    order = []
    node = nodes[a.SWA_NEXT, 0]
    while node != 0 and len(order) < 6:
        order.append(int(nodes[a.DEPTH, node]))
        node = nodes[a.SWA_NEXT, node]
    assert order == [5, 4, 3, 2, 7, 6]
