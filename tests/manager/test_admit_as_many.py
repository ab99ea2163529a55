"""admit_as_many: as many requests as can be admitted and extended, and not one more; found out by trying."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from by_hand import ByHand, run_of
from snapshot import changes, snapshot

from kvcache import (
    CacheConfig,
    CapacityError,
    Every,
    InvalidInputError,
    KeyBatch,
    KVCacheManager,
    MatchBatch,
    StaleMatchError,
)

CONFIGS: dict[str, dict[str, Any]] = {
    "page1": {"page_size": 1, "window": 3},
    "page2": {"page_size": 2, "window": 5},
    "page4": {"page_size": 4, "window": 8},
    "wide_window": {"page_size": 2, "window": 40},
    "bigram": {"page_size": 2, "window": 6, "bigram": True, "window_slack": 1},
    "full_only": {"page_size": 2, "window": None},
}
SEEDS = range(80)


@dataclass
class Queue:
    """A cache in the middle of its work, and requests that wait."""

    cache: KVCacheManager
    batch: MatchBatch
    index: list[int]
    new_len: list[int]
    spare: int

    def fits(self, num: int) -> bool:
        """Whether the first `num` can be admitted and extended; the cache is used up after that."""
        try:
            rows = self.cache.admit(self.batch, self.index[:num])
            self.cache.extend(rows, self.new_len[:num])
        except CapacityError:
            return False
        room = self.cache.capacity()
        full_only = self.cache.config.window is None
        return room.full_pages >= self.spare and (full_only or room.swa_pages >= self.spare)


def queue_of(name: str, seed: int) -> Queue:
    """The same queue for the same seed: few tokens and short keys, so that they share much."""
    rng = np.random.default_rng(seed)
    sizes = dict(CONFIGS[name])
    full, swa = (int(x) for x in rng.integers(8, 60, 2))
    cache = KVCacheManager(
        CacheConfig(
            **sizes,
            full_pages=full,
            swa_pages=swa if sizes["window"] else 0,
            max_rows=int(rng.integers(3, 9)),
            max_len=64,
            checkpoints=(Every(int(rng.integers(4, 20))),) if seed % 2 else (),
        )
    )
    texts = [rng.integers(0, 2, 64).astype(np.int32) for _ in range(2)]
    namespaces = [cache.namespace(None), cache.namespace("other")]

    def key() -> np.ndarray:
        text = texts[rng.integers(2)][: rng.integers(1, 64)].copy()
        at = int(rng.integers(0, 64))
        text[at:] += 2
        return text

    running: list[int] = []
    for _ in range(int(rng.integers(0, 25))):
        tokens = key()
        found = cache.match(KeyBatch.pack([tokens[:-1]]), namespaces[rng.integers(2)])
        try:
            (row,) = cache.admit(found).tolist()
        except CapacityError:
            continue
        try:
            cache.extend([row], [tokens.size])
        except CapacityError:
            cache.abort([row])
            continue
        cache.advance([row])
        what = rng.integers(4)
        if what == 0:
            cache.commit([row], KeyBatch.pack([tokens]))
            cache.slide([row])
            running.append(row)
        else:
            cache.finish([row], KeyBatch.pack([tokens]))
        if what == 1:
            cache.evict(0, int(rng.integers(0, 4)))
        if len(running) > 2:
            cache.abort([running.pop(0)])
    num = int(rng.integers(1, 7))
    keys = [key() for _ in range(num)]
    batch = cache.match(KeyBatch.pack(keys), [namespaces[rng.integers(2)] for _ in keys])
    index = rng.integers(0, num, int(rng.integers(1, 8))).tolist()
    new_len = [
        int(rng.integers(batch.reuse_len[i], min(int(batch.reuse_len[i]) + 12, 64) + 1))
        for i in index
    ]
    spare = int(rng.integers(0, 3)) if seed % 3 == 0 else 0
    return Queue(cache, batch, index, new_len, spare)


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_what_trying_finds(name: str) -> None:
    outcomes: Counter[str] = Counter()
    for seed in SEEDS:
        queue = queue_of(name, seed)
        queue.cache.admit_as_many(queue.batch, queue.new_len, queue.index)  # makes its scratch
        before = snapshot(queue.cache)
        got = queue.cache.admit_as_many(queue.batch, queue.new_len, queue.index, spare=queue.spare)
        assert changes(before, snapshot(queue.cache)) == []
        num = len(queue.index)
        tried = [queue_of(name, seed).fits(k) for k in range(num + 1)]
        most = sum(tried[1:])
        assert tried[1:] == [True] * most + [False] * (num - most)
        assert got == most, seed
        by_rows = most == queue.cache.capacity().rows
        outcomes[
            "all" if most == num else "rows" if by_rows else "none" if most == 0 else "some"
        ] += 1
    assert min(outcomes[kind] for kind in ("all", "rows", "some", "none")) >= 3, outcomes


# -- by hand: P = 4, one cached path of six pages, four pages free ------------------------------------------


def with_path() -> ByHand:
    c = ByHand(4, 8, full_pages=10, swa_pages=10, checkpoints="every=4")
    c.put(run_of(1, 24))
    return c


def ask(c: ByHand, lens: list[int], **kwargs: Any) -> int:
    """How many requests fit that reuse the whole path."""
    batch = c.m.match(KeyBatch.pack([run_of(1, 24) for _ in lens]))
    assert batch.reuse_len.tolist() == [24] * len(lens)
    return c.m.admit_as_many(batch, lens, **kwargs)


def test_a_prefix_that_two_requests_reuse_is_taken_away_once() -> None:
    # 10 pages: 6 are locked, 2 new ones for each
    assert ask(with_path(), [32, 32, 25]) == 2
    assert ask(with_path(), [28, 28, 28, 28, 24, 24]) == 6


def test_prefixes_of_two_lengths_are_taken_away_as_far_as_the_longer_one_reaches() -> None:
    c = with_path()
    short_first = c.m.match(KeyBatch.pack([run_of(1, 12), run_of(1, 24)]))
    assert c.m.admit_as_many(short_first, [12, 40]) == 2
    assert c.m.admit_as_many(short_first, [12, 44]) == 1
    assert c.m.admit_as_many(short_first, [40, 12], [1, 0]) == 2
    assert c.m.admit_as_many(short_first, [40, 16], [1, 0]) == 1


def test_what_a_running_request_locks_is_not_taken_away_again() -> None:
    c = with_path()
    c.start(run_of(1, 25))
    assert c.m.capacity().full_pages == 4
    assert ask(c, [32, 32, 25]) == 2


def test_pages_that_must_be_left_are_left() -> None:
    assert ask(with_path(), [32, 28, 28], spare=0) == 3
    assert ask(with_path(), [32, 28, 28], spare=1) == 2
    assert ask(with_path(), [32, 28, 28], spare=10) == 0


def test_only_the_window_of_a_reused_prefix_is_taken_from_the_swa_pool() -> None:
    c = ByHand(4, 8, full_pages=40, swa_pages=10, checkpoints="every=4")
    c.put(run_of(1, 24))
    assert c.m.capacity().swa_pages == 10
    # windows at 24 and 12 lock two pages each; one window twice counts once
    batch = c.m.match(KeyBatch.pack([run_of(1, 24), run_of(1, 12), run_of(1, 12)]))
    assert c.m.admit_as_many(batch, [36, 24, 12]) == 3
    assert c.m.admit_as_many(batch, [40, 24, 12]) == 1
    # windows at 12 and 16 share a page of theirs
    batch = c.m.match(KeyBatch.pack([run_of(1, 12), run_of(1, 16)]))
    assert c.m.admit_as_many(batch, [12, 44]) == 2
    assert c.m.admit_as_many(batch, [12, 48]) == 1


def test_requests_are_taken_in_the_order_of_the_index() -> None:
    c = with_path()
    batch = c.m.match(KeyBatch.pack([run_of(1, 24), run_of(2, 60)]))
    assert c.m.admit_as_many(batch, [24, 60]) == 1
    assert c.m.admit_as_many(batch, [60, 24], [1, 0]) == 0
    assert c.m.admit_as_many(batch, [24, 24, 24], [0, 0, 0]) == 3
    assert c.m.admit_as_many(batch, [], []) == 0


def test_a_request_that_admit_would_refuse_is_refused() -> None:
    c = with_path()
    batch = c.m.match(KeyBatch.pack([run_of(1, 24), run_of(2, 8)]))

    def refused(error: type[Exception], message: str, *args: Any, **kwargs: Any) -> None:
        before = snapshot(c.m)
        with pytest.raises(error, match=message):
            c.m.admit_as_many(*args, **kwargs)
        assert changes(before, snapshot(c.m)) == []

    refused(InvalidInputError, r"new_len must have 2 entries, got 1", batch, [24])
    refused(InvalidInputError, r"new_len\[0\] must be in \[24, 100000\], got 23", batch, [23, 8])
    refused(InvalidInputError, r"new_len\[1\] .* got 100001", batch, [24, 100001])
    refused(InvalidInputError, r"index must be in \[0, 2\)", batch, [24], [2])
    refused(InvalidInputError, r"spare must be >= 0, got -1", batch, [24, 8], spare=-1)
    refused(InvalidInputError, "must be a MatchBatch", batch.reuse_len, [24, 8])
    refused(
        InvalidInputError,
        "batch must be of this manager",
        with_path().m.match(KeyBatch.pack([run_of(1, 24)])),
        [24],
    )
    c.evict(full=1)
    refused(StaleMatchError, "request 0 must be matched again", batch, [24, 8])
    assert c.m.admit_as_many(batch, [8], [1]) == 1
