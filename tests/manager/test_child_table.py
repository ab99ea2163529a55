"""The child table grows piece by piece: no call moves more than a few entries, and none is ever lost."""

from __future__ import annotations

import ctypes
import sys
from random import Random
from typing import Any

import numpy as np
import pytest

from kvcache import CacheConfig, KeyBatch, KVCacheManager
from kvcache.tree import arrays as a
from kvcache.tree.changes import SLOT_CHANGED


@pytest.fixture(autouse=True)
def small_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.tree.radix_tree.FIRST_LEVEL", 4)


def serve(cache: KVCacheManager, tokens: Any) -> None:
    keys = KeyBatch(tokens, [0], [len(tokens)])
    rows = cache.admit(cache.match(keys))
    cache.extend(rows, keys.lens)
    cache.advance(rows)
    cache.finish(rows, keys)


def cache_of(full_pages: int) -> KVCacheManager:
    return KVCacheManager(CacheConfig(1, None, full_pages, 0, 2, 8, checkpoints=()))


def test_a_call_that_files_a_node_moves_a_few_entries_at_most() -> None:
    cache = cache_of(3000)
    tree = cache.tree
    tree.log_changes(1 << 12)
    most, levels = 0, set()
    for token in np.random.default_rng(0).permutation(3000).astype(np.int32):
        serve(cache, np.array([token]))
        assert tree.meta[a.M_LOG_LOST] == 0
        log = tree.meta[tree.meta[a.M_LOG_AT] :][: tree.meta[a.M_LOG_LEN]]
        most = max(most, int((log & 3 == SLOT_CHANGED).sum()))
        tree.meta[a.M_LOG_LEN] = 0
        levels.add(int(tree.meta[a.M_TABLE_MASK]))
    assert sorted(levels) == [2**k - 1 for k in range(2, 14)]
    # four slots of the older level with what stands in a row behind them, and the new entry
    assert 4 < most <= 40
    assert tree.meta[a.M_NODES] == 3000
    cache.check()


@pytest.mark.parametrize("seed", range(3), ids=lambda s: f"seed{s}")
def test_every_node_is_found_while_the_table_grows_and_nodes_go(seed: int) -> None:
    rng = Random(seed)
    cache = cache_of(200)
    tree = cache.tree
    moving = 0
    for _ in range(250):
        if rng.random() < 0.15:
            cache.evict(rng.choice([1, 5, 30]))
        else:
            serve(cache, np.array([rng.randrange(60) for _ in range(rng.randint(1, 3))], np.int32))
        old, base = int(tree.meta[a.M_OLD_MASK]), int(tree.meta[a.M_OLD_BASE])
        moving += old > 0 and bool(tree.table[base : base + old + 1, a.NODE].any())
        cache.check()
    assert moving > 10


@pytest.mark.parametrize("pages", [1, 2, 3, 5, 64])
def test_the_last_level_has_room_for_a_node_on_each_page(pages: int) -> None:
    cache = cache_of(pages)
    for _ in range(2):
        for token in range(pages):
            serve(cache, np.array([token], np.int32))
        cache.check()
        assert cache.stats().nodes == pages
        missing = KeyBatch(np.arange(100, 400, dtype=np.int32), np.arange(300), np.ones(300, int))
        assert not cache.match(missing).full_hit_len.any()
        cache.flush()


def resident(array: Any) -> float:
    """The share of an array's memory pages that the system has given out."""
    first = array.ctypes.data // 4096 * 4096
    pages = (array.ctypes.data + array.nbytes - first + 4095) // 4096
    seen = np.zeros(pages, np.uint8)
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    done = mincore(
        ctypes.c_void_p(first), ctypes.c_size_t(pages * 4096), seen.ctypes.data_as(ctypes.c_void_p)
    )
    assert done == 0, ctypes.get_errno()
    return float((seen & 1).mean())


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_memory_that_calls_will_need_is_there_when_the_cache_is() -> None:
    """Else the first use of each page is a fault in the middle of a call."""
    cache = KVCacheManager(CacheConfig(64, None, 20_000, 0, 2, 640))
    tree = cache.tree
    assert resident(tree.tokens) == 1.0
    assert resident(tree.table) == 1.0
    assert resident(tree.nodes) == 1.0
    # the check can fail
    assert resident(np.zeros(1 << 22, np.int32)) < 0.5
