"""PinningCache: a cache that keeps some prefixes whatever is evicted; requests come in manager.py."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcache.checks import INT64, as_int_array, check_int, check_type
from kvcache.core import CacheCore
from kvcache.keys import KeyBatch
from kvcache.match_batch import MatchBatch
from kvcache.pins import PinResult
from kvcache.state import exclusive


class PinningCache(CacheCore):
    """The calls that pin prefixes and let them go."""

    @exclusive
    def pin(
        self, keys: KeyBatch, namespaces: npt.ArrayLike | None = None, *, ttl: int | None = None
    ) -> PinResult:
        """Keep what is cached of each key until `unpin`, or for `ttl` admissions. Host work only.

        A system prompt, or the conversation of a user who is about to answer: what a request with the key
        could reuse now stays, its last window included. Pins of both pools are bounded by
        `CacheConfig.pin_share`; rows and what else is cached share the rest. A pinned page is not evictable,
        and `capacity` does not count it.

        Args:
            keys: The batch of keys, as of `match`.
            namespaces: One handle for all, or [batch] handles; default: the default namespace.
            ttl: Admissions after which the pins end: with the call of `admit` that reaches it.

        Raises:
            CapacityError: The budget has no room for all of them; nothing was pinned.
            InvalidInputError: A handle is not of a standing namespace, or `ttl` is below 1.

        Example:
            >>> config = CacheConfig(page_size=4, window=8, full_pages=64, swa_pages=32, max_rows=2,
            ...                      max_len=64)
            >>> cache = KVCacheManager(config)
            >>> system = np.arange(16, dtype=np.int32)
            >>> rows = cache.admit(cache.match(KeyBatch(system, [0], [15])))
            >>> cache.extend(rows, [16])
            >>> cache.advance(rows)
            >>> cache.finish(rows, KeyBatch(system, [0], [16])).owned_len.tolist()
            [16]
            >>> pins, pinned_len = cache.pin(KeyBatch(system, [0], [16]))
            >>> pinned_len.tolist(), cache.flush()
            ([16], EvictResult(full_pages=0, swa_pages=1))
            >>> cache.unpin(pins)
            >>> cache.flush()
            EvictResult(full_pages=4, swa_pages=2)
        """
        state = self._state
        state.check_idle(launches=False)
        check_type("keys", keys, KeyBatch)
        if ttl is not None:
            ttl = check_int("ttl", ttl, low=1, high=2**62)
        handles = self._namespaces.handles(namespaces, len(keys))
        results = self.tree.match(keys.tokens, keys.starts, keys.lens, handles, None, touch=False)
        found = MatchBatch(results, handles, self.tree, keys.lens)
        state.pins.check_room(found.reuse_len)
        self._namespaces.end_look_up(handles)
        receipts = self.tree.pin(results)
        state.pins.add(receipts, found.reuse_len, ttl)
        return PinResult(receipts, found.reuse_len.copy())

    @exclusive
    def unpin(self, pins: npt.ArrayLike) -> None:
        """Let pinned prefixes go; they become the most recent of what can be evicted. Host work only.

        Args:
            pins: [n] receipts that `pin` gave.

        Raises:
            ReceiptError: One is of no standing pin, or comes twice; nothing was let go.
        """
        self._state.check_idle(launches=False)
        receipts = as_int_array("pins", pins, dtype=INT64)
        self._state.pins.check(receipts)
        self._release_pins(receipts)

    def _note_admitted(self, num: int) -> None:
        """Count admissions, and let those pins go whose time is over."""
        ended = self._state.pins.admitted(num)
        if ended is not None:
            self._release_pins(ended)

    def _release_pins(self, receipts: npt.NDArray[np.int64]) -> None:
        self._state.pins.remove(receipts)
        self.tree.unlock(receipts)
