"""Frontier, alignment, bigram keys: faults D17 to D28 and D39, each widened to its kind."""

from __future__ import annotations

import numpy as np
import pytest
from by_hand import ByHand, run_of

from kvcache import KeyBatch
from kvcache.rows import frontier_of, key_units, resend_end
from kvcache.tree.arrays import LIVE, LOCK_NODE, PARENT
from kvcache.tree.edges import make_live, make_tombstone, node_ending_at
from kvcache.tree.insert import AT, BRANCH_AT, INSERT_END, KEY_LEN, NUM_REQUEST, RECEIPT
from kvcache.tree.match import BRANCH, FULL_HIT, REUSE
from kvcache.tree.radix_tree import RadixTree


@pytest.mark.parametrize("length", range(19, 24))
def test_a_page_larger_than_the_window_keeps_its_last_leaf(length: int) -> None:
    """D17: the window-only frontier was the insert boundary: the last leaf was all tombstone."""
    cache = ByHand(8, 2)
    key = run_of(1, length)
    row = cache.start(key)
    cache.compute(row, length)
    cache.slide(row)
    assert cache.m.rows.frontier[cache.index(row)] == 8
    assert cache.finish(row, key) == 16
    assert cache.match(key) == (16, 16, None)
    cache.drain()


def test_a_page_of_256_with_a_window_of_128() -> None:
    """D17 at full size."""
    cache = ByHand(256, 128)
    key = run_of(1, 712)
    row = cache.start(key)
    cache.compute(row, 712)
    cache.slide(row)
    assert cache.m.rows.frontier[cache.index(row)] == 256
    assert cache.finish(row, key) == 512
    assert cache.match(key) == (512, 512, None)


@pytest.mark.parametrize("bigram", [False, True])
def test_the_frontier_never_reaches_into_the_window_it_must_keep(bigram: bool) -> None:
    """D18, D19: some lengths kept less than a window. Swept over pages, windows and lengths."""
    for page in (1, 2, 3, 4, 5, 8, 16, 64, 256):
        for window in (1, 2, 3, 4, 6, 7, 8, 9, 63, 64, 65, 127, 128):
            for length in range(0, 3 * page + 2 * window, max(1, page // 3)):
                units = max(length - 1, 0) if bigram else length
                assert key_units(length, bigram) == units
                # of the key without its last unit, which may come again
                end = max(units - 1, 0) // page * page
                assert resend_end(units, page) == end
                frontier = frontier_of(length, page, window, bigram)
                assert frontier % page == 0
                # the first token that a request resumed at `end` attends to is end - window + 1
                assert frontier <= max(0, end - window) < frontier + page or frontier == 0


@pytest.mark.parametrize(
    ("page", "window", "length", "bigram", "kept_from", "hit"),
    [
        (4, 6, 27, False, 16, 24),
        (4, 7, 32, True, 20, 28),
        (4, 8, 33, False, 24, 32),
        (
            4,
            8,
            32,
            False,
            20,
            32,
        ),  # the windows before 28, where the key comes again, and before 32
    ],
)
def test_a_whole_window_is_live_after_an_insert(
    page: int, window: int, length: int, bigram: bool, kept_from: int, hit: int
) -> None:
    """D18 (W = 6, 27 tokens), D19 (bigram, W = 7, 32 tokens)."""
    cache = ByHand(page, window, bigram=bigram)
    key = run_of(1, length)
    row = cache.start(key)
    cache.compute(row, length)
    cache.slide(row)
    cache.finish(row, key)
    assert cache.match(key) == (hit, hit, None)
    assert cache.m.stats().tree_swa_pages == (hit - kept_from) // page
    cache.drain()


@pytest.mark.parametrize("slide", [False, True])
@pytest.mark.parametrize("bigram", [False, True])
@pytest.mark.parametrize("slack", [0, 1])
def test_insert_then_match_reaches_what_was_inserted(slack: int, bigram: bool, slide: bool) -> None:
    """Rule 4, swept: D17 to D19 were lengths at which it did not."""
    for page in (1, 3, 4, 16):
        for window in (2, 3, 4, 5, 6, 7, 8, 17, 200):
            cache = ByHand(page, window, bigram=bigram, window_slack=slack, full_pages=2000)
            for length in range(1, 3 * page + 24, 3):
                key = run_of(length, length)
                row = cache.start(key)
                cache.compute(row, length)
                if slide:
                    cache.m.slide([row])
                owned = int(cache.m.finish([row], KeyBatch.pack([key])).owned_len[0])
                assert cache.match(key)[:2] == (owned, owned)
            cache.m.check()


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (63, 0), (64, 0), (65, 64), (128, 64)])
def test_a_short_bigram_page_is_not_cached(length: int, cached: int) -> None:
    """D20: 64 tokens are 63 units."""
    cache = ByHand(64, 128, bigram=True)
    key = run_of(1, length)
    row = cache.start(key)
    cache.compute(row, length)
    assert cache.finish(row, key) == cached
    assert cache.match(key)[0] == cached
    cache.drain()


@pytest.mark.parametrize(("bigram", "hit"), [(False, 4), (True, 3)])
def test_a_bigram_unit_needs_both_tokens(bigram: bool, hit: int) -> None:
    """D21: draft KV of position i depends on token i + 1."""
    cache = ByHand(1, None, bigram=bigram)
    cache.put([1, 2, 3, 4, 5])
    assert cache.match([1, 2, 3, 4, 6])[0] == hit


