"""A manager driven by hand, one request at a time: every call is followed by a check of all invariants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvcache import CacheConfig, KeyBatch, KVCacheManager, Lru, Ragged, parse_checkpoints

Hit = tuple[int, int, int | None]


def run_of(name: int, length: int) -> list[int]:
    """A run of tokens of its own: no two names share a token."""
    return list(range(name * 100_000, name * 100_000 + length))


class ByHand:
    """A cache and short ways to say what happens to one request."""

    def __init__(
        self,
        page_size: int,
        window: int | None,
        *,
        full_pages: int = 400,
        swa_pages: int = 400,
        checkpoints: str = "none",
        **config: Any,
    ) -> None:
        self.m = KVCacheManager(
            CacheConfig(
                page_size=page_size,
                window=window,
                full_pages=full_pages,
                swa_pages=0 if window is None else swa_pages,
                max_rows=config.pop("max_rows", 16),
                max_len=config.pop("max_len", 100_000),
                checkpoints=parse_checkpoints(checkpoints),
                debug=True,
                retention=config.pop("retention", Lru()),
                **config,
            )
        )

    def match(
        self, key: Sequence[int], namespace: int | None = None, *, touch: bool = False
    ) -> Hit:
        """(full_hit_len, reuse_len, branch_len or None) of the whole key. By default it only looks."""
        batch = self.m.match(KeyBatch.pack([key]), namespace, touch=touch)
        branch = int(batch.branch_len[0])
        return (
            int(batch.full_hit_len[0]),
            int(batch.reuse_len[0]),
            None if branch < 0 else branch,
        )

    def start(self, key: Sequence[int], namespace: int | None = None) -> int:
        """Match the key but for its last token, and admit; return the handle of the row."""
        batch = self.m.match(KeyBatch.pack([key[:-1]]), namespace)
        row = int(self.m.admit(batch)[0])
        self.m.check()
        return row

    def index(self, row: int) -> int:
        """The row's index in `m.rows`."""
        return int(self.m.index([row])[0])

    def compute(self, row: int, length: int) -> None:
        """Extend the row to `length` tokens and compute them."""
        self.m.extend([row], [length])
        self.m.advance([row])
        self.m.check()

    def commit(self, row: int, key: Sequence[int], hints: Iterable[int] = ()) -> int:
        done = self.m.commit([row], KeyBatch.pack([key]), Ragged.pack([list(hints)]))
        self.m.check()
        return int(done.owned_len[0])

    def finish(self, row: int, key: Sequence[int], hints: Iterable[int] = ()) -> int:
        done = self.m.finish([row], KeyBatch.pack([key]), Ragged.pack([list(hints)]))
        self.m.check()
        return int(done.owned_len[0])

    def slide(self, row: int) -> None:
        self.m.slide([row])
        self.m.check()

    def put(
        self,
        key: Sequence[int],
        *,
        chunk: int | None = None,
        hints: Iterable[int] = (),
        namespace: int | None = None,
    ) -> int:
        """Run a request from match to finish, committing after each chunk; return what it reused."""
        hints = list(hints)
        row = self.start(key, namespace)
        reused = int(self.m.rows.computed_len[self.index(row)])
        at = reused
        while at < len(key):
            # chunk ends are absolute, as in an engine with a fixed budget
            at = len(key) if chunk is None else min(len(key), (at // chunk + 1) * chunk)
            self.compute(row, at)
            if at < len(key):
                self.commit(row, key, hints)
        self.finish(row, key, hints)
        return reused

    def evict(self, full: int = 0, swa: int = 0) -> tuple[int, int]:
        freed = self.m.evict(full, swa)
        self.m.check()
        return freed.full_pages, freed.swa_pages

    # -- pages, read from the device: by tests only ---------------------------------------------------------

    def pages(self, row: int) -> list[int]:
        """Full pages that the row names."""
        index = self.index(row)
        held = -(-int(self.m.rows.allocated_len[index]) // self.m.config.page_size)
        return [int(p) for p in self.m.pools.page_table[index, :held].cpu()]

    def swa_of(self, full_pages: Iterable[int]) -> list[int]:
        """SWA page under each Full page, 0 = none."""
        swa_map = self.m.pools.swa_map.cpu().numpy()
        return [int(swa_map[p]) for p in full_pages]

    def free_pages(self) -> tuple[set[int], set[int]]:
        full, swa = (int(n) for n in self.m.pools.tops.cpu())
        return (
            set(self.m.pools.full_stack[:full].tolist()),
            set(self.m.pools.swa_stack[:swa].tolist()),
        )

    def drain(self) -> None:
        """End all rows and flush: every page of both pools is free again, exactly once."""
        self.m.abort(self.m.rows.running())
        self.m.flush()
        self.m.check()
        config, stats = self.m.config, self.m.stats()
        assert (stats.full_pages_free, stats.swa_pages_free) == (
            config.full_pages,
            config.swa_pages,
        )
        assert stats.locked_full_pages == stats.locked_swa_pages == stats.nodes == 0
