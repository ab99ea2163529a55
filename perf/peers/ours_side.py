"""kvcache as a Side: requests are rows of arrays, every call takes the batch."""

from __future__ import annotations

import numpy as np
from side import Ints, Match, SideConfig, Tokens

from kvcache import CacheConfig, KeyBatch, KVCacheManager
from kvcache.match_batch import MatchBatch
from kvcache.tree.arrays import M_SLAB_TOP


class OursSide:
    """The public API of kvcache, and the arrays that a scheduler would keep beside it."""

    name = "kvcache"
    batched = True

    def __init__(self, config: SideConfig) -> None:
        self.config = config
        page_size = config.page_size
        self.cache = KVCacheManager(
            CacheConfig(
                page_size=page_size,
                window=config.window,
                full_pages=config.full_tokens // page_size,
                swa_pages=config.swa_tokens // page_size,
                max_rows=config.max_running,
                max_len=config.max_len,
            )
        )
        # a 2-D token pool: the key of a request is a row of it, nothing is packed for a call
        self._stride = config.max_len
        self._pool = np.zeros(config.max_requests * self._stride, np.int32)
        self._starts = np.arange(config.max_requests, dtype=np.int64) * self._stride
        self._lens = np.zeros(config.max_requests, np.int64)
        self._known = np.zeros(config.max_requests, np.int64)
        self._rows = np.zeros(config.max_requests, np.int64)
        self._batch: MatchBatch | None = None

    def load(self, ids: Ints, tokens: Tokens, lens: Ints) -> None:
        pool = self._pool.reshape(-1, self._stride)
        pool[ids, : tokens.shape[1]] = tokens
        self._known[ids] = tokens.shape[1]
        self._lens[ids] = lens

    def set_lens(self, ids: Ints, lens: Ints) -> None:
        self._lens[ids] = lens

    def fill(self, ids: Ints, group: int) -> None:
        for first in range(0, ids.size, group):
            part = ids[first : first + group]
            self.match(part)
            self.admit(part)
            self.extend(part, self._lens[part])
            self.finish(part)

    def match(self, ids: Ints) -> None:
        keys = KeyBatch(self._pool, self._starts[ids], self._lens[ids] - 1)
        self._batch = self.cache.match(keys)

    def rematch(self, ids: Ints) -> None:
        keys = KeyBatch(self._pool, self._starts[ids], self._lens[ids] - 1)
        self._batch = self.cache.match(keys, previous=self._batch)

    def matched(self, ids: Ints) -> Match:
        assert self._batch is not None
        b = self._batch
        return Match(*(x.astype(np.int64) for x in (b.full_hit_len, b.reuse_len, b.branch_len)))

    def admit(self, ids: Ints) -> None:
        assert self._batch is not None
        self._rows[ids] = self.cache.admit(self._batch)

    def drop(self, ids: Ints) -> None:
        self.cache.abort(self._rows[ids])

    def extend(self, ids: Ints, lens: Ints) -> None:
        rows = self._rows[ids]
        self.cache.extend(rows, lens)
        self.cache.advance(rows)

    def step(self, ids: Ints) -> None:
        rows = self._rows[ids]
        self.cache.step(rows)
        self.cache.advance(rows)

    def commit(self, ids: Ints) -> None:
        keys = KeyBatch(self._pool, self._starts[ids], self._known[ids])
        self.cache.commit(self._rows[ids], keys)

    def slide(self, ids: Ints) -> None:
        self.cache.slide(self._rows[ids])

    tick = slide

    def finish(self, ids: Ints) -> None:
        keys = KeyBatch(self._pool, self._starts[ids], self._known[ids])
        self.cache.finish(self._rows[ids], keys)

    def evict(self, full_tokens: int, swa_tokens: int) -> tuple[int, int]:
        page_size = self.config.page_size
        freed = self.cache.evict(-(-full_tokens // page_size), -(-swa_tokens // page_size))
        return freed.full_pages * page_size, freed.swa_pages * page_size

    def free_tokens(self) -> tuple[int, int]:
        stats = self.cache.stats()
        page_size = self.config.page_size
        return stats.full_pages_free * page_size, stats.swa_pages_free * page_size

    def memory(self) -> dict[str, int]:
        stats = self.cache.stats()
        # page ids of the tree's slots are on the device: on a CPU host memory too
        slots = int(self.cache.tree.meta[M_SLAB_TOP])
        return {"tree_bytes": stats.host_bytes + 4 * slots, "nodes": stats.nodes}