def test_bigram_keys_that_differ_in_the_first_token_share_nothing() -> None:
    """The kind of D21 at the root: the first unit's first token is no unit's second one."""
    for page in (1, 2, 4):
        cache = ByHand(page, None, bigram=True)
        cache.put([9, *range(1, 20)])
        assert cache.match([8, *range(1, 20)]) == (0, 0, None)
        cache.put([8, *range(1, 20)])
        assert cache.match([9, *range(1, 20)])[0] == cache.match([8, *range(1, 20)])[0] > 0
        cache.drain()


def _tree_with(live: list[bool], page: int, keep: int) -> tuple[RadixTree, np.ndarray, np.ndarray]:
    """A tree with one path of len(live) pages of the given liveness."""
    pages = len(live)
    tree = RadixTree(
        page_size=page, keep_pages=keep, bigram=False, num_slots=64, max_locks=4, max_roots=2
    )
    root = np.array([tree.new_root()])
    keys = np.arange(pages * page, dtype=np.int32)
    receipts = tree.lock(root & 0xFFFFFFFF, np.zeros(1, np.int64))
    request = np.zeros((1, NUM_REQUEST), np.int64)
    request[0, [AT, KEY_LEN, INSERT_END, BRANCH_AT, RECEIPT]] = 0, keys.size, pages, -1, receipts[0]
    tree.insert(keys, request, np.zeros(0, np.int64), 0)
    last = int(tree.locks[LOCK_NODE, 0])
    tree.release_swa(receipts)
    arrays = (tree.nodes, tree.meta, tree.table, tree.tokens)
    for end in range(1, pages + 1):
        node_ending_at(*arrays, last, end)
    node = last
    for alive in reversed(live):
        if bool(tree.nodes[LIVE, node]) != alive:
            (make_live if alive else make_tombstone)(tree.nodes, tree.meta, node)
        node = int(tree.nodes[PARENT, node])
    return tree, root, keys


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("keep", [1, 2, 3, 5])
def test_a_tombstone_ends_the_run_of_live_pages(page: int, keep: int) -> None:
    """D22: the run length was not reset. All patterns of nine pages against the definition."""
    rng = np.random.default_rng(keep)
    for bits in rng.choice(512, 120, replace=False).tolist():
        live = [bool(bits >> i & 1) for i in range(9)]
        tree, root, keys = _tree_with(live, page, keep)
        found = tree.match(keys, np.zeros(1, np.int64), np.array([keys.size]), root)
        expected = max(x for x in range(10) if all(live[max(0, x - keep) : x]))
        assert found[FULL_HIT, 0] == 9 * page
        assert found[REUSE, 0] == expected * page
        assert found[BRANCH, 0] == (9 * page if expected < 9 else -1)
        # the same from a hint, which climbs instead of walking down
        again = tree.match(keys, np.zeros(1, np.int64), np.array([keys.size]), root, found)
        np.testing.assert_array_equal(again[:3], found[:3])


def test_the_window_of_d22() -> None:
    tree, root, keys = _tree_with([True, True, False, True, False], 4, 2)
    found = tree.match(keys, np.zeros(1, np.int64), np.array([keys.size]), root)
    assert found[[FULL_HIT, REUSE, BRANCH], 0].tolist() == [20, 8, 20]


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_nothing_inside_the_window_is_freed(chunk: int) -> None:
    """D26: tokens inside the window were freed between chunks."""
    for page, window in ((1, 8), (4, 8), (4, 5), (8, 3)):
        cache = ByHand(page, window)
        row = cache.start(run_of(1, 80))
        for length in range(chunk, 64, chunk):
            cache.compute(row, length)
            cache.slide(row)
            live = cache.swa_of(cache.pages(row))
            assert all(live[max(0, length - window) // page :])
        cache.drain()


def test_very_long_extends_work() -> None:
    """D27: over 1,048,576 tokens failed."""
    cache = ByHand(1, 4, full_pages=1_120_000, swa_pages=1_120_000, max_len=1_100_000)
    row = cache.start([1, 2])
    for length in (1, 1000, 65_537, 1_048_577):
        cache.m.extend([row], [length])
        cache.m.advance([row])
    cache.m.slide([row])
    assert cache.m.stats().row_swa_pages == 5, "the window of the last token, and of the one before"
    cache.m.abort([row])
    assert cache.m.stats().full_pages_free == 1_120_000


@pytest.mark.parametrize(
    ("page", "window", "chunk", "first", "fork", "reuse"),
    [(4, 8, 16, 40, 26, 16), (64, 128, 8192, 32_768, 32_000, 24_576), (1, 3, 10, 40, 25, 20)],
)
def test_a_fork_is_recomputed_once(
    page: int, window: int, chunk: int, first: int, fork: int, reuse: int
) -> None:
    """D28: SWA kept at chunk ends only; every fork before one was recomputed by every request."""
    cache = ByHand(page, window, checkpoints="branch", full_pages=2000, swa_pages=600)
    at = fork // page * page
    a = run_of(1, first)
    cache.put(a, chunk=chunk)
    b, c = (a[:fork] + run_of(n, 2 * page) for n in (2, 3))
    assert cache.match(b) == (at, reuse, at)
    cache.put(b)
    assert cache.match(c) == (at, at, None)
    assert cache.put(c) == at
    cache.drain()


def test_a_checkpoint_does_not_land_in_tokens_of_one_request_only() -> None:
    """D39: hits fell to nothing because the window was kept in the unique part."""
    cache = ByHand(64, 128, checkpoints="branch")
    shared = run_of(1, 2000)
    reused = [cache.put(shared + run_of(n, rest)) for n, rest in ((2, 1000), (3, 3000), (4, 3000))]
    assert reused == [0, 0, 2000 // 64 * 64]
    cache.drain()
