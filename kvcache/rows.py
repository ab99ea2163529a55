"""Rows: what the host knows of each running request. Lengths only; page ids live on the device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcache.compiled import compiled
from kvcache.config import CacheConfig
from kvcache.tree.insert import INSERT_END, MATCHED_END
from kvcache.uncopied import Uncopied

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

# fields of `state`, int32 [NUM_STATE, max_rows]; the first four as in kernels/layout.py, tokens
COMPUTED, ALLOCATED, OWNED, FRONTIER, BRANCH, SWA_HELD, ACTIVE, MARK, PROMPT, GENERATION = range(10)
NUM_STATE = 10

# a handle is GENERATION << 32 | row, int64: generations begin at 1, so that no small number is one
HANDLE_BITS = 32
ROW_MASK = (1 << HANDLE_BITS) - 1
_MOST_GENERATIONS = 2**31 - 1

_NO_ROWS: Int32Array = np.zeros(0, np.int32)


class Rows(Uncopied):
    """Lengths, locks and namespaces of the request rows.

    Attributes:
        computed_len: [max_rows] int32, tokens whose KV is written.
        allocated_len: [max_rows] int32, tokens that the row's pages hold.
        owned_len: [max_rows] int32, tokens of the prefix that the tree owns; whole pages.
        frontier: [max_rows] int32, tokens; SWA of the row's own pages below it is freed.
        branch_len: [max_rows] int32, fork that the match found, -1 = none.
        active: [max_rows] int32, 1 = a request runs in the row.
        generation: [max_rows] int32, >= 1, counts up when a request leaves the row.
        receipts: [max_rows] int64, the lock on the row's prefix.
        handles: [max_rows] int64, the row's namespace.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.state: Int32Array = np.zeros((NUM_STATE, config.max_rows), np.int32)
        self.computed_len: Int32Array = self.state[COMPUTED]
        self.allocated_len: Int32Array = self.state[ALLOCATED]
        self.owned_len: Int32Array = self.state[OWNED]
        self.frontier: Int32Array = self.state[FRONTIER]
        self.branch_len: Int32Array = self.state[BRANCH]
        self.active: Int32Array = self.state[ACTIVE]
        self.generation: Int32Array = self.state[GENERATION]
        self.generation[:] = 1
        self.receipts: Int64Array = np.zeros(config.max_rows, np.int64)
        self.handles: Int64Array = np.zeros(config.max_rows, np.int64)
        # of the last `find`: an engine names the same batch many times
        self._found = _NO_ROWS
        self._raw_handles = b""
        # a stack: row 0 is taken first, the row freed last is taken next
        self._free: Int32Array = np.arange(config.max_rows - 1, -1, -1, dtype=np.int32)
        self.num_free = config.max_rows

    def take(self, num: int) -> Int32Array:
        """Take `num` free rows."""
        rows = self._free[self.num_free - num : self.num_free][::-1].copy()
        self.num_free -= num
        return rows

    def find(self, handles: Int64Array) -> tuple[Int32Array, int]:
        """Return (rows of the handles, -1), or (.., index of the first bad handle) as of `find_rows`.

        The rows may be those that an earlier call returned: they are not to be written.
        """
        raw = handles.tobytes()
        if raw == self._raw_handles:
            return self._found, -1
        found = np.empty(handles.size, np.int32)
        bad = int(find_rows(self.state, handles, found))
        if bad < 0:
            self._found, self._raw_handles = found, raw
        return found, bad

    def handles_of(self, rows: Int32Array) -> Int64Array:
        """Return the handles of running rows: GENERATION << 32 | row."""
        return self.generation[rows].astype(np.int64) << HANDLE_BITS | rows

    def running(self) -> Int64Array:
        """Return the handles of all running rows, in the order of the rows."""
        return self.handles_of(np.flatnonzero(self.active).astype(np.int32))

    def reset(self) -> None:
        """End all requests."""
        self.give_back(np.flatnonzero(self.active).astype(np.int32))
        self._free[:] = np.arange(self._free.size - 1, -1, -1)

    def give_back(self, rows: Int32Array) -> None:
        """Free rows: all their state becomes 0, and their handles mean nothing any more."""
        if rows.size:
            self._found, self._raw_handles = _NO_ROWS, b""
        clear_rows(self.state, self._free, self.num_free, rows)
        self.num_free += rows.size


