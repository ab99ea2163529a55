"""KVCacheManager: the batched scheduler API. The host decides on lengths, kernels move pages, none waits."""

from __future__ import annotations

from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from kvcache import rows as row_ops
from kvcache.checks import INT32, as_indices, as_int_array, check_tensor, check_type
from kvcache.device.data_plane import NO_RANGES
from kvcache.device.device_match import DeviceKeys, DeviceMatch
from kvcache.errors import CapacityError, InvalidInputError, StaleMatchError
from kvcache.keys import KeyBatch, Ragged
from kvcache.match_batch import MatchBatch
from kvcache.pinning import PinningCache
from kvcache.requests import as_priorities, check_lens, insert_requests, running_rows
from kvcache.results import CommitResult
from kvcache.rows import Int32Array, Int64Array
from kvcache.state import exclusive
from kvcache.types import Lens, Rows

_NO_HINTS = np.zeros(0, np.int64)


class KVCacheManager(PinningCache):
    """Prefix cache of a model with full attention and, if `config.window` is set, sliding-window attention.

    All calls take a batch, cost a bounded number of launches and at most one upload whatever the batch, and
    never wait for the device. A call that raises has changed nothing. Rows, lengths and receipts are checked;
    lengths are tokens. Launches go to the current stream: the engine's forwards must run on the same one. A
    call on another stream than the first one, or while another device is current, is refused.

    Rows go by handles: int64, a row's index and generation in one. The handle of a request that has ended is
    refused, whoever has the row now; `index(rows)` gives the indices for an engine's own arrays.

    One thread at a time calls it; a second one inside is refused (ConcurrentCallError). It cannot be copied
    or pickled (TypeError): it is one with its device memory.

    Example:
        >>> config = CacheConfig(page_size=4, window=8, full_pages=64, swa_pages=32, max_rows=2, max_len=64)
        >>> cache = KVCacheManager(config)
        >>> tokens = np.arange(16, dtype=np.int32)
        >>> rows = cache.admit(cache.match(KeyBatch(tokens, [0], [15])))
        >>> cache.extend(rows, [16])
        >>> cache.advance(rows)                            # the engine has launched its forward
        >>> cache.finish(rows, KeyBatch(tokens, [0], [16])).owned_len.tolist()
        [16]
        >>> cache.match(KeyBatch(np.append(tokens, 99).astype(np.int32), [0], [17]))
        MatchBatch(full_hit_len=[16], reuse_len=[16], branch_len=[-1])
    """

    # -- a request begins ------------------------------------------------------------------------------------

    @overload
    def match(
        self,
        keys: KeyBatch,
        namespaces: npt.ArrayLike | None = None,
        *,
        previous: MatchBatch | None = None,
        touch: bool = True,
        on: Literal["host"] = "host",
    ) -> MatchBatch: ...

    @overload
    def match(
        self,
        keys: DeviceKeys,
        namespaces: npt.ArrayLike | None = None,
        *,
        touch: bool = True,
        on: Literal["device"],
    ) -> DeviceMatch: ...

    @exclusive
    def match(
        self,
        keys: KeyBatch | DeviceKeys,
        namespaces: npt.ArrayLike | None = None,
        *,
        previous: MatchBatch | None = None,
        touch: bool = True,
        on: Literal["host", "device"] = "host",
    ) -> MatchBatch | DeviceMatch:
        """Find how much of each key is cached. Reads the tree, locks nothing.

        A request computes at least its last token, so its key leaves that off.

        On the host it is host work only. On the device (`on="device"`, for keys that are there already) it is
        one upload and at most two launches, the results stay there, and nothing waits; the first one copies
        the tree to the device, and from then on the tree keeps a log of what changes. Where that is too long,
        whole arrays are uploaded before.

        Args:
            keys: The batch of keys; DeviceKeys on the device.
            namespaces: One handle for all, or [batch] handles; default: the default namespace.
            previous: Result of an earlier match of the same requests, in the same order: keys may have grown
                at the end, nothing else may have changed. Tokens it covers are not read again while the node
                it found still stands.
            touch: Whether what was found becomes the most recent; on the device, when it is fetched.
            on: Where to match. The results are the same.

        Raises:
            InvalidInputError: A handle is not of a standing namespace, `previous` is of another batch or
                given on the device, or the keys are of another kind or device.
        """
        state = self._state
        if state.closed or state.broken is not None:
            state.check_open()
        if on != "host" or not isinstance(keys, KeyBatch):
            return self._match_on_device(keys, namespaces, previous, touch, on)
        handles = self._namespaces.handles(namespaces, keys.starts.size)
        hints = None
        if previous is not None:
            check_type("previous", previous, MatchBatch)
            if previous.namespaces.tobytes() != handles.tobytes():
                self._namespaces.check_same(previous.namespaces, handles)
            self._check_owner("previous", previous)
            hints = previous.results
        self._namespaces.end_look_up(handles)
        results = self.tree.match(keys.tokens, keys.starts, keys.lens, handles, hints, touch=touch)
        return MatchBatch(results, handles, self.tree, keys.lens)

    def _match_on_device(
        self, keys: Any, namespaces: npt.ArrayLike | None, previous: Any, touch: bool, on: str
    ) -> DeviceMatch:
        if on not in ("host", "device"):
            raise InvalidInputError(f"on must be 'host' or 'device', got {on!r}")
        check_type("keys", keys, DeviceKeys if on == "device" else KeyBatch)
        self._state.check_idle()
        if previous is not None:
            raise InvalidInputError("previous must be None for a match on the device")
        handles = self._namespaces.handles(namespaces, len(keys))
        check_tensor(
            "tokens",
            keys.tokens,
            ndim=1,
            dtype=keys.tokens.dtype,
            device=self._state.plane.pools.tops.device,
        )
        self._namespaces.end_look_up(handles)
        return self._device_matcher().match(keys, handles, touch=touch)

    @exclusive
    def admit(
        self,
        batch: MatchBatch | DeviceMatch,
        index: npt.ArrayLike | None = None,
        *,
        priority: npt.ArrayLike = 0,
    ) -> Int64Array:
        """Take a row for each request, lock its prefix, and bind the reused pages into the row.

        Args:
            batch: Result of `match`. If it is on the device, this waits for it unless it was fetched, and the
                device binds the pages from what it found.
            index: [n] which requests of the batch; default: all. One request may be admitted twice.
            priority: One for all, or [n], in [-16, 16]: with the retention `Value` a window that a request of
                priority p makes or resumes at is worth 2^p times as much. Changes nothing else.

        Returns:
            [n] int64 handles of the rows. `computed_len = allocated_len = owned_len = reuse_len`.

        Raises:
            CapacityError: Fewer than n rows are free.
            StaleMatchError: A prefix, or what is behind it in the tree, lost a page since the match.
            InvalidInputError: An index or a priority is out of range, a prefix is longer than `max_len`, or
                the batch is of another manager.
        """
        self._state.check_idle()
        found = batch
        if isinstance(batch, DeviceMatch):
            if not batch.is_of(self.tree):
                raise InvalidInputError("batch must be of this manager, got a match of another one")
            batch = batch.wait()
        check_type("batch", batch, MatchBatch)
        self._check_owner("batch", batch)
        num = len(batch)
        chosen = np.arange(num) if index is None else as_indices("index", index, num)
        priorities = as_priorities(priority, chosen.size)
        if chosen.size > self.rows.num_free:
            raise CapacityError(f"{chosen.size} rows needed, {self.rows.num_free} are free")
        stale = self.tree.still_holds(batch.results, chosen, batch.namespaces)
        if stale >= 0:
            raise StaleMatchError(f"request {stale} must be matched again: its prefix was evicted")
        long = row_ops.first_long(batch.reuse_len, chosen, self.config.max_len)
        if long >= 0:
            raise InvalidInputError(
                f"reuse_len must be <= max_len ({self.config.max_len}), got {batch.reuse_len[long]}"
            )
        if isinstance(found, DeviceMatch):
            found.fetch()  # nothing is refused any more: now it may touch
        state = self.rows
        rows = state.take(chosen.size)
        receipts, ranges = self.tree.lock_matched(batch.results, chosen, priorities)
        row_ops.start_rows(
            state.state,
            state.receipts,
            state.handles,
            rows,
            batch.reuse_len,
            batch.branch_len,
            chosen,
            receipts,
            batch.namespaces,
            batch.key_lens,
        )
        if isinstance(found, DeviceMatch):
            self._device_matcher().start_rows(found, chosen, rows, state.state)
        else:
            self._state.plane.apply(ranges, rows, states=rows, row_state=state.state)
        self._note_admitted(chosen.size)
        return receipts  # by now the handles

    # -- a request runs --------------------------------------------------------------------------------------

    @exclusive
    def extend(self, rows: Rows, new_len: Lens) -> None:
        """Give rows the pages for `new_len` tokens; evicts what it must first.

        Args:
            rows: [n] distinct handles of running rows.
            new_len: [n] tokens, computed_len <= new_len <= max_len. A length that the row's pages already
                hold takes none.

        Raises:
            CapacityError: Too few pages even with everything evictable gone.
            ReceiptError: A handle of a request that has ended, or that was never given out.
            InvalidInputError: A row named twice, or a bad length.
        """
        rows = self._rows(rows)
        lens = as_int_array("new_len", new_len, dtype=INT32)
        state, config = self.rows.state, self.config
        total, widest = -1, 0
        desc = np.empty((5, rows.size), np.int32)
        if lens.size == rows.size:
            total, widest = row_ops.plan_extend(
                state, rows, lens, config.page_size, config.max_len, desc
            )
        if total < 0:
            check_lens("new_len", self.rows, rows, lens, config.max_len)
        if rows.size == 0:
            return
        evicted = self._state.make_room(total)
        self._state.plane.extend(desc, total, widest, evicted)
        row_ops.set_lens(state, row_ops.ALLOCATED, rows, lens, True)

    @exclusive
    def step(self, rows: Rows) -> None:
        """Make room for one more token of each row: allocated_len = max(allocated_len, computed_len + 1).

        Raises:
            CapacityError: Too few pages even with everything evictable gone.
            ReceiptError: A handle of a request that has ended, or that was never given out.
            InvalidInputError: A row named twice, or a row that is at `max_len`.
        """
        rows = self._rows(rows)
        if rows.size == 0:
            return
        config, state = self.config, self.rows.state
        total = int(row_ops.pages_to_step(state, rows, config.page_size, config.max_len))
        if total < 0:
            raise InvalidInputError(
                f"rows[{-1 - total}] must stay within max_len ({config.max_len}), "
                f"got row {rows[-1 - total]}, which is full"
            )
        evicted = self._state.make_room(total)
        self._state.plane.step(rows, total, evicted)
        row_ops.step_lens(state, rows)

    @exclusive
    def advance(self, rows: Rows, lens: Lens | None = None) -> None:
        """Say that the forward for these tokens is on the stream: computed_len = allocated_len, or `lens`.

        Args:
            lens: [n] tokens, computed_len <= lens <= allocated_len, as after rejected draft tokens. The row
                keeps the pages beyond.

        Raises:
            ReceiptError: A handle of a request that has ended, or that was never given out.
            InvalidInputError: A row named twice, or a bad length.
        """
        rows = self._rows(rows)
        state = self.rows
        if lens is not None:
            lens = as_int_array("lens", lens, dtype=INT32)
            check_lens("lens", state, rows, lens, None)
        if rows.size == 0:
            return
        self._state.plane.advance(rows, lens)
        if lens is None:
            row_ops.catch_up(state.state, rows)
        else:
            row_ops.set_lens(state.state, row_ops.COMPUTED, rows, lens, False)

    @exclusive
    def slide(self, rows: Rows) -> None:
        """Free the SWA pages of rows that fell out of the window: one launch for the batch.

        Once a row's window has left the prefix that it shares with the tree, the SWA lock on that goes too.

        Raises:
            ReceiptError: A handle of a request that has ended, or that was never given out.
            InvalidInputError: A row named twice.
        """
        rows = self._rows(rows)
        config = self.config
        if rows.size == 0 or not config.has_swa:
            return
        released = np.empty(rows.size, np.int64)
        freed, num = row_ops.slide_rows(
            self.rows.state,
            self.rows.receipts,
            rows,
            config.page_size,
            config.keep_tokens,
            config.bigram,
            released,
        )
        self._state.plane.slide(rows, int(freed))
        if num:
            self.tree.release_swa(released[:num])

    # -- a request hands over --------------------------------------------------------------------------------

    @exclusive
    def commit(self, rows: Rows, keys: KeyBatch, hints: Ragged | None = None) -> CommitResult:
        """Hand what rows have computed to the tree, with a live window at every checkpoint and at the end.

        Pages that the tree already had are freed and the row names the tree's; where it had a tombstone that
        a kept window covers, the row's SWA page moves under the tree's Full page.

        Args:
            rows: [n] distinct handles of running rows.
            keys: The tokens of each row, as far as the host knows them: what is handed over is what is
                computed and covered by the key, and the rest comes later. They must repeat the prefix; of
                what the tree owns already, only the last page is compared (all of it with
                `CacheConfig(debug=True)`).
            hints: Lengths whose window is to be kept (policy `Hints`); those that this commit does not
                cover are ignored.

        Returns:
            CommitResult.

        Raises:
            ReceiptError: A handle of a request that has ended, or that was never given out.
            InvalidInputError: A row named twice, a token that is negative or above 2^31 - 1, or a key that
                contradicts the prefix that the row holds.
        """
        rows = self._rows(rows)
        requests = insert_requests(self.config, self.rows, self.tree, rows, keys, hints)
        ranges, result, moved = self._insert(rows, keys, requests, hints)
        self._state.plane.apply(ranges, rows, states=moved, row_state=self.rows.state)
        return result

    @exclusive
    def finish(self, rows: Rows, keys: KeyBatch, hints: Ragged | None = None) -> CommitResult:
        """Commit, free the rest, unlock, and return the rows. Arguments and errors as for `commit`.

        A stop token that is found a step late is a shorter key: what was computed behind it is freed.
        """
        rows = self._rows(rows)
        requests = insert_requests(self.config, self.rows, self.tree, rows, keys, hints, ends=True)
        ranges, result, _ = self._insert(rows, keys, requests, hints)
        self._end(rows, ranges)
        return result

    @exclusive
    def retract(self, rows: Rows, keys: KeyBatch, hints: Ragged | None = None) -> MatchBatch:
        """Commit what is computed and end the rows, so that the requests can be resumed.

        Returns:
            A match of the computed tokens that the key covers, to pass as `previous` when the requests are
            matched again.

        Arguments and errors as for `commit`.
        """
        rows = self._rows(rows)
        requests = insert_requests(self.config, self.rows, self.tree, rows, keys, hints, ends=True)
        known = np.minimum(self.rows.computed_len[rows], keys.lens)
        handles = self.rows.handles[rows]
        ranges, _, _ = self._insert(rows, keys, requests, hints)
        prefix = self.tree.prefix_hints(self.rows.receipts[rows])
        self._end(rows, ranges)
        results = self.tree.match(keys.tokens, keys.starts, known, handles, prefix, touch=False)
        return MatchBatch(results, handles, self.tree, known)

    @exclusive
    def abort(self, rows: Rows) -> None:
        """End rows without inserting anything: free their own pages, unlock, return the rows.

        Raises:
            ReceiptError: A handle of a request that has ended, or that was never given out.
            InvalidInputError: A row named twice.
        """
        rows = self._rows(rows)
        self._end(rows, NO_RANGES)

    def _insert(
        self, rows: Int32Array, keys: KeyBatch, requests: Int64Array, hints: Ragged | None
    ) -> tuple[Int32Array, CommitResult, Int32Array]:
        """Insert what `requests` say; return (ranges, result, rows whose owned_len grew)."""
        values = hints.values if hints is not None else _NO_HINTS
        ranges = self.tree.insert(keys.tokens, requests, values, self.config.checkpoint_period)
        owned, matched, moved = np.empty((3, rows.size), np.int32)
        num = row_ops.note_inserted(
            self.rows.state, rows, requests, self.config.page_size, owned, matched, moved
        )
        return ranges, CommitResult(owned, matched), moved[:num]

    def _end(self, rows: Int32Array, ranges: Int32Array) -> None:
        """Unlock and free rows and what they still own."""
        if rows.size == 0:
            return
        state = self.rows
        tails = np.empty((rows.size, 4), np.int32)
        held = np.empty(rows.size, np.int64)
        row_ops.own_pages(state.state, state.receipts, rows, self.config.page_size, tails, held)
        self.tree.unlock(held)
        state.give_back(rows)
        self._state.plane.apply(ranges, rows, tails=tails, states=rows, row_state=state.state)

    def _rows(self, rows: Rows) -> Int32Array:
        self._state.check_idle()
        return running_rows(self.rows, rows)
