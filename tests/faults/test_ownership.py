"""Ownership, leaks, double frees: faults D01 to D16 of caches of this kind, each widened to its kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from by_hand import ByHand, run_of

from kvcache import CapacityError, IntegrityError, KeyBatch

PAGE_AND_WINDOW = [(1, 3), (4, 4), (4, 8), (4, 6), (8, 2), (16, 40)]


@pytest.mark.parametrize(("page", "window"), PAGE_AND_WINDOW)
def test_a_healed_tombstone_takes_the_new_swa_pages_and_frees_none(page: int, window: int) -> None:
    """D01: healing freed the SWA page that a stale map entry named, someone else's by then."""
    cache = ByHand(page, window)
    keep = -(-window // page)
    kept = keep + 1  # the windows before the end, and before the page before it
    shared = run_of(1, (keep + 2) * page)
    cache.put(
        shared + run_of(2, (keep + 1) * page)
    )  # window at the end only: `shared` is tombstone
    row = cache.start([*shared, 7])
    assert cache.m.rows.computed_len[cache.index(row)] == 0
    cache.compute(row, len(shared))
    mine = cache.pages(row)
    free_before = cache.free_pages()

    cache.finish(row, shared)

    reader = cache.start([*shared, 8])
    names = cache.pages(reader)
    assert cache.m.rows.owned_len[cache.index(reader)] == len(shared)
    assert not set(names) & set(mine), "the tree's Full pages stay"
    # the last windows' SWA pages are the healer's, under the tree's Full pages; nothing of it was freed
    free_full, free_swa = cache.free_pages()
    assert set(mine) <= free_full - free_before[0]
    assert all(p > 0 for p in cache.swa_of(names[-kept:]))
    assert len(free_swa - free_before[1]) == len(mine) - kept
    assert cache.swa_of(mine) == [0] * len(mine)
    cache.drain()


@pytest.mark.parametrize("accepted", [10, 11, 12, 13, 14])
@pytest.mark.parametrize("drafted", [12, 14, 16])
def test_pages_of_rejected_drafts_go_back_once(drafted: int, accepted: int) -> None:
    """D02: off by exactly one page with speculation and page_size > 1."""
    cache = ByHand(4, 8)
    key = run_of(1, 16)
    row = cache.start(key)
    cache.compute(row, 10)
    cache.m.extend([row], [drafted])
    cache.m.advance([row], [min(accepted, drafted)])
    cache.m.check()

    owned = cache.finish(row, key[: min(accepted, drafted)])

    assert owned == min(accepted, drafted) // 4 * 4
    assert cache.m.stats().full_pages_free == 400 - owned // 4
    cache.drain()


@pytest.mark.parametrize("resume", range(8, 17))
def test_a_shorter_resume_finds_no_page_of_the_longer_run(resume: int) -> None:
    """D03: [prefix, allocated) was overwritten before it was freed."""
    cache = ByHand(4, None)
    key = run_of(1, 20)
    row = cache.start(key)
    cache.compute(row, 12)
    cache.m.extend([row], [16])
    cache.m.retract([row], KeyBatch.pack([key]))
    cache.m.check()
    assert cache.m.stats().full_pages_free == 400 - 3
    row = cache.start(key[:resume])
    assert cache.m.rows.computed_len[cache.index(row)] == min((resume - 1) // 4 * 4, 12)
    cache.compute(row, resume)
    cache.drain()


def test_pages_freed_behind_a_sequence_are_not_cached_again() -> None:
    """D04: the finishing insert covered pages that were already free."""
    cache = ByHand(1, 4)
    key = run_of(1, 12)
    row = cache.start(key[:4])
    cache.compute(row, 4)
    for length in range(5, 13):
        cache.compute(row, length)
        cache.slide(row)
    cache.finish(row, key)
    assert cache.m.stats().tree_swa_pages == 5
    assert cache.match(key) == (12, 12, None)
    assert cache.match(key[:-1]) == (11, 11, None)
    cache.drain()


@pytest.mark.parametrize(("page", "window"), PAGE_AND_WINDOW)
def test_what_slid_out_before_a_commit_is_a_tombstone(page: int, window: int) -> None:
    """D05: the unfinished path forgot what had been freed."""
    cache = ByHand(page, window)
    keep = -(-window // page)
    key = run_of(1, (keep + 6) * page)
    row = cache.start(key)
    cache.compute(row, len(key))
    cache.slide(row)
    cache.commit(row, key)
    assert cache.match(key) == (len(key), len(key), None)
    assert cache.m.stats().tree_swa_pages == keep + 1
    cache.finish(row, key)
    assert cache.match(key[:-page])[:2] == (len(key) - page, len(key) - page)
    assert cache.match(key[: -2 * page])[:2] == (len(key) - 2 * page, 0)
    cache.drain()


def test_a_locked_tombstone_path_is_healed_in_place() -> None:
    """D06: insert and rematch used different criteria; the tree rejected what it had just taken."""
    cache = ByHand(4, 8)
    prefix = run_of(1, 16)
    first = cache.start(prefix + run_of(2, 20))
    cache.compute(first, 17)
    cache.commit(first, prefix + run_of(2, 20))
    cache.compute(first, 33)
    cache.slide(first)  # a window past the prefix: its SWA is unlocked
    assert cache.evict(swa=2) == (0, 2)
    before = cache.pages(first)

    key = prefix + run_of(3, 4)
    second = cache.start([*key, 5])
    assert cache.m.rows.computed_len[cache.index(second)] == 0
    cache.compute(second, 21)
    mine = cache.pages(second)
    swa_mine = cache.swa_of(mine)
    cache.commit(second, [*key, 5])

    assert cache.match(key) == (20, 20, None)
    assert cache.pages(first) == before
    assert cache.pages(second) == [*before[:4], *mine[4:]]
    assert cache.swa_of([before[3], mine[4]]) == swa_mine[3:5]
    assert set(mine[:4]) <= cache.free_pages()[0]
    cache.drain()


def test_full_kv_is_kept_where_swa_is_gone() -> None:
    """D07: SWA vetoed a leaf wholly outside the window."""
    cache = ByHand(4, 4)
    key = run_of(1, 16)
    row = cache.start(key + run_of(2, 20))
    cache.compute(row, 17)
    cache.commit(row, key + run_of(2, 20))
    cache.compute(row, 25)
    cache.slide(row)
    assert cache.evict(swa=1) == (0, 1)
    cache.m.abort([row])
    cache.m.check()
    assert cache.match(key) == (16, 0, 16)
    cache.drain()


@pytest.mark.parametrize("one_call", [False, True])
@pytest.mark.parametrize("window", [None, 4, 8, 100])
def test_rows_that_computed_the_same_name_the_same_pages(
    window: int | None, one_call: bool
) -> None:
    """D08: duplicates were freed and the page table not repointed."""
    cache = ByHand(4, window)
    key = run_of(1, 16)
    rows = [cache.start([*key, n]) for n in range(3)]
    keys = KeyBatch.pack([key] * 3)
    for row in rows:
        cache.compute(row, 16)
    if one_call:
        cache.m.commit(rows, keys)
        cache.m.check()
    else:
        for row in rows:
            cache.commit(row, key)
    pages = [cache.pages(row) for row in rows]
    assert pages[0] == pages[1] == pages[2]
    assert not set(pages[0]) & cache.free_pages()[0]
    assert cache.m.stats().full_pages_free == 400 - 4
    cache.drain()


@pytest.mark.parametrize("pool", ["Full", "SWA"])
def test_the_checker_sees_two_owners_where_sums_balance(pool: str) -> None:
    """D09: two rows named one page, counters agreed."""
    cache = ByHand(4, 8)
    rows = [cache.start(run_of(n, 9)) for n in (1, 2)]
    for row in rows:
        cache.compute(row, 8)
    pools: Any = cache.m.pools
    first, second = cache.m.index(rows).tolist()
    if pool == "Full":
        pools.page_table[first, 0] = pools.page_table[second, 0]
    else:
        a, b = pools.page_table[[first, second], 0].tolist()
        pools.swa_map[a] = pools.swa_map[b]
    with pytest.raises(IntegrityError, match=r"P1|P2"):
        cache.m.check()


@pytest.mark.parametrize(("length", "hit"), [(16, 12), (17, 16)])
def test_unused_pages_are_taken_before_cached_ones(length: int, hit: int) -> None:
    """D10: a prompt sent again hit nothing, though half the pool had never been used."""
    cache = ByHand(4, None, full_pages=16)
    a = run_of(1, length)
    cache.put(a)
    cache.put(a[:4] + run_of(2, 12))
    assert cache.put(a) == hit
    assert cache.m.stats().evicted_full_pages == 0
    cache.drain()


def test_lack_of_swa_evicts_swa_only() -> None:
    """D11: "KV cache is full" with plenty of SWA evictable: eviction asked for Full."""
    cache = ByHand(4, 4, full_pages=121, swa_pages=21, checkpoints="every=4")
    cache.put(run_of(1, 21 * 4))
    assert cache.m.stats().swa_pages_free == 0
    row = cache.start(run_of(2, 21))
    cache.compute(row, 20)
    stats = cache.m.stats()
    assert (stats.evicted_full_pages, stats.evicted_swa_pages) == (0, 5)
    cache.drain()


def test_a_second_commit_with_nothing_new_changes_nothing() -> None:
    """D13: the same request was cached twice."""
    cache = ByHand(4, 8)
    key = run_of(1, 18)
    row = cache.start(key)
    cache.compute(row, 18)
    assert cache.commit(row, key) == 16
    before = cache.m.stats(), cache.pages(row), cache.free_pages()
    assert cache.commit(row, key) == 16
    assert (cache.m.stats(), cache.pages(row), cache.free_pages()) == before
    cache.drain()


@pytest.mark.parametrize("refused", [False, True])
def test_only_what_is_computed_is_cached(refused: bool) -> None:
    """D14, D16: a chunk that was refused, or not run yet, was cached; later hits were garbage."""
    cache = ByHand(4, 8, swa_pages=6 if refused else 400)
    key = run_of(1, 33)
    row = cache.start(key)
    cache.compute(row, 16)
    cache.commit(row, key)
    if refused:
        with pytest.raises(CapacityError, match="SWA"):
            cache.m.extend([row], [33])
    else:
        cache.m.extend([row], [32])
    cache.m.retract([row], KeyBatch.pack([key]))
    cache.m.check()
    assert cache.match(key) == (16, 16, None)
    cache.drain()


def test_random_lives_leave_nothing_behind() -> None:
    """The kind behind D01 to D16: whatever a request goes through, all its pages come back once."""
    rng = np.random.default_rng(5)
    for page, window in PAGE_AND_WINDOW:
        cache = ByHand(page, window, checkpoints="branch,every=7", full_pages=120, swa_pages=60)
        trunk = run_of(1, 20 * page)
        for n in range(30):
            cut = int(rng.integers(0, len(trunk)))
            key = trunk[:cut] + run_of(n + 2, int(rng.integers(1, 8 * page)))
            cache.put(key, chunk=int(rng.integers(1, 10)) * page)
        cache.drain()