@compiled
def find_rows(state: Int32Array, handles: Int64Array, rows: Int32Array) -> int:
    """Write the row of each handle; return the index of the first that is of no running row, or comes twice.

    -1: none. A handle that came before has its row in `rows[:bad]`.
    """
    bad = -1
    seen = 0
    for i in range(handles.shape[0]):
        r = handles[i] & ROW_MASK
        if r >= state.shape[1] or state[GENERATION, r] != handles[i] >> HANDLE_BITS:
            bad = i
            break
        if state[ACTIVE, r] == 0 or state[MARK, r] != 0:
            bad = i
            break
        state[MARK, r] = 1
        rows[i] = r
        seen += 1
    for i in range(seen):
        state[MARK, rows[i]] = 0
    return bad


@compiled
def first_bad_len(
    state: Int32Array, rows: Int32Array, lens: Int32Array, most: int, allocated: bool
) -> int:
    """Return the index of the first length outside [COMPUTED, most], or -1; `allocated`: most = ALLOCATED."""
    for i in range(rows.shape[0]):
        high = state[ALLOCATED, rows[i]] if allocated else most
        if lens[i] < state[COMPUTED, rows[i]] or lens[i] > high:
            return i
    return -1


@compiled
def first_long(lens: Int32Array, index: Int64Array, most: int) -> int:
    """Return the first of `index` whose length is above `most`, or -1."""
    for i in range(index.shape[0]):
        if lens[index[i]] > most:
            return index[i]
    return -1


@compiled
def start_rows(
    state: Int32Array,
    receipts: Int64Array,
    handles: Int64Array,
    rows: Int32Array,
    reuse: Int32Array,
    branch: Int32Array,
    index: Int64Array,
    new_receipts: Int64Array,
    new_handles: Int64Array,
    key_lens: Int64Array,
) -> None:
    """Fill the state of rows that were just taken; request i is entry `index[i]` of a match.

    `new_receipts` [n] holds the receipts of their locks before, the handles of the rows after.
    """
    for i in range(rows.shape[0]):
        r = rows[i]
        b = index[i]
        state[COMPUTED, r] = reuse[b]
        state[ALLOCATED, r] = reuse[b]
        state[OWNED, r] = reuse[b]
        state[FRONTIER, r] = 0
        state[BRANCH, r] = branch[b]
        # the key of a match leaves the last token off
        state[PROMPT, r] = min(key_lens[b] + 1, 2**31 - 1)
        state[SWA_HELD, r] = 1
        state[ACTIVE, r] = 1
        receipts[r] = new_receipts[i]
        new_receipts[i] = np.int64(state[GENERATION, r]) << HANDLE_BITS | r
        handles[r] = new_handles[b]


@compiled
def clear_rows(state: Int32Array, free: Int32Array, num_free: int, rows: Int32Array) -> None:
    """Zero the state of rows, end their generation, and put them on the free stack."""
    for i in range(rows.shape[0]):
        for field in range(GENERATION):
            state[field, rows[i]] = 0
        state[GENERATION, rows[i]] = state[GENERATION, rows[i]] % _MOST_GENERATIONS + 1
        free[num_free + i] = rows[i]


@compiled
def note_inserted(
    state: Int32Array,
    rows: Int32Array,
    requests: Int64Array,
    page_size: int,
    owned: Int32Array,
    matched: Int32Array,
    moved: Int32Array,
) -> int:
    """Move OWNED to what an insert reached; `requests` as of tree/insert.py.

    Fills `owned` and `matched` (tokens) and `moved`, the rows whose OWNED grew; returns how many those are.
    """
    num = 0
    for i in range(rows.shape[0]):
        r = rows[i]
        end = requests[i, INSERT_END] * page_size
        if end > state[OWNED, r]:
            state[OWNED, r] = end
            state[SWA_HELD, r] = 1
            moved[num] = r
            num += 1
        owned[i] = state[OWNED, r]
        matched[i] = requests[i, MATCHED_END] * page_size
    return num


@compiled
def key_units(tokens: int, bigram: bool) -> int:
    """Return the units of a key over `tokens` tokens: a bigram needs the token after it."""
    return max(tokens - 1, 0) if bigram else tokens


@compiled
def resend_end(units: int, page_size: int) -> int:
    """Return what the same key can reuse when it comes again without its last unit: whole pages."""
    return max(units - 1, 0) // page_size * page_size


@compiled
def frontier_of(computed: int, page_size: int, keep: int, bigram: bool) -> int:
    """Return the frontier for `computed` tokens: SWA below it is no longer needed.

    The key may come again without its last unit, as a prompt that is sent again: a window stays for both.

    P = 4, W = 6, 28 computed:   resend_end = 24, 24 - 6 = 18, floored to the page: 16

        pages   0...3  4...7  8..11 12..15 16..19 20..23 24..27
        SWA     freed  freed  freed freed  [kept   kept   kept ]
                                           [ W before 24 ]
                                                  [ W before 28 ]
    """
    last = resend_end(key_units(computed, bigram), page_size)
    return max(last - keep, 0) // page_size * page_size


