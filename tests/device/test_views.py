"""Views of a living cache hold what attention reads, all of it live; launches and uploads of each."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from view_contract import listed_tokens

from kvcache import (
    CacheConfig,
    CapacityError,
    InvalidInputError,
    KeyBatch,
    KVCacheManager,
    ReceiptError,
)
from kvcache.device.views import PageIndices, Views

CONFIG = CacheConfig(
    page_size=4, window=6, full_pages=80, swa_pages=40, max_rows=5, max_len=64, window_slack=0
)


class Life:
    """Rows that are admitted, prefilled in chunks, decoded, committed, slid and finished at random."""

    def __init__(self, seed: int, config: CacheConfig) -> None:
        self.rng = random.Random(seed)
        self.cache = KVCacheManager(config)
        self.config = config
        self.keys: dict[int, np.ndarray[Any, Any]] = {}
        self.past = [np.zeros(0, np.int32)]

    def act(self) -> None:
        name = self.rng.choice(["admit", "chunk", "chunk", "step", "commit", "slide", "finish"])
        if name == "admit" and self.cache.rows.num_free:
            base = self.rng.choice(self.past)
            new = [self.rng.randrange(3) for _ in range(self.rng.randint(1, 30))]
            key = np.append(base[: self.rng.randint(0, base.size)], new)[: self.config.max_len]
            key = key.astype(np.int32)
            batch = self.cache.match(KeyBatch(key, [0], [key.size - 1]))
            self.keys[int(self.cache.admit(batch)[0])] = key
        elif self.keys and name != "admit":
            rows = self.rng.sample(sorted(self.keys), self.rng.randint(1, len(self.keys)))
            try:
                getattr(self, f"_{name}")(rows)
            except CapacityError:
                self._finish(rows[:1])

    def _chunk(self, rows: list[int]) -> None:
        computed = self.cache.rows.computed_len[self.cache.index(rows)]
        lens = [
            min(self.keys[r].size, c + self.rng.randint(0, 9))
            for r, c in zip(rows, computed.tolist(), strict=True)
        ]
        self.cache.extend(rows, lens)

    def _step(self, rows: list[int]) -> None:
        rows = [
            r
            for r in rows
            if self.cache.rows.computed_len[self.cache.index([r])[0]] < self.config.max_len
        ]
        self.cache.step(rows)

    def _advance(self, rows: list[int]) -> None:
        self.cache.advance(rows)
        for row in rows:
            grown = (
                int(self.cache.rows.allocated_len[self.cache.index([row])[0]]) - self.keys[row].size
            )
            if grown > 0:
                new = [self.rng.randrange(3) for _ in range(grown)]
                self.keys[row] = np.append(self.keys[row], new).astype(np.int32)

    def _commit(self, rows: list[int]) -> None:
        self._advance(rows)
        self.cache.commit(rows, KeyBatch.pack([self.keys[r] for r in rows]))

    def _slide(self, rows: list[int]) -> None:
        self._advance(rows)
        self.cache.slide(rows)

    def _finish(self, rows: list[int]) -> None:
        self._advance(rows)
        keys = [self.keys.pop(r) for r in rows]
        self.cache.finish(rows, KeyBatch.pack(keys))
        self.past = (self.past + keys)[-6:]


def page_of(cache: KVCacheManager, row: int, token: int, *, swa: bool) -> int:
    (index,) = cache.index([row])
    page = int(cache.pools.page_table[index, token // cache.config.page_size])
    return int(cache.pools.swa_map[page]) if swa else page


def check_views(cache: KVCacheManager, rows: list[int], lens: list[int] | None) -> int:
    """Check all six views of rows against the pools; return how many SWA tokens were read."""
    size = cache.config.page_size
    kv_lens = cache.rows.allocated_len[cache.index(rows)].tolist() if lens is None else lens
    computed = cache.rows.computed_len[cache.index(rows)].tolist()
    views = cache.views
    seen = 0
    for swa, table, pages, slots in (
        (False, views.page_table, views.full_indices, views.token_slots),
        (True, views.swa_page_table, views.swa_indices, views.swa_token_slots),
    ):
        window = cache.config.window if swa else 0
        assert window is not None
        as_table, as_pages, as_slots = table(rows, lens), pages(rows, lens), slots(rows, lens)
        assert as_table.page_table.shape[1] % 16 == 0
        for i, row in enumerate(rows):
            tokens, start = listed_tokens(computed[i], kv_lens[i], window, size)
            ids = [page_of(cache, row, t, swa=swa) for t in tokens]
            assert all(ids), "a query of the next forward would read a page that is not there"
            want = [ids[j] for j in range(0, len(ids), size)]
            line = as_table.page_table[i].tolist()
            assert line == want + [0] * (len(line) - len(want))
            assert int(as_table.cache_seqlens[i]) == kv_lens[i] - start
            assert int(as_table.window_start[i]) == int(as_pages.window_start[i]) == start
            assert row_of(as_pages, i) == want
            whole = (len(want) - 1) * size
            assert int(as_pages.last_page_len[i]) == (kv_lens[i] - start - whole if want else 0)
            tokens, start = listed_tokens(computed[i], kv_lens[i], window, 1)
            want = [page_of(cache, row, t, swa=swa) * size + t % size for t in tokens]
            assert row_of(as_slots, i) == want
            assert int(as_slots.window_start[i]) == start
            seen += len(tokens) if swa else 0
    return seen


def row_of(view: PageIndices, i: int) -> list[int]:
    first, end = view.indptr[i : i + 2].tolist()
    return view.indices[first:end].tolist()


@pytest.mark.parametrize("seed", range(3), ids=lambda s: f"seed{s}")
@pytest.mark.parametrize(
    ("page_size", "window", "slack", "bigram"),
    [(4, 6, 0, False), (1, 3, 1, False), (4, 9, 1, True), (8, 2, 0, False), (3, 12, 1, False)],
)
def test_views_of_a_living_cache(
    page_size: int, window: int, slack: int, bigram: bool, seed: int
) -> None:
    config = CacheConfig(
        page_size=page_size,
        window=window,
        window_slack=slack,
        bigram=bigram,
        full_pages=240 // page_size,
        swa_pages=160 // page_size,
        max_rows=5,
        max_len=60,
    )
    life = Life(seed, config)
    seen = 0
    for _ in range(300):
        life.act()
        rows = life.rng.sample(sorted(life.keys), life.rng.randint(0, len(life.keys)))
        state = life.cache.rows
        lens = None
        if life.rng.random() < 0.3:
            index = life.cache.index(rows)
            lens = [life.rng.randint(state.computed_len[r], state.allocated_len[r]) for r in index]
        seen += check_views(life.cache, rows, lens)
    assert seen > 200, "too little was read: the test shows nothing"


def running(config: CacheConfig = CONFIG, lens: tuple[int, ...] = (5, 16)) -> tuple[Any, Any]:
    cache = KVCacheManager(config)
    tokens = np.arange(100, dtype=np.int32)
    keys = KeyBatch(tokens, np.zeros(len(lens), np.int64), np.array(lens) - 1)
    rows = cache.admit(cache.match(keys))
    cache.extend(rows, lens)
    return cache, rows


def test_a_view_is_one_launch_and_uploads_rows_once() -> None:
    cache, rows = running()
    cache.advance(rows)
    before = cache.stats()
    cache.views.page_table(rows)
    cache.swa_indices(rows)
    cache.views.swa_token_slots(rows)
    after = cache.stats()
    assert after.launches - before.launches == 3
    assert after.uploads == before.uploads  # the rows are there from `advance`
    cache.swa_page_table(rows[::-1])
    cache.swa_page_table(rows[::-1], [16, 5])
    assert cache.stats().uploads - after.uploads == 2


def test_buffers_do_not_move() -> None:
    cache, rows = running()
    first = cache.swa_page_table(rows), cache.views.token_slots(rows)
    cache.extend(rows, [30, 30])
    again = cache.swa_page_table(rows[:1]), cache.views.token_slots(rows[:1])
    for old, new in zip(first, again, strict=True):
        for a, b in zip(old, new, strict=True):
            assert a.data_ptr() == b.data_ptr()


def test_no_rows() -> None:
    cache, _ = running()
    assert cache.views.page_table([]).page_table.shape == (0, 0)
    view = cache.views.full_indices([])
    assert (view.indptr.tolist(), view.indices.tolist()) == ([0], [])


def test_slots_of_either_width_and_beyond_the_buffer() -> None:
    cache, rows = running()
    views = Views(cache, max_slots=21)
    narrow, wide = views.token_slots(rows), views.token_slots(rows, dtype=torch.int64)
    assert wide.indices.dtype == torch.int64
    assert narrow.indices.tolist() == wide.indices.tolist()
    cache.extend(rows, [6, 16])
    with pytest.raises(InvalidInputError, match=r"at most 21 entries \(max_slots\), got 22"):
        views.token_slots(rows)
    with pytest.raises(InvalidInputError, match=r"dtype must be torch\.int32 or torch\.int64"):
        views.token_slots(rows, dtype=torch.int16)


def test_refuses_bad_rows_and_lengths() -> None:
    cache, rows = running()
    with pytest.raises(
        ReceiptError, match=r"rows\[0\] must be the handle of a running request, got 9"
    ):
        cache.swa_indices([9])
    with pytest.raises(InvalidInputError, match=r"rows\[1\] must be named once"):
        cache.swa_indices([rows[0], rows[0]])
    with pytest.raises(InvalidInputError, match=r"lens\[1\] must be in \[0, 16\], got 17"):
        cache.swa_indices(rows, [5, 17])
    with pytest.raises(InvalidInputError, match="lens must have 2 entries, got 1"):
        cache.swa_indices(rows, [5])


def test_no_swa_views_without_a_window() -> None:
    config = CacheConfig(
        page_size=4, window=None, full_pages=40, swa_pages=0, max_rows=2, max_len=64
    )
    cache, rows = running(config)
    assert cache.views.full_indices(rows).indptr.tolist() == [0, 2, 6]
    for method in (cache.swa_page_table, cache.swa_indices, cache.views.swa_token_slots):
        with pytest.raises(InvalidInputError, match="config with a window, got window=None"):
            method(rows)
