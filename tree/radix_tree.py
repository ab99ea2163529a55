"""RadixTree: the arrays and the batched calls on them. The only Python object of the tree."""

from __future__ import annotations

import numpy as np

from kvcache.errors import ReceiptError
from kvcache.tree import arrays as a
from kvcache.tree.admit import admit
from kvcache.tree.arrays import Int32Array, Int64Array, TokenArray
from kvcache.tree.evict import evict
from kvcache.tree.fits import how_many_fit
from kvcache.tree.hashing import hash_words
from kvcache.tree.insert import first_bad_key, insert, insert_size
from kvcache.tree.lock import first_bad_receipt, lock_matched, release_swa, unlock
from kvcache.tree.match import (
    FULL_GEN,
    FULL_HIT,
    FULL_NODE,
    NUM_RESULTS,
    REUSE,
    REUSE_GEN,
    REUSE_NODE,
    stand,
    still_holds,
)
from kvcache.tree.ranges import RANGE_WIDTH
from kvcache.tree.roots import drop_roots, first_bad_handle, new_root, nodes_of_roots, reset
from kvcache.tree.touch import NUM_NOTE, apply_touches, match_and_note, note_touches
from kvcache.uncopied import Uncopied

_NO_HINTS = np.zeros((NUM_RESULTS, 0), np.int32)
# slots of the child table's first level: 64 KiB
FIRST_LEVEL = 1 << 13


def _require_good(receipts: Int64Array, bad: int) -> None:
    if bad >= 0:
        raise ReceiptError(
            f"receipts[{bad}] must be the receipt of a standing lock, once; got {receipts[bad]}"
        )


