"""Priorities of requests: what the windows that they make or use are worth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcache import CacheConfig, InvalidInputError, KeyBatch, KVCacheManager, Lru
from tests.manager.snapshot import changes, snapshot

FIRST, SECOND = [1] * 33, [2] * 33


def manager(**changed: Any) -> KVCacheManager:
    sizes: dict[str, Any] = {"full_pages": 64, "swa_pages": 64, "max_rows": 4, "max_len": 256}
    return KVCacheManager(CacheConfig(page_size=4, window=8, **{**sizes, **changed}))


def serve(cache: KVCacheManager, tokens: list[int], priority: Any = 0) -> None:
    rows = cache.admit(cache.match(KeyBatch.pack([tokens[:-1]])), priority=priority)
    cache.extend(rows, [len(tokens)])
    cache.advance(rows)
    cache.finish(rows, KeyBatch.pack([tokens]))


def standing(cache: KVCacheManager) -> list[bool]:
    """Whether the first and the second can be reused once half of the windows had to go."""
    cache.evict(0, cache.stats().tree_swa_pages // 2)
    found = cache.match(KeyBatch.pack([FIRST, SECOND]), touch=False)
    return [bool(n) for n in found.reuse_len]


def test_the_older_goes_first_of_two_that_are_worth_the_same() -> None:
    cache = manager()
    serve(cache, FIRST)
    serve(cache, SECOND)
    assert standing(cache) == [False, True]


@pytest.mark.parametrize(("first", "second"), [(1, 0), (0, -1), (16, -16), ([3], [2])])
def test_of_a_higher_priority_it_stays_longer(first: Any, second: Any) -> None:
    cache = manager()
    serve(cache, FIRST, first)
    serve(cache, SECOND, second)
    assert standing(cache) == [True, False]


def test_a_use_by_a_request_of_higher_priority_counts_too() -> None:
    cache = manager()
    serve(cache, FIRST)
    serve(cache, SECOND)
    cache.abort(cache.admit(cache.match(KeyBatch.pack([FIRST])), priority=8))
    cache.abort(cache.admit(cache.match(KeyBatch.pack([SECOND])), priority=4))
    assert standing(cache) == [True, False]


def test_a_use_of_lower_priority_takes_nothing_away() -> None:
    cache = manager()
    serve(cache, FIRST, 8)
    serve(cache, SECOND, 4)
    cache.abort(cache.admit(cache.match(KeyBatch.pack([FIRST])), priority=-8))
    cache.abort(cache.admit(cache.match(KeyBatch.pack([SECOND]))))
    assert standing(cache) == [True, False]


def test_a_priority_is_no_pin() -> None:
    cache = manager()
    serve(cache, FIRST, 2)
    for i in range(3, 1000):  # two octaves are 512 admissions
        serve(cache, [i] * 33)
    assert cache.match(KeyBatch.pack([FIRST])).reuse_len[0] == 0


def test_recency_knows_no_priorities() -> None:
    cache = manager(retention=Lru())
    serve(cache, FIRST, 16)
    serve(cache, SECOND, -16)
    assert standing(cache) == [False, True]


def test_each_request_of_a_batch_has_its_own() -> None:
    cache = manager()
    rows = cache.admit(cache.match(KeyBatch.pack([FIRST[:-1], SECOND[:-1]])), priority=[1, 0])
    cache.extend(rows, [33, 33])
    cache.advance(rows)
    cache.finish(rows, KeyBatch.pack([FIRST, SECOND]))
    assert standing(cache) == [True, False]


def test_wrong_priorities_change_nothing() -> None:
    cache = manager()
    batch = cache.match(KeyBatch.pack([FIRST, SECOND]))
    before = snapshot(cache)
    for wrong, message in (
        (17, r"^priority\[0\] must be in \[-16, 16\], got 17"),
        ([0, -17], r"^priority\[1\] must be in \[-16, 16\], got -17"),
        ([0], r"^priority must have 2 entries, got 1"),
        (0.5, r"^priority must be"),
        (True, r"^priority must be"),
        (np.zeros((2, 1), np.int64), r"^priority must be"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            cache.admit(batch, priority=wrong)
    assert not changes(before, snapshot(cache))
