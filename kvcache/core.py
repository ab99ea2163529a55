"""CacheCore: what a manager is made of, and what is asked of its pools; requests come in manager.py."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from kvcache.checks import check_int, check_type
from kvcache.config import CacheConfig
from kvcache.device.device_match import DeviceMatcher
from kvcache.device.pools import Pools
from kvcache.device.views import PageIndices, PageTable, Views
from kvcache.errors import InvalidInputError
from kvcache.integrity import check_state
from kvcache.kernels.translate import translate
from kvcache.namespaces import Namespaces
from kvcache.results import Capacity, EvictResult, Stats
from kvcache.rows import Int32Array, Int64Array
from kvcache.state import CacheState


class CacheCore:
    """Tree, rows, namespaces and data plane of one cache; capacity, eviction and counts."""

    def __init__(self, config: CacheConfig) -> None:
        check_type("config", config, CacheConfig)
        self.config = config
        self._state = CacheState(config)
        self.rows = self._state.rows
        self.tree = self._state.tree
        self.views = Views(self)
        self._namespaces = Namespaces(self.tree)
        self._matcher: DeviceMatcher | None = None

    # -- what the engine may read ------------------------------------------------------------------------

    @property
    def pools(self) -> Pools:
        """The device tensors; `pools.page_table` is what a full-attention backend reads."""
        self._state.check_open()
        return self._state.plane.pools

    def capacity(self) -> Capacity:
        """Return the rows and pages that can be had now, evictable ones included."""
        self._state.check_open()
        tree, plane = self.tree, self._state.plane
        return Capacity(
            self.rows.num_free,
            plane.full_top + tree.full_pages - tree.locked_full_pages,
            plane.swa_top + tree.swa_pages - tree.locked_swa_pages,
        )

    def stats(self) -> Stats:
        """Return all counts. Costs no device work."""
        self._state.check_open()
        tree, plane, config = self.tree, self._state.plane, self.config
        return Stats(
            full_pages_free=plane.full_top,
            swa_pages_free=plane.swa_top,
            tree_full_pages=tree.full_pages,
            tree_swa_pages=tree.swa_pages,
            locked_full_pages=tree.locked_full_pages,
            locked_swa_pages=tree.locked_swa_pages,
            row_full_pages=config.full_pages - plane.full_top - tree.full_pages,
            row_swa_pages=config.swa_pages - plane.swa_top - tree.swa_pages,
            running_rows=config.max_rows - self.rows.num_free,
            namespaces=len(self._namespaces),
            nodes=tree.num_nodes,
            launches=plane.launches,
            uploads=plane.staging.uploads,
            upload_bytes=plane.staging.upload_bytes,
            evicted_full_pages=self._state.evicted_full,
            evicted_swa_pages=self._state.evicted_swa,
            host_bytes=tree.memory_bytes,
            device_bytes=plane.pools.nbytes + (self._matcher.mirror.nbytes if self._matcher else 0),
        )

    def check(self) -> None:
        """Check every invariant of tree, rows and pools, page by page. Reads the device: for tests only.

        Raises:
            IntegrityError: One is broken; the message names it.
        """
        self._state.check_open()
        check_state(self._state)

    # -- namespaces ------------------------------------------------------------------------------------------

    def namespace(self, key: Hashable) -> int:
        """Return the handle of a namespace (adapter, salt, tenant); `None` is the default one.

        As `namespaces` of one key.

        Raises:
            CapacityError: `max_namespaces` are in use, and none may be given up.
        """
        self._state.check_idle()
        try:
            known = self._namespaces.known(key)
        except TypeError as error:  # a tuple is hashable by its type, with a list in it not
            raise InvalidInputError(f"key must be hashable, got {key!r}") from error
        return int(self._look_up([key])[0]) if known is None else known

    def namespaces(self, keys: Sequence[Hashable]) -> Int64Array:
        """Return the handles of the namespaces of a queue, [keys] int64, to be passed to `match`.

        Asking again gives the same handle while the namespace stands. A handle is safe until the next match,
        and from its admission on for as long as its row runs. Otherwise its namespace may make room for
        another one where `max_namespaces` are in use: with all that is cached in it, the least recently
        looked up first; one that a row runs in when room is made counts as looked up then. The default
        namespace stays. A call of a dead handle is refused, and looking its key up makes it anew.

        Raises:
            CapacityError: More namespaces than fit; the message names the first key that does not, and no
                handle was given out or died.
            InvalidInputError: A key that cannot be hashed.

        Example:
            >>> config = CacheConfig(page_size=4, window=None, full_pages=8, swa_pages=0, max_rows=2,
            ...                      max_len=64, max_namespaces=3)
            >>> cache = CacheCore(config)
            >>> len(set(cache.namespaces(["adapter", "salt", "adapter", None]).tolist()))
            3
        """
        self._state.check_idle()
        return self._look_up(keys)

    def _look_up(self, keys: Iterable[Hashable]) -> Int64Array:
        found = self._namespaces.look_up(keys)
        if found.ranges is not None:
            self._free(found.ranges, found.full_pages, found.swa_pages)
        return found.handles

    def drop_namespace(self, handle: int) -> EvictResult:
        """Free everything that is cached in a namespace and the namespace itself; its handle dies.

        Raises:
            InvalidInputError: No such namespace, the default one, or a request runs in it.
        """
        self._state.check_idle()
        handle = int(self._namespaces.handles(handle, 1, "handle")[0])
        if handle == self._namespaces.default:
            raise InvalidInputError("handle must not be of the default namespace; use flush()")
        if self.tree.is_locked(handle):
            raise InvalidInputError(f"handle must be of a namespace that no row uses, got {handle}")
        ranges, full, swa = self.tree.drop_roots(np.array([handle], np.int64))
        self._namespaces.forget(handle)
        return self._free(ranges, full, swa)

    # -- pages -----------------------------------------------------------------------------------------------

    def evict(self, full_pages: int = 0, swa_pages: int = 0) -> EvictResult:
        """Free at least so many pages of what is cached and unlocked, or all there is; least recent first.

        Raises:
            InvalidInputError: A negative number.
        """
        self._state.check_idle()
        full_pages = min(check_int("full_pages", full_pages, low=0), self.config.full_pages)
        swa_pages = min(check_int("swa_pages", swa_pages, low=0), self.config.swa_pages)
        ranges, full, swa = self.tree.evict(full_pages, swa_pages)
        return self._free(ranges, full, swa)

    def flush(self) -> EvictResult:
        """Free everything that is cached and unlocked."""
        return self.evict(self.tree.full_pages, self.tree.swa_pages)

    def _free(self, ranges: Int32Array, full: int, swa: int) -> EvictResult:
        self._state.evicted_full += full
        self._state.evicted_swa += swa
        if len(ranges):
            self._state.plane.apply(ranges)
        return EvictResult(full, swa)

    def translate(self, slots: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the SWA token slot of every Full token slot; see kvcache.kernels.translate."""
        self._state.check_open()
        if not self.config.has_swa:
            raise InvalidInputError("translate needs a config with a window, got window=None")
        check_type("slots", slots, torch.Tensor)
        if out is not None:
            check_type("out", out, torch.Tensor)
        out = translate(slots, self.pools.swa_map, page_size=self.config.page_size, out=out)
        self._state.plane.launches += 1 if slots.numel() else 0
        return out

    def swa_page_table(self, rows: Any, lens: Any = None) -> PageTable:
        """Return the padded page table of the SWA window of rows; see kvcache.device.views."""
        return self.views.swa_page_table(rows, lens)

    def swa_indices(self, rows: Any, lens: Any = None) -> PageIndices:
        """Return the SWA pages of the window of rows as CSR; see kvcache.device.views."""
        return self.views.swa_indices(rows, lens)

    # -- shared checks ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Drop the device memory. Every later call raises ClosedError; closing again does nothing."""
        if self._state.closed:
            return
        self._state.closed = True
        del self._state.plane
        self.views = Views(self)
        self._matcher = None

    def _device_matcher(self) -> DeviceMatcher:
        if self._matcher is None:
            self._matcher = DeviceMatcher(self.tree, self._state.plane)
        return self._matcher