class RadixTree(Uncopied):
    """A radix tree over token ids in flat arrays (arrays.py), for batches. It knows slots, never page ids.

    All lengths here are pages unless a name says `_len`. Arguments must be valid: the manager checks what
    comes from users; receipts are checked here.

    Args:
        page_size: Tokens per page.
        keep_pages: Pages of an SWA window, 0 without an SWA pool.
        bigram: Whether unit i of a key covers tokens i and i + 1.
        num_slots: Pages that the tree can hold.
        max_locks: Locks at a time.
        max_roots: Namespaces at a time.
        hash_seed: Seed of the page hash, in [0, 2^64).
        by_value: Whether windows are kept and given up by what they are worth (value.py); else the least
            recently used pages go first.
        chunks: Whether the end of every insert keeps its window also where they go by value.
        ladder: Tokens of the first rung before a prompt's end at which a window is kept, and the factor
            from rung to rung (ladder.py); None: no rungs.
        first_level: Slots that the child table begins with, a power of two, >= 4.
    """

    def __init__(
        self,
        *,
        page_size: int,
        keep_pages: int,
        bigram: bool,
        num_slots: int,
        max_locks: int,
        max_roots: int,
        hash_seed: int = 0,
        first_level: int | None = None,
        by_value: bool = False,
        chunks: bool = False,
        ladder: tuple[int, int] | None = None,
    ) -> None:
        self.max_roots = max_roots
        self.num_roots = 0
        # slots bound nodes and free runs together; two more for a run that is being cut
        self.nodes = a.node_arrays(num_slots + max_roots + 3)
        words = hash_words(hash_seed, page_size)
        self.meta: Int64Array = np.zeros(a.M_HASH_MULTIPLIER + words.size, np.int64)
        self.meta[a.M_HASH_MULTIPLIER :] = words
        self.meta[a.M_LOG_AT] = self.meta.size
        self.meta[a.M_PAGE_SIZE] = page_size
        self.meta[a.M_KEEP_PAGES] = keep_pages
        self.meta[a.M_BIGRAM] = int(bigram)
        self.meta[a.M_BUMP] = 1
        self.meta[a.M_BY_VALUE] = int(by_value and keep_pages > 0)
        self.meta[a.M_CHUNKS] = int(chunks)
        first, factor = ladder if ladder and keep_pages > 0 else (0, 2)
        self.meta[a.M_LADDER], self.meta[a.M_LADDER_FACTOR] = first, factor
        self.meta[a.M_SLAB_SIZE] = num_slots
        self.tokens = a.token_slab(num_slots * page_size)
        self.table = a.child_table(num_slots, first_level or FIRST_LEVEL, self.meta)
        self._first_level = self.meta.item(a.M_TABLE_MASK) + 1
        self.locks: Int32Array = np.zeros((a.NUM_LOCK_FIELDS, max_locks), np.int32)
        self.free_locks: Int32Array = np.arange(max_locks - 1, -1, -1, dtype=np.int32)
        self.meta[a.M_LOCKS_FREE] = max_locks
        self.notes: Int32Array = np.zeros((1024, NUM_NOTE), np.int32)
        self._ranges: Int32Array = np.zeros((1024, RANGE_WIDTH), np.int32)
        self._marks: Int64Array = np.zeros(1024, np.int64)
        self._kept: Int64Array = np.zeros((1024, 2), np.int64)
        self._marked = np.zeros(0, np.uint8)
        self._found: Int64Array = np.zeros((1024, 2), np.int64)

    # -- sizes ---------------------------------------------------------------------------------------------

    @property
    def num_nodes(self) -> int:
        """Nodes, roots not counted."""
        return self.meta.item(a.M_NODES)

    @property
    def full_pages(self) -> int:
        """Full pages that the tree owns."""
        return self.meta.item(a.M_FULL_PAGES)

    @property
    def swa_pages(self) -> int:
        """SWA pages that the tree owns."""
        return self.meta.item(a.M_SWA_PAGES)

    @property
    def locked_full_pages(self) -> int:
        """Full pages under at least one lock."""
        return self.meta.item(a.M_FULL_LOCKED)

    @property
    def locked_swa_pages(self) -> int:
        """SWA pages under at least one lock."""
        return self.meta.item(a.M_SWA_LOCKED)

    @property
    def memory_bytes(self) -> int:
        """Bytes in use: records, slots and levels of the child table ever used, locks and scratch."""
        level = self.meta.item(a.M_TABLE_MASK) + 1
        table = 8 * (level if level == self._first_level else level + level // 2)
        records = int(self.meta[a.M_BUMP]) * a.NUM_FIELDS * 4
        tokens = int(self.meta[a.M_SLAB_TOP] * self.meta[a.M_PAGE_SIZE]) * 4
        rest = (self.meta, self.locks, self.free_locks, self.notes)
        scratch = (self._ranges, self._marks, self._kept, self._found, self._marked)
        return records + tokens + table + sum(x.nbytes for x in rest + scratch)

    @property
    def hash_words(self) -> Int64Array:
        """The secrets of the page hash, for a copy of the tree (hashing.py)."""
        return self.meta[a.M_HASH_MULTIPLIER : self.meta.item(a.M_LOG_AT)]

    def log_changes(self, room: int) -> None:
        """Keep a log of up to `room` changes from now on, for a copy of the tree (changes.py)."""
        size = self.meta.item(a.M_LOG_AT)
        meta = np.zeros(size + room, np.int64)
        meta[:size] = self.meta[:size]
        meta[a.M_LOG_ROOM] = room
        self.meta = meta

    def _room_for_ranges(self, num: int) -> Int32Array:
        if len(self._ranges) < num:
            self._ranges = np.zeros((max(num, 2 * self._ranges.shape[0]), RANGE_WIDTH), np.int32)
        return self._ranges

    # -- namespaces ----------------------------------------------------------------------------------------

    def new_root(self) -> int:
        """Make a namespace; return its handle, GEN << 32 | root. The caller keeps to `max_roots`."""
        root = int(new_root(self.nodes, self.meta))
        self.num_roots += 1
        return int(self.nodes[a.GEN, root]) << 32 | root

    def first_bad_handle(self, handles: Int64Array) -> int:
        """Return the index of the first handle of no standing namespace, or -1."""
        return int(first_bad_handle(self.nodes, handles))

    def is_locked(self, handle: int) -> bool:
        """Whether a lock stands in the namespace."""
        return self.nodes.item(a.FULL_LOCKS, handle & 0xFFFFFFFF) > 0

    def drop_roots(self, handles: Int64Array) -> tuple[Int32Array, int, int]:
        """Remove unlocked namespaces; return (ranges to free, Full pages, SWA pages)."""
        self._settle()
        roots = handles & 0xFFFFFFFF
        ranges = self._room_for_ranges(int(nodes_of_roots(self.nodes, roots)))
        num, full, swa = drop_roots(self.nodes, self.meta, self.table, self.tokens, ranges, roots)
        self.num_roots -= roots.size
        return ranges[:num], full, swa

    def reset(self) -> None:
        """Remove all nodes and locks; namespaces stay, and whatever named a node or a lock is stale."""
        self.table[:] = 0
        reset(self.nodes, self.meta, self.locks, self.free_locks)

    # -- match ---------------------------------------------------------------------------------------------

    def match(
        self,
        keys: TokenArray,
        starts: Int64Array,
        lens: Int64Array,
        handles: Int64Array,
        hints: Int32Array | None = None,
        *,
        touch: bool = True,
    ) -> Int32Array:
        """Match a batch; return results [NUM_RESULTS, batch] (match.py). Splits nothing.

        With `touch`, what was found becomes the most recent, as of the next call that changes the tree.
        """
        batch = starts.shape[0]
        if touch:
            self._room_for_notes(batch)
        results = np.empty((NUM_RESULTS, batch), np.int32)
        match_and_note(
            self.nodes,
            self.meta,
            self.table,
            self.tokens,
            keys,
            starts,
            lens,
            handles,
            _NO_HINTS if hints is None else hints,
            results,
            self.notes,
            touch,
        )
        return results

    def touch_matched(self, results: Int32Array) -> None:
        """Touch what an earlier match found, as far as it still stands; as of the next change of the tree."""
        noted = results.copy()
        stand(self.nodes, self.meta, noted)
        self._room_for_notes(results.shape[1])
        note_touches(self.meta, noted, self.notes)

    def _room_for_notes(self, num: int) -> None:
        if self.meta.item(a.M_TOUCHES) + num > len(self.notes):
            self._settle()
            if 2 * num > len(self.notes):
                self.notes = np.zeros((4 * num, NUM_NOTE), np.int32)

    def still_holds(self, results: Int32Array, index: Int64Array, handles: Int64Array) -> int:
        """Return the first of `index` whose prefix, or namespace, is not what was matched, or -1."""
        return int(still_holds(self.nodes, self.meta, results, index, handles))

    def how_many_fit(
        self,
        results: Int32Array,
        index: Int64Array,
        pages: Int64Array,
        full_room: int,
        swa_room: int,
    ) -> int:
        """Return how many requests of a match, in order, the pools can hold (fits.py). Changes nothing."""
        if self._marked.size == 0:
            self._marked = np.zeros(self.meta.item(a.M_SLAB_SIZE), np.uint8)
        return int(
            how_many_fit(
                self.nodes, self.meta, results, index, pages, full_room, swa_room, self._marked
            )
        )

    def _settle(self) -> None:
        """Work off the recency of earlier matches; every call that changes the tree begins with it."""
        waiting = self.meta.item(a.M_TOUCHES)
        if waiting:
            apply_touches(self.nodes, self.meta, self.table, self.tokens, self.notes)

    # -- locks ---------------------------------------------------------------------------------------------

    def lock(self, anchors: Int64Array, ends: Int64Array) -> Int64Array:
        """Lock the first `ends[i]` pages of the path of node `anchors[i]`; return receipts, int64.

        For tests and benchmarks of the tree alone: `lock_matched` for what is no match. The caller keeps to
        `max_locks`.
        """
        found = np.zeros((NUM_RESULTS, anchors.shape[0]), np.int32)
        found[REUSE_NODE] = anchors
        found[REUSE_GEN] = self.nodes[a.GEN, anchors]
        found[REUSE] = ends * self.meta[a.M_PAGE_SIZE]
        num = anchors.shape[0]
        return self.lock_matched(found, np.arange(num), np.zeros(num, np.int64))[0]

    def lock_matched(
        self, results: Int32Array, index: Int64Array, priorities: Int64Array
    ) -> tuple[Int64Array, Int32Array]:
        """Lock the reusable prefixes of requests `index` of a match, which must still hold.

        `priorities` is [n], of the requests (value.py).

        Returns:
            (receipts, BIND ranges for the pages of the prefixes).
        """
        num = index.shape[0]
        receipts = np.empty(num, np.int64)
        num = self._admit(results, index, receipts, priorities)
        if num < 0:
            self._room_for_ranges(-1 - num)
            num = self._admit(results, index, receipts, priorities)
        return receipts, self._ranges[:num]

    def pin(self, results: Int32Array) -> Int64Array:
        """Lock the reusable prefixes of all requests of a match that was just made; return receipts."""
        self._settle()
        num = results.shape[1]
        receipts = np.empty(num, np.int64)
        lock_matched(
            self.nodes,
            self.meta,
            self.table,
            self.tokens,
            self.locks,
            self.free_locks,
            results,
            np.arange(num),
            receipts,
            np.zeros(num, np.int64),
            False,
        )
        return receipts

    def _admit(
        self,
        results: Int32Array,
        index: Int64Array,
        receipts: Int64Array,
        priorities: Int64Array,
    ) -> int:
        return admit(
            self.nodes,
            self.meta,
            self.table,
            self.tokens,
            self.locks,
            self.free_locks,
            self.notes,
            results,
            index,
            receipts,
            priorities,
            self._ranges,
        )

    def unlock(self, receipts: Int64Array) -> None:
        """Release locks; ReceiptError if one is wrong or comes twice, and then none is released."""
        if self.meta.item(a.M_TOUCHES):
            _require_good(receipts, first_bad_receipt(self.locks, receipts))
            self._settle()
        bad = unlock(self.nodes, self.meta, self.table, self.locks, self.free_locks, receipts)
        _require_good(receipts, bad)

    def release_swa(self, receipts: Int64Array) -> None:
        """Release the SWA part of locks early; ReceiptError as for `unlock`."""
        if self.meta.item(a.M_TOUCHES):
            _require_good(receipts, first_bad_receipt(self.locks, receipts))
            self._settle()
        bad = release_swa(self.nodes, self.meta, self.table, self.locks, receipts)
        _require_good(receipts, bad)

    def prefix_hints(self, receipts: Int64Array) -> Int32Array:
        """Return match results [NUM_RESULTS, n] that serve as hints: the locked prefixes, nothing more."""
        k = receipts & 0xFFFFFFFF
        results = np.zeros((NUM_RESULTS, k.size), np.int32)
        results[FULL_NODE] = self.locks[a.LOCK_NODE, k]
        results[FULL_GEN] = self.nodes[a.GEN, results[FULL_NODE]]
        results[FULL_HIT] = self.locks[a.LOCK_END, k] * int(self.meta[a.M_PAGE_SIZE])
        return results

    # -- insert, evict -------------------------------------------------------------------------------------

    def first_bad_key(
        self, keys: TokenArray, requests: Int64Array, *, whole: bool = True
    ) -> tuple[int, int]:
        """Return (request, token) of the first key that contradicts its locked prefix or cannot be stored.

        Without `whole`, only the last page of the prefix is compared.
        """
        b, token = first_bad_key(
            self.nodes, self.meta, self.tokens, self.locks, keys, requests, whole
        )
        return int(b), int(token)

    def insert(
        self, keys: TokenArray, requests: Int64Array, hints: Int64Array, every: int
    ) -> Int32Array:
        """Insert a batch and move its locks (insert.py); return the ranges to carry out."""
        self._settle()
        num = self._insert(keys, requests, hints, every)
        if num < 0:
            self._room_for_insert(requests)
            num = self._insert(keys, requests, hints, every)
        return self._ranges[:num]

    def _insert(self, keys: TokenArray, requests: Int64Array, hints: Int64Array, every: int) -> int:
        return insert(
            self.nodes,
            self.meta,
            self.table,
            self.tokens,
            self.locks,
            keys,
            requests,
            hints,
            every,
            self._ranges,
            self._marks,
            self._kept,
            self._found,
        )

    def _room_for_insert(self, requests: Int64Array) -> None:
        pages, widest = insert_size(self.locks, requests)
        num = requests.shape[0]
        self._room_for_ranges(2 * pages + 4 * num)
        if self._marks.shape[0] <= widest:
            self._marks = np.zeros(2 * widest + 2, np.int64)
            self._kept = np.zeros((self._marks.shape[0], 2), np.int64)
            self._found = np.zeros((self._marks.shape[0], 2), np.int64)

    def evict(self, full_pages: int, swa_pages: int) -> tuple[Int32Array, int, int]:
        """Free what is unlocked, least recent first (evict.py); return (ranges, Full pages, SWA pages)."""
        self._settle()
        num, full, swa = self._evict(full_pages, swa_pages)
        if num < 0:
            self._room_for_ranges(2 * self.num_nodes + 8)
            num, full, swa = self._evict(full_pages, swa_pages)
        return self._ranges[:num], full, swa

    def _evict(self, full_pages: int, swa_pages: int) -> tuple[int, int, int]:
        return evict(
            self.nodes, self.meta, self.table, self.tokens, self._ranges, full_pages, swa_pages
        )
