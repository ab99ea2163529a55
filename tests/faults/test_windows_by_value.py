"""Retention by value: which windows are there, which one goes, what is learned; victims beside the oracle."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from by_hand import ByHand, run_of

from kvcache import CacheConfig, InvalidInputError, Ladder, Lru, Value, parse_checkpoints
from kvcache.policies.retention import parse_retention
from kvcache.tree import arrays as a
from kvcache.tree.value import log2_fixed
from kvcache.validate import Driver


def by_value(page: int, window: int, checkpoints: str = "branch,ladder", **config: Any) -> ByHand:
    return ByHand(page, window, checkpoints=checkpoints, retention=Value(), **config)


def ends(cache: ByHand) -> list[int]:
    """Pages at which a window ends, of all windows, ascending."""
    f = cache.m.tree.nodes
    nodes = f[a.HEAP, 1 : int(cache.m.tree.meta[a.M_WINDOWS]) + 1]
    return sorted((f[a.DEPTH, nodes] + f[a.PAGES, nodes]).tolist())


# -- which windows are kept --------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [None, 96, 256])
def test_rungs_double_their_distance_from_the_end_of_the_prompt(chunk: int | None) -> None:
    cache = by_value(16, 32, "ladder")
    cache.put(run_of(1, 1600), chunk=chunk)
    # 100 pages; the prompt without its last token ends at 99, 1600 - 128 * 2^k tokens are 92, 84, 68, 36
    assert ends(cache) == [36, 68, 84, 92, 99, 100]
    for forked in (600, 1100, 1350, 1480):
        fork = run_of(1, forked) + run_of(2, 64)
        full, reuse, _ = cache.match(fork)
        assert full == forked // 16 * 16
        assert 1600 - reuse <= 2 * (1600 - forked) + 16
    cache.drain()


def test_a_ladder_of_ones_own_measure() -> None:
    cache = by_value(16, 16, "none")
    cache.m.close()
    config = CacheConfig(16, 16, 400, 400, 4, 2000, checkpoints=(Ladder(64, 4),), retention=Value())
    assert config.ladder == Ladder(first=64, factor=4)
    cache = ByHand(16, 16)
    cache.m = type(cache.m)(config)
    cache.put(run_of(1, 1600))
    assert ends(cache) == [36, 84, 96, 99, 100]
    cache.drain()


def test_a_ladder_serves_retention_by_recency_too() -> None:
    cache = ByHand(16, 32, checkpoints="ladder")
    cache.put(run_of(1, 1600))
    assert cache.match(run_of(1, 92 * 16) + run_of(2, 16)) == (92 * 16, 92 * 16, None)
    assert cache.match(run_of(1, 90 * 16) + run_of(2, 16))[1] == 84 * 16
    cache.drain()


def test_the_ends_of_chunks_keep_nothing() -> None:
    cache = by_value(16, 32, "none")
    key = run_of(1, 1600)
    cache.put(key, chunk=160)
    cache.m.evict(swa_pages=0)
    assert ends(cache) == [99, 100]
    assert cache.m.stats().tree_swa_pages > 3, "what the row left behind goes only when it must"
    cache.evict(swa=cache.m.stats().tree_swa_pages - 3)
    assert ends(cache) == [99, 100]
    assert cache.match(key) == (1600, 1600, None)
    cache.drain()


def test_eight_idle_sessions_keep_their_reuse_while_chunks_go_through_a_small_pool() -> None:
    """shared/cases/chunk_windows.py: windows at chunk ends outlived the last windows of older sessions."""
    page, length = 64, 32_768
    cache = by_value(
        page, 128, "branch", full_pages=8 * 530, swa_pages=168, max_rows=8, max_len=1 << 17
    )
    keys = [run_of(i + 1, length + 1) for i in range(8)]
    for key in keys:
        row = cache.start(key[:length])
        for end in range(8192, length + 1, 8192):
            cache.m.extend([row], [end])
            cache.m.advance([row])
            cache.commit(row, key[:end])
            cache.m.slide([row])
        cache.finish(row, key[:length])
    assert [cache.match(key)[1] for key in keys] == [length] * 8
    cache.drain()


def test_a_rung_whose_pages_the_row_has_freed_keeps_nothing() -> None:
    cache = by_value(16, 32, "ladder")
    key = run_of(1, 1600)
    row = cache.start(key)
    cache.compute(row, 1600)
    cache.slide(row)
    cache.finish(row, key)
    assert ends(cache) == [99, 100]
    assert cache.match(run_of(1, 1480) + run_of(2, 64))[1] == 0
    cache.drain()


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("bigram", [False, True])
def test_a_prompt_that_is_sent_again_is_reused_but_for_its_last_unit(
    page: int, bigram: bool
) -> None:
    for length in range(2, 5 * page + 3):
        cache = by_value(page, 2 * page, "none", bigram=bigram, max_len=6 * page + 8)
        key = run_of(1, length)
        cache.put(key)
        row = cache.start(key)
        units = length - bigram
        assert cache.m.rows.computed_len[cache.index(row)] == max(units - 1, 0) // page * page
        cache.m.abort([row])
        cache.drain()


# -- which one goes ----------------------------------------------------------------------------------------


def test_a_whole_window_goes_before_another_loses_a_page() -> None:
    cache = by_value(16, 64, "none", swa_pages=64)
    keys = [run_of(i, 161) for i in range(6)]
    for key in keys:
        cache.put(key)
    cache.evict(swa=cache.m.stats().tree_swa_pages - 24)
    before = sum(cache.match(key)[1] > 0 for key in keys)
    assert before == 6
    for _ in range(3):
        cache.evict(swa=1)
    assert sum(cache.match(key)[1] > 0 for key in keys) == 5
    cache.drain()


def test_what_is_used_stays_and_what_nobody_came_back_to_goes() -> None:
    cache = by_value(16, 16, "hints", full_pages=2000, swa_pages=60)
    shared, once = run_of(1, 160), [run_of(10 + i, 160) for i in range(100)]
    for i in range(4):
        cache.put(shared + run_of(200 + i, 40), hints=[160])
    for key in once:
        cache.put(key)
    assert cache.match([*shared, 7])[1] == 160
    assert sum(cache.match([*key, 7])[1] > 0 for key in once) < 60
    cache.drain()


def test_full_pages_that_no_window_reaches_go_with_it() -> None:
    cache = by_value(16, 16, "none", full_pages=400, swa_pages=12)
    for i in range(30):
        cache.put(run_of(i, 160))
    stats = cache.m.stats()
    assert stats.tree_full_pages <= 12 * 10
    cache.drain()


def test_a_locked_window_is_not_given_up() -> None:
    cache = by_value(16, 32, "none", swa_pages=16)
    key = run_of(1, 160)
    cache.put(key)
    row = cache.start([*key, 5])
    cache.evict(swa=100)
    assert cache.match(key) == (160, 160, None)
    cache.m.abort([row])
    cache.evict(swa=100)
    assert cache.match(key)[1] == 0
    cache.drain()


# -- the numbers -------------------------------------------------------------------------------------------


def test_the_logarithm_is_that_of_mathematics() -> None:
    import math

    values = [*range(1, 3000), *(2**k + d for k in range(12, 45) for d in (-1, 0, 1))]
    for x in values:
        assert abs(int(log2_fixed(x)) - 256 * math.log2(x)) < 2.5, x
    assert all(int(log2_fixed(x)) <= int(log2_fixed(x + 1)) for x in values)


def test_many_admissions_give_the_oracles_victims_one_by_one() -> None:
    """Long enough for what is learned to fade, keys to be stale, and rungs to be turned away."""
    d = Driver(
        page_size=2,
        window=4,
        full_pages=160,
        swa_pages=44,
        max_rows=3,
        max_len=64,
        branch=True,
        ladder=(4, 2),
        value=True,
        check_every=40,
    )
    rng = random.Random(3)
    texts = [[rng.randrange(9) for _ in range(50)] for _ in range(12)]
    for i in range(450):
        text = texts[min(int(rng.expovariate(0.4)), 11)]
        if rng.random() < 0.6:  # never seen again
            text = [rng.randrange(100, 1000) for _ in range(50)]
        key = text[: rng.randint(4, 50)] + [rng.randrange(9) for _ in range(rng.randint(1, 8))]
        if i % 3 == 0:
            texts[rng.randrange(12)] = (key + [rng.randrange(9) for _ in range(50)])[:50]
        d.match(f"m{i}", [[None, key, len(key) - 1]], None, True)
        d.admit(f"m{i}", [0], [f"r{i}"])
        d.extend([f"r{i}"], [len(key)])
        d.advance([f"r{i}"])
        d.commit([f"r{i}"], [0])
        d.slide([f"r{i}"])
        d.finish([f"r{i}"], [0])
    counts = Counter(d.oracle.counts)
    assert d.oracle.admissions == 450
    assert counts["given_up"] > 100
    assert counts["not_admitted"] > 3
    assert any(w.inherited for w in d.oracle.windows)


# -- arguments ---------------------------------------------------------------------------------------------


def test_policies_by_name() -> None:
    assert parse_retention("lru") == Lru()
    assert parse_retention(" value ") == Value()
    assert parse_checkpoints("branch,ladder")[1] == Ladder(first=128, factor=2)
    for wrong in ("", "LRU", "value,lru", "best"):
        with pytest.raises(InvalidInputError, match=r"^retention must be lru or value, got"):
            parse_retention(wrong)
    for wrong_first in (0, -1, 1.5, 2**31):
        with pytest.raises(InvalidInputError, match=r"^first must be"):
            Ladder(wrong_first)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match=r"^factor must be >= 2|^factor must be in"):
        Ladder(factor=1)
    with pytest.raises(InvalidInputError, match=r"^retention must be Lru"):
        CacheConfig(4, 8, 8, 8, 1, 8, retention="value")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("touch", "others", "stays"), [(True, 60, 32), (True, 70, 0), (False, 60, 0)]
)
def test_what_a_waiting_request_has_matched_goes_last(touch: bool, others: int, stays: int) -> None:
    cache = by_value(16, 16, "none", swa_pages=40)
    key = [1] * 33
    cache.put(key)
    for i in range(20):
        cache.put([100 + i] * 33)
    cache.match(key, touch=touch)  # it waits while others come
    for i in range(others):
        cache.put([200 + i] * 33)
    assert cache.match(key)[1] == stays