@compiled
def plan_extend(
    state: Int32Array,
    rows: Int32Array,
    new_len: Int32Array,
    page_size: int,
    max_len: int,
    desc: Int32Array,
) -> tuple[int, int]:
    """Fill extend descriptors [5, n] (kernels/layout.py).

    Returns:
        (pages in all, most pages of a row); (-1 - i, 0) if length i is not in [COMPUTED, max_len].
    """
    total = 0
    widest = 0
    for i in range(rows.shape[0]):
        if new_len[i] < state[COMPUTED, rows[i]] or new_len[i] > max_len:
            return -1 - i, 0
        allocated = state[ALLOCATED, rows[i]]
        new = max(allocated, new_len[i])
        held = (allocated + page_size - 1) // page_size
        pages = (new + page_size - 1) // page_size - held
        desc[0, i] = rows[i]
        desc[1, i] = held
        desc[2, i] = pages
        desc[3, i] = total
        desc[4, i] = new
        total += pages
        widest = max(widest, pages)
    return total, widest


@compiled
def pages_to_step(state: Int32Array, rows: Int32Array, page_size: int, max_len: int) -> int:
    """Return the pages that one more token for every row needs; -1 - i: row i would pass `max_len`."""
    total = 0
    for i in range(rows.shape[0]):
        new = state[COMPUTED, rows[i]] + 1
        if new > max_len:
            return -1 - i
        if new > state[ALLOCATED, rows[i]] and (new - 1) % page_size == 0:
            total += 1
    return total


@compiled
def first_with_drafts(state: Int32Array, rows: Int32Array) -> int:
    """Return the index of the first row that holds pages for more than one further token, or -1."""
    for i in range(rows.shape[0]):
        if state[ALLOCATED, rows[i]] > state[COMPUTED, rows[i]] + 1:
            return i
    return -1


@compiled
def set_lens(
    state: Int32Array, field: int, rows: Int32Array, lens: Int32Array, at_least: bool
) -> None:
    """Write a length of each row; with `at_least`, only where it grows."""
    for i in range(rows.shape[0]):
        if not at_least or lens[i] > state[field, rows[i]]:
            state[field, rows[i]] = lens[i]


@compiled
def step_lens(state: Int32Array, rows: Int32Array) -> None:
    """ALLOCATED = max(ALLOCATED, COMPUTED + 1)."""
    for i in range(rows.shape[0]):
        r = rows[i]
        state[ALLOCATED, r] = max(state[ALLOCATED, r], state[COMPUTED, r] + 1)


@compiled
def catch_up(state: Int32Array, rows: Int32Array) -> None:
    """COMPUTED = ALLOCATED."""
    for i in range(rows.shape[0]):
        state[COMPUTED, rows[i]] = state[ALLOCATED, rows[i]]


@compiled
def slide_rows(
    state: Int32Array,
    receipts: Int64Array,
    rows: Int32Array,
    page_size: int,
    keep: int,
    bigram: bool,
    released: Int64Array,
) -> tuple[int, int]:
    """Move frontiers as the device does.

    Returns:
        (SWA pages freed, entries of `released`: receipts whose SWA lock is no longer needed, because the
        row's window has left the tree's prefix).
    """
    freed = 0
    num = 0
    for i in range(rows.shape[0]):
        r = rows[i]
        old = state[FRONTIER, r]
        new = max(old, frontier_of(state[COMPUTED, r], page_size, keep, bigram))
        owned = state[OWNED, r]
        freed += (max(new, owned) - max(old, owned)) // page_size
        state[FRONTIER, r] = new
        if new >= owned and state[SWA_HELD, r] != 0:
            state[SWA_HELD, r] = 0
            released[num] = receipts[r]
            num += 1
    return freed, num


@compiled
def own_pages(
    state: Int32Array,
    receipts: Int64Array,
    rows: Int32Array,
    page_size: int,
    tails: Int32Array,
    held: Int64Array,
) -> None:
    """Fill tails [n, 4]: (row, first own page, first own page with SWA, end), and `held`, the receipts."""
    for i in range(rows.shape[0]):
        r = rows[i]
        first = state[OWNED, r] // page_size
        end = (state[ALLOCATED, r] + page_size - 1) // page_size
        tails[i, 0] = r
        tails[i, 1] = first
        tails[i, 2] = min(max(first, state[FRONTIER, r] // page_size), end)
        tails[i, 3] = end
        held[i] = receipts[r]
