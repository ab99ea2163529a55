"""Locks: faults D42 to D47, and what a scheduler does between them."""

from __future__ import annotations

import numpy as np
import pytest
from by_hand import ByHand, run_of

from kvcache import CapacityError, KeyBatch
from kvcache.errors import ReceiptError
from kvcache.tree.arrays import FULL_LOCKS, M_FULL_LOCKED, M_SWA_LOCKED, SWA_LOCKS
from kvcache.tree.check import check_tree
from kvcache.tree.insert import AT, BRANCH_AT, INSERT_END, KEY_LEN, NUM_REQUEST, RECEIPT
from kvcache.tree.match import FULL_NODE
from kvcache.tree.radix_tree import RadixTree


class Path:
    """A tree with one long path, live or not, and locks on it."""

    def __init__(self, page: int, keep: int, pages: int, every: int = 0) -> None:
        self.tree = RadixTree(
            page_size=page,
            keep_pages=keep,
            bigram=False,
            num_slots=3 * pages,
            max_locks=64,
            max_roots=2,
        )
        self.page = page
        self.root = np.array([self.tree.new_root()])
        self.keys = np.arange(pages * page, dtype=np.int32)
        receipt = self.tree.lock(self.root & 0xFFFFFFFF, np.zeros(1, np.int64))
        self.insert(receipt, pages, every)
        self.tree.unlock(receipt)

    def insert(self, receipt: np.ndarray, pages: int, every: int = 0) -> None:
        request = np.zeros((1, NUM_REQUEST), np.int64)
        request[0, [AT, KEY_LEN, INSERT_END, BRANCH_AT, RECEIPT]] = (
            0,
            self.keys.size,
            pages,
            -1,
            receipt[0],
        )
        self.tree.insert(self.keys, request, np.zeros(0, np.int64), every)
        check_tree(self.tree)

    def lock(self, tokens: int) -> np.ndarray:
        found = self.tree.match(
            self.keys, np.zeros(1, np.int64), np.array([tokens]), self.root, touch=False
        )
        receipt = self.tree.lock(found[FULL_NODE].astype(np.int64), np.array([tokens // self.page]))
        check_tree(self.tree)
        return receipt

    def locked(self) -> tuple[int, int]:
        meta = self.tree.meta
        return int(meta[M_FULL_LOCKED]), int(meta[M_SWA_LOCKED])


def test_a_release_needs_its_own_receipt_once() -> None:
    """D42: an empty receipt unlocked other requests' SWA."""
    path = Path(4, 2, 16, every=4)
    first, second = path.lock(64), path.lock(32)
    assert path.locked() == (16, 4)
    for wrong in (np.array([-1]), np.array([7]), first + (5 << 32), np.concatenate([first, first])):
        with pytest.raises(ReceiptError, match="receipts"):
            path.tree.unlock(wrong)
        with pytest.raises(ReceiptError, match="receipts"):
            path.tree.release_swa(wrong)
        assert path.locked() == (16, 4)
        check_tree(path.tree)
    path.tree.unlock(first)
    assert path.locked() == (8, 2)
    with pytest.raises(ReceiptError):
        path.tree.unlock(first)
    third = path.lock(64)
    assert third[0] != first[0], "the lock's record is used again, its receipt is not"
    path.tree.unlock(np.concatenate([second, third]))
    assert path.locked() == (0, 0)
    check_tree(path.tree)


@pytest.mark.parametrize("every", [0, 4])
def test_receipts_survive_splits(every: int) -> None:
    """D43, D44: counts fell below 0 after a locked node was split twice; both receipts stay exact."""
    path = Path(4, 2, 16, every=every)
    receipts = [path.lock(n) for n in (64, 64, 48)]
    nodes = path.tree.num_nodes
    for tokens in (60, 52, 20, 44):
        short = path.lock(tokens)
        assert path.tree.num_nodes > nodes, "a lock that ends within a node splits it"
        path.tree.unlock(short)
        if every == 0:
            assert path.tree.num_nodes == nodes, "what its release leaves alike is joined again"
        nodes = path.tree.num_nodes  # live pages differ in recency: not all of them are joined
        assert path.locked()[0] == 16
    for tokens in (56, 60, 52, 20, 44):
        receipts.append(path.lock(tokens))
        assert path.locked()[0] == 16
    assert path.tree.num_nodes > nodes
    for receipt in receipts:
        path.tree.unlock(receipt)
        check_tree(path.tree)
    assert path.locked() == (0, 0)
    standing = path.tree.nodes[SWA_LOCKS] >= 0
    assert standing.sum() > 1
    assert not path.tree.nodes[FULL_LOCKS, standing].any()
    assert (path.tree.nodes[SWA_LOCKS] <= 0).all()


def test_healing_a_locked_tombstone_keeps_the_sums() -> None:
    """D45: protected and evictable sizes drifted when a tombstone was revived under a lock."""
    path = Path(4, 4, 16)
    # Full pages locked, their SWA partly tombstone, partly locked
    receipt = path.lock(56)
    assert path.locked() == (14, 2)
    healer = path.tree.lock(path.root & 0xFFFFFFFF, np.zeros(1, np.int64))
    path.insert(healer, 14)
    assert path.locked() == (14, 4)
    path.tree.unlock(receipt)
    check_tree(path.tree)
    assert path.locked() == (14, 4)
    path.tree.unlock(healer)
    check_tree(path.tree)
    assert path.locked() == (0, 0)


@pytest.mark.parametrize("end", ["finish", "abort", "retract"])
def test_swa_released_early_is_not_released_again(end: str) -> None:
    """D46: early SWA release, then lock again by a commit, then finish: each count goes down once."""
    cache = ByHand(4, 8)
    key = run_of(1, 80)
    cache.put(key[:64])
    row = cache.start(key)
    other = cache.start(key[:65])
    assert cache.m.stats().locked_swa_pages == 2
    cache.compute(row, 76)
    cache.slide(row)
    assert cache.m.stats().locked_swa_pages == 2, "the other request still needs that window"
    cache.m.abort([other])
    assert cache.m.stats().locked_swa_pages == 0
    cache.commit(row, key)
    assert cache.m.stats().locked_swa_pages == 2
    if end == "abort":
        cache.m.abort([row])
    else:
        getattr(cache.m, end)([row], KeyBatch.pack([key]))
    cache.m.check()
    assert cache.m.stats().locked_swa_pages == cache.m.stats().locked_full_pages == 0
    cache.drain()


@pytest.mark.parametrize(("page", "window"), [(4, 8), (4, 6), (1, 3), (16, 8), (64, 128)])
def test_a_lock_pins_one_window(page: int, window: int) -> None:
    """D47: a lock pinned a whole long node."""
    cache = ByHand(page, window, checkpoints="every=1", full_pages=5000, swa_pages=5000)
    key = run_of(1, 4096)
    cache.put(key)
    assert cache.m.stats().tree_swa_pages == 4096 // page
    cache.start([*key, 5])
    pinned = cache.m.stats().locked_swa_pages * page
    assert pinned <= -(-window // page) * page + page
    assert cache.evict(swa=10**6)[1] * page == 4096 - pinned
    cache.drain()


def test_a_locked_prefix_costs_no_room_twice() -> None:
    """D49: the window was charged twice on resume."""
    cache = ByHand(4, 8, swa_pages=5)
    key = run_of(1, 16)
    cache.put(key[:16])
    row = cache.start([*key, 1, 2, 3, 4])
    assert cache.m.rows.computed_len[cache.index(row)] == 16
    assert cache.m.capacity().swa_pages == 3
    cache.compute(row, 20)
    cache.drain()


def test_a_request_larger_than_the_pool_is_refused_with_a_reason() -> None:
    """D48: it waited for ever, silently; smaller chunks run."""
    cache = ByHand(4, 4, swa_pages=6)
    key = run_of(1, 64)
    row = cache.start(key)
    with pytest.raises(CapacityError, match="16 SWA pages needed, 6 are free and 0 evictable"):
        cache.m.extend([row], [64])
    for length in range(16, 65, 16):
        cache.compute(row, length)
        cache.commit(row, key)
    cache.finish(row, key)
    assert cache.match(key) == (64, 64, None)
    cache.drain()
