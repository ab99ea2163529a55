"""CacheCore: what a manager is made of, and what is asked of its pools; requests come in manager.py."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvcache.allocation import allocating
from kvcache.checks import INT64, as_indices, as_int_array, check_int, check_type
from kvcache.config import CacheConfig
from kvcache.device.device_match import DeviceMatcher
from kvcache.device.pools import Pools
from kvcache.device.views import PageIndices, PageTable, Views
from kvcache.errors import InvalidInputError, StaleMatchError
from kvcache.integrity import check_state
from kvcache.kernels.translate import translate
from kvcache.match_batch import MatchBatch
from kvcache.namespaces import Namespaces
from kvcache.requests import running_rows
from kvcache.results import Capacity, EvictResult, Stats
from kvcache.rows import Int32Array, Int64Array
from kvcache.state import CacheState, exclusive
from kvcache.types import Lens, Rows
from kvcache.uncopied import Uncopied


class CacheCore(Uncopied):
    """Tree, rows, namespaces and data plane of one cache; capacity, eviction and counts."""

    def __init__(self, config: CacheConfig) -> None:
        check_type("config", config, CacheConfig)
        with allocating():
            self._state = CacheState(config)
        self.config = self._state.config
        self.rows = self._state.rows
        self.tree = self._state.tree
        self.views = Views(self)
        self._namespaces = Namespaces(self.tree)
        self._matcher: DeviceMatcher | None = None

    def __repr__(self) -> str:
        config, state = self.config, self._state
        about = f"page_size={config.page_size}, window={config.window}, device={config.device!r}"
        if state.closed:
            return f"{type(self).__name__}({about}, closed)"
        running = config.max_rows - self.rows.num_free
        free = f"{state.plane.full_top} of {config.full_pages} Full pages"
        if config.has_swa:
            free += f" and {state.plane.swa_top} of {config.swa_pages} SWA pages"
        rows = f"{running} of {config.max_rows} rows running"
        return f"{type(self).__name__}({about}: {rows}, {free} free)"

    def warm_up(self) -> None:
        """Have all that any call may run compiled and loaded, so that no request waits for it.

        A small cache with the flags of this one makes every call once; this one is not touched. Waits for
        the device. What it takes, and how to have it done when an image is built: docs/startup.md.
        """
        from kvcache.warmup import warm_up  # which imports the manager, and that this module

        self._state.check_idle()
        warm_up(self.config)

    # -- what the engine may read ------------------------------------------------------------------------

    @property
    def pools(self) -> Pools:
        """The device tensors; `pools.page_table` is what a full-attention backend reads."""
        self._state.check_open()
        return self._state.plane.pools

    def capacity(self) -> Capacity:
        """Return the rows and pages that can be had now, evictable ones included."""
        state = self._state
        if state.closed or state.broken is not None:
            state.check_open()
        tree, plane = state.tree, state.plane
        return Capacity(
            self.rows.num_free,
            plane.full_top + tree.full_pages - tree.locked_full_pages,
            plane.swa_top + tree.swa_pages - tree.locked_swa_pages,
        )

    def index(self, rows: Rows) -> Int32Array:
        """Return [n] int32 indices of the rows that handles name: for `cache.rows`, or an engine's arrays.

        Raises:
            ReceiptError: A handle of a request that has ended, or that was never given out.
            InvalidInputError: A row named twice.
        """
        self._state.check_open()
        return running_rows(self.rows, rows).copy()

    def admit_as_many(
        self,
        batch: MatchBatch,
        new_len: Lens,
        index: npt.ArrayLike | None = None,
        *,
        spare: int = 0,
    ) -> int:
        """Return how many requests, taken in order, can be admitted and extended now. Host work only.

        The largest k for which `rows = admit(batch, index[:k])` and then `extend(rows, new_len[:k])` raise no
        CapacityError. Evictable pages count as free, but for those that the requests would reuse.

        Args:
            batch: Result of a match on the host, or of `fetch` of one on the device.
            new_len: [n] tokens that each request is to hold, reuse_len <= new_len <= max_len.
            index: [n] which requests of the batch, in the order of admission; default: all.
            spare: Pages of each pool that must be left, for rows that run already, say.

        Raises:
            StaleMatchError: A prefix, or what is behind it in the tree, lost a page since the match.
            InvalidInputError: A length or an index is out of range, or the batch is of another manager.

        Example:
            >>> num = cache.admit_as_many(batch, ends)
            >>> rows = cache.admit(batch, range(num))
            >>> cache.extend(rows, ends[:num])
        """
        self._state.check_idle(launches=False)
        check_type("batch", batch, MatchBatch)
        self._check_owner("batch", batch)
        num, config = len(batch), self.config
        chosen = np.arange(num) if index is None else as_indices("index", index, num)
        lens: Int64Array = as_int_array("new_len", new_len, dtype=INT64)
        spare = check_int("spare", spare, low=0)
        if lens.size != chosen.size:
            raise InvalidInputError(f"new_len must have {chosen.size} entries, got {lens.size}")
        reuse = batch.reuse_len[chosen]
        bad = np.flatnonzero((lens < reuse) | (lens > config.max_len))
        if bad.size:
            raise InvalidInputError(
                f"new_len[{bad[0]}] must be in [{reuse[bad[0]]}, {config.max_len}], got {lens[bad[0]]}"
            )
        stale = self.tree.still_holds(batch.results, chosen, batch.namespaces)
        if stale >= 0:
            raise StaleMatchError(f"request {stale} must be matched again: its prefix was evicted")
        room, size = self.capacity(), config.page_size
        return self.tree.how_many_fit(
            batch.results,
            chosen[: room.rows],
            (lens + size - 1) // size - reuse // size,
            room.full_pages - spare,
            room.swa_pages - spare,
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
            pins=len(self._state.pins),
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

    @exclusive
    def check(self) -> None:
        """Check every invariant of tree, rows and pools, page by page. Reads the device: for tests only.

        Raises:
            IntegrityError: One is broken; the message names it.
        """
        self._state.check_stream()
        check_state(self._state)

    # -- namespaces ------------------------------------------------------------------------------------------

    def namespace(self, key: Hashable) -> int:
        """Return the handle of a namespace (adapter, salt, tenant); `None` is the default one.

        As `namespaces` of one key.

        Raises:
            CapacityError: `max_namespaces` are in use, and none may be given up.
        """
        if key is None:
            self._state.check_idle(launches=False)
            return self._namespaces.default
        return self._namespace(key)

    @exclusive
    def _namespace(self, key: Hashable) -> int:
        self._state.check_idle(launches=False)
        try:
            known = self._namespaces.known(key)
        except TypeError as error:  # a tuple is hashable by its type, with a list in it not
            raise InvalidInputError(f"key must be hashable, got {key!r}") from error
        return int(self._look_up([key])[0]) if known is None else known

    @exclusive
    def namespaces(self, keys: Sequence[Hashable]) -> Int64Array:
        """Return the handles of the namespaces of a queue, [keys] int64, to be passed to `match`.

        Asking again gives the same handle while the namespace stands. A handle is safe until the next match,
        and from its admission on for as long as its row runs. Otherwise its namespace may make room for
        another one where `max_namespaces` are in use: with all that is cached in it, the least recently
        looked up first; one that a row runs or a pin stands in
        when room is made counts as looked up then. The default
        namespace stays. A call of a dead handle is refused, and looking its key up makes it anew.

        Raises:
            CapacityError: More namespaces than fit; the message names the first key that does not, and no
                handle was given out or died.
            InvalidInputError: A key that cannot be hashed.

        Example:
            >>> config = CacheConfig(page_size=4, window=None, full_pages=8, swa_pages=0, max_rows=2,
            ...                      max_len=64, max_namespaces=3)
            >>> cache = KVCacheManager(config)
            >>> len(set(cache.namespaces(["adapter", "salt", "adapter", None]).tolist()))
            3
        """
        self._state.check_idle(launches=False)
        return self._look_up(keys)

    def _look_up(self, keys: Iterable[Hashable]) -> Int64Array:
        found = self._namespaces.look_up(keys, self._state.check_idle)
        if found.ranges is not None:
            self._free(found.ranges, found.full_pages, found.swa_pages)
        return found.handles

    @exclusive
    def drop_namespace(self, handle: int) -> EvictResult:
        """Free everything that is cached in a namespace and the namespace itself; its handle dies.

        Raises:
            InvalidInputError: No such namespace, the default one, or a request runs or a pin stands in it.
        """
        self._state.check_idle()
        handle = int(self._namespaces.handles(handle, 1, "handle")[0])
        if handle == self._namespaces.default:
            raise InvalidInputError("handle must not be of the default namespace; use flush()")
        if self.tree.is_locked(handle):
            raise InvalidInputError(
                f"handle must be of a namespace that no row uses and no pin keeps, got {handle}"
            )
        ranges, full, swa = self.tree.drop_roots(np.array([handle], np.int64))
        self._namespaces.forget(handle)
        return self._free(ranges, full, swa)

    # -- pages -----------------------------------------------------------------------------------------------

    @exclusive
    def evict(self, full_pages: int = 0, swa_pages: int = 0) -> EvictResult:
        """Free at least so many pages of what is cached and unlocked, or all there is; least recent first.

        Raises:
            InvalidInputError: A negative number.
        """
        self._state.check_idle()
        full_pages = min(check_int("full_pages", full_pages, low=0), self.config.full_pages)
        swa_pages = min(check_int("swa_pages", swa_pages, low=0), self.config.swa_pages)
        return self._free(*self.tree.evict(full_pages, swa_pages))

    @exclusive
    def flush(self) -> EvictResult:
        """Free everything that is cached and unlocked."""
        self._state.check_idle()
        return self._free(*self.tree.evict(self.tree.full_pages, self.tree.swa_pages))

    @exclusive
    def reset(self) -> None:
        """End all rows and free all pages, on host and device: the cache is as it was when it was made.

        After a weight update, since what was cached is of the old weights, or after a decode step that failed
        (BrokenError). Row handles and matches from before are refused; namespaces keep theirs. Does not wait:
        what the device still does with the old pages was launched before.

        Raises:
            ClosedError: The manager was closed.
            InvalidInputError: The body of DecodeStep.running is under way.
        """
        self._state.reset()

    def _free(self, ranges: Int32Array, full: int, swa: int) -> EvictResult:
        self._state.evicted_full += full
        self._state.evicted_swa += swa
        if len(ranges):
            self._state.plane.apply(ranges)
        return EvictResult(full, swa)

    @exclusive
    def translate(self, slots: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the SWA token slot of every Full token slot; see kvcache.kernels.translate."""
        self._state.check_stream()
        if not self.config.has_swa:
            raise InvalidInputError("translate needs a config with a window, got window=None")
        check_type("slots", slots, torch.Tensor)
        if out is not None:
            check_type("out", out, torch.Tensor)
        out = translate(slots, self.pools.swa_map, page_size=self.config.page_size, out=out)
        self._state.plane.launches += 1 if slots.numel() else 0
        return out

    def swa_page_table(self, rows: Rows, lens: Lens | None = None) -> PageTable:
        """Return the padded page table of the SWA window of rows; see kvcache.device.views."""
        return self.views.swa_page_table(rows, lens)

    def swa_indices(self, rows: Rows, lens: Lens | None = None) -> PageIndices:
        """Return the SWA pages of the window of rows as CSR; see kvcache.device.views."""
        return self.views.swa_indices(rows, lens)

    # -- shared checks ---------------------------------------------------------------------------------------

    def _check_owner(self, name: str, batch: MatchBatch) -> None:
        if batch.tree is not self.tree and len(batch):
            raise InvalidInputError(f"{name} must be of this manager, got a match of another one")

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
            with allocating():
                self._matcher = DeviceMatcher(self.tree, self._state.plane)
        return self._matcher
