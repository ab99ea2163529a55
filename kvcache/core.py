"""CacheCore: what a manager is made of, and what is asked of its pools; requests come in manager.py."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from kvcache.checks import check_int, check_type
from kvcache.config import CacheConfig
from kvcache.data_plane import NO_RANGES, DataPlane
from kvcache.device_match import DeviceMatcher
from kvcache.errors import CapacityError, ClosedError, InvalidInputError
from kvcache.integrity import check_manager
from kvcache.kernels.translate import translate
from kvcache.namespaces import Namespaces
from kvcache.pools import Pools
from kvcache.rows import Int32Array, Rows
from kvcache.stats import Capacity, EvictResult, Stats
from kvcache.tree.radix_tree import RadixTree
from kvcache.views import PageIndices, PageTable, Views


class CacheCore:
    """Tree, rows, namespaces and data plane of one cache; capacity, eviction and counts."""

    def __init__(self, config: CacheConfig) -> None:
        check_type("config", config, CacheConfig)
        self.config = config
        self.rows = Rows(config)
        self.tree = RadixTree(
            page_size=config.page_size,
            keep_pages=config.keep_pages,
            bigram=config.bigram,
            num_slots=config.full_pages,
            max_locks=config.max_rows,
            max_roots=config.max_namespaces,
        )
        self._plane = DataPlane(config)
        self._namespaces = Namespaces(self.tree)
        self.views = Views(self)
        self._matcher: DeviceMatcher | None = None
        self._evicted_full = 0
        self._evicted_swa = 0
        self._closed = False
        self._stepping = False  # in the body of DecodeStep.running

    # -- what the engine may read ------------------------------------------------------------------------

    @property
    def pools(self) -> Pools:
        """The device tensors; `pools.page_table` is what a full-attention backend reads."""
        self._check_open()
        return self._plane.pools

    def capacity(self) -> Capacity:
        """Return the rows and pages that can be had now, evictable ones included."""
        self._check_open()
        tree, plane = self.tree, self._plane
        return Capacity(
            self.rows.num_free,
            plane.full_top + tree.full_pages - tree.locked_full_pages,
            plane.swa_top + tree.swa_pages - tree.locked_swa_pages,
        )

    def stats(self) -> Stats:
        """Return all counts. Costs no device work."""
        self._check_open()
        tree, plane, config = self.tree, self._plane, self.config
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
            evicted_full_pages=self._evicted_full,
            evicted_swa_pages=self._evicted_swa,
            host_bytes=tree.memory_bytes,
            device_bytes=plane.pools.nbytes + (self._matcher.mirror.nbytes if self._matcher else 0),
        )

    def check(self) -> None:
        """Check every invariant of tree, rows and pools, page by page. Reads the device: for tests only.

        Raises:
            IntegrityError: One is broken; the message names it.
        """
        self._check_open()
        check_manager(self)

    # -- namespaces ------------------------------------------------------------------------------------------

    def namespace(self, key: Hashable) -> int:
        """Return the handle of a namespace (adapter, salt, tenant); `None` is the default one.

        Asking again gives the same handle while the namespace stands. Where `max_namespaces` are in use, an
        empty one makes room.

        Raises:
            CapacityError: `max_namespaces` are in use and none is empty.
        """
        self._check_idle()
        return self._namespaces.handle(key)

    def drop_namespace(self, handle: int) -> EvictResult:
        """Free everything that is cached in a namespace and the namespace itself; its handle dies.

        Raises:
            InvalidInputError: No such namespace, the default one, or a request runs in it.
        """
        self._check_idle()
        handle = int(self._namespaces.handles(handle, 1, "handle")[0])
        if handle == self._namespaces.default:
            raise InvalidInputError("handle must not be of the default namespace; use flush()")
        if self.tree.is_locked(handle):
            raise InvalidInputError(f"handle must be of a namespace that no row uses, got {handle}")
        ranges, full, swa = self.tree.drop_root(handle)
        self._namespaces.forget(handle)
        return self._free(ranges, full, swa)

    # -- pages -----------------------------------------------------------------------------------------------

    def evict(self, full_pages: int = 0, swa_pages: int = 0) -> EvictResult:
        """Free at least so many pages of what is cached and unlocked, or all there is; least recent first.

        Raises:
            InvalidInputError: A negative number.
        """
        self._check_idle()
        full_pages = min(check_int("full_pages", full_pages, low=0), self.config.full_pages)
        swa_pages = min(check_int("swa_pages", swa_pages, low=0), self.config.swa_pages)
        ranges, full, swa = self.tree.evict(full_pages, swa_pages)
        return self._free(ranges, full, swa)

    def flush(self) -> EvictResult:
        """Free everything that is cached and unlocked."""
        return self.evict(self.tree.full_pages, self.tree.swa_pages)

    def _free(self, ranges: Int32Array, full: int, swa: int) -> EvictResult:
        self._evicted_full += full
        self._evicted_swa += swa
        if len(ranges):
            self._plane.apply(ranges)
        return EvictResult(full, swa)

    def _make_room(self, pages: int) -> Int32Array:
        """Evict until `pages` pages of each pool are free; return the ranges that the device must free."""
        tree, plane = self.tree, self._plane
        full = pages - plane.full_top
        swa = pages - plane.swa_top if self.config.has_swa else 0
        if full <= 0 and swa <= 0:
            return NO_RANGES
        for name, need, evictable in (
            ("Full", full, tree.full_pages - tree.locked_full_pages),
            ("SWA", swa, tree.swa_pages - tree.locked_swa_pages),
        ):
            if need > evictable:
                raise CapacityError(
                    f"{pages} {name} pages needed, {pages - need} are free and {evictable} evictable"
                )
        ranges, freed_full, freed_swa = tree.evict(max(full, 0), max(swa, 0))
        self._evicted_full += freed_full
        self._evicted_swa += freed_swa
        return ranges

    def translate(self, slots: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the SWA token slot of every Full token slot; see kvcache.kernels.translate."""
        self._check_open()
        if not self.config.has_swa:
            raise InvalidInputError("translate needs a config with a window, got window=None")
        check_type("slots", slots, torch.Tensor)
        if out is not None:
            check_type("out", out, torch.Tensor)
        out = translate(slots, self.pools.swa_map, page_size=self.config.page_size, out=out)
        self._plane.launches += 1 if slots.numel() else 0
        return out

    def swa_page_table(self, rows: Any, lens: Any = None) -> PageTable:
        """Return the padded page table of the SWA window of rows; see kvcache.views."""
        return self.views.swa_page_table(rows, lens)

    def swa_indices(self, rows: Any, lens: Any = None) -> PageIndices:
        """Return the SWA pages of the window of rows as CSR; see kvcache.views."""
        return self.views.swa_indices(rows, lens)

    # -- shared checks ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Drop the device memory. Every later call raises ClosedError; closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        del self._plane
        self.views = Views(self)
        self._matcher = None

    def _device_matcher(self) -> DeviceMatcher:
        if self._matcher is None:
            self._matcher = DeviceMatcher(self.tree, self._plane)
        return self._matcher

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the manager was closed")

    def _check_idle(self) -> None:
        """Raise unless the manager is open, and no decode step is between its launches and its counts."""
        self._check_open()
        if self._stepping:
            raise InvalidInputError(
                "this call must wait until DecodeStep.running is left: its body may only replay the step"
            )
