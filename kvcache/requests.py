"""What a call is given: rows, lengths and keys, checked before anything is changed."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcache.checks import INT64, as_int_array, check_type
from kvcache.compiled import compiled
from kvcache.config import CacheConfig
from kvcache.errors import InvalidInputError, ReceiptError
from kvcache.keys import KeyBatch, Ragged
from kvcache.rows import (
    BRANCH,
    COMPUTED,
    FRONTIER,
    HANDLE_BITS,
    PROMPT,
    ROW_MASK,
    Int32Array,
    Int64Array,
    Rows,
    first_bad_len,
    key_units,
    resend_end,
)
from kvcache.tree import insert as i
from kvcache.tree.radix_tree import RadixTree

_NO_HINTS = np.zeros(0, np.int64)


# of a request: a window is worth 2^p times as much
_MOST_PRIORITY = 16


def as_priorities(priority: Any, num: int) -> Int64Array:
    """Return [num] priorities of requests from one for all, or [num] of them.

    Raises:
        InvalidInputError: A wrong number of them, or one outside [-16, 16].
    """
    if type(priority) is int and priority == 0:
        return np.zeros(num, np.int64)
    if isinstance(priority, (int, np.integer)) and not isinstance(priority, bool):
        priority = [priority] * num
    priorities = as_int_array("priority", priority, dtype=INT64)
    if priorities.size != num:
        raise InvalidInputError(f"priority must have {num} entries, got {priorities.size}")
    bad = np.flatnonzero(np.abs(priorities) > _MOST_PRIORITY)
    if bad.size:
        raise InvalidInputError(
            f"priority[{bad[0]}] must be in [-16, 16], got {priorities[bad[0]]}"
        )
    return priorities


def running_rows(rows: Rows, given: Any) -> Int32Array:
    """Return the rows, int32, of the handles `given`; not to be written, later calls may return them again.

    Raises:
        ReceiptError: A handle was never given out, or its request has ended.
        InvalidInputError: `given` is no 1-D array of ints, or names a row twice.
    """
    handles = as_int_array("rows", given, dtype=INT64)
    found, bad = rows.find(handles)
    if bad >= 0:
        _refuse_handle(rows, handles, bad)
    return found


def _refuse_handle(rows: Rows, handles: Int64Array, bad: int) -> None:
    handle = int(handles[bad])
    row, generation = handle & ROW_MASK, handle >> HANDLE_BITS
    if handle in handles[:bad]:
        raise InvalidInputError(f"rows[{bad}] must be named once, got handle {handle} again")
    reason = "it was never given out"
    if row < rows.active.size and 0 < generation < rows.generation[row]:
        reason = f"its request, number {generation} in row {row}, has ended"
    raise ReceiptError(
        f"rows[{bad}] must be the handle of a running request, got {handle}: {reason}"
    )


def check_lens(
    name: str, rows: Rows, given: Int32Array, lens: Int32Array, most: int | None
) -> None:
    """Raise InvalidInputError unless each length is in [computed_len, most] of its row.

    most None: at most the row's allocated_len.
    """
    if lens.size != given.size:
        raise InvalidInputError(f"{name} must have {given.size} entries, got {lens.size}")
    bad = first_bad_len(rows.state, given, lens, -1 if most is None else most, most is None)
    if bad >= 0:
        row = given[bad]
        high = rows.allocated_len[row] if most is None else most
        raise InvalidInputError(
            f"{name}[{bad}] must be in [{rows.computed_len[row]}, {high}], got {lens[bad]}"
        )


@compiled
def fill_requests(
    state: Int32Array,
    receipts: Int64Array,
    rows: Int32Array,
    starts: Int64Array,
    lens: Int64Array,
    hint_indptr: Int64Array,
    page_size: int,
    bigram: bool,
    keeps_branches: bool,
    ends: bool,
    requests: Int64Array,
) -> None:
    """Fill the requests of an insert: what is computed and covered by the key.

    `hint_indptr` is [n + 1], or empty where hints have no use.
    """
    for b in range(rows.shape[0]):
        r = rows[b]
        units = key_units(min(np.int64(state[COMPUTED, r]), lens[b]), bigram)
        requests[b, i.AT] = starts[b]
        requests[b, i.KEY_LEN] = lens[b]
        requests[b, i.INSERT_END] = units // page_size
        requests[b, i.RESEND_END] = resend_end(units, page_size) // page_size
        requests[b, i.FRONTIER] = state[FRONTIER, r] // page_size
        requests[b, i.BRANCH_AT] = state[BRANCH, r] if keeps_branches else -1
        requests[b, i.RECEIPT] = receipts[r]
        requests[b, i.HINT_FROM] = hint_indptr[b] if hint_indptr.shape[0] > 0 else 0
        requests[b, i.HINT_TO] = hint_indptr[b + 1] if hint_indptr.shape[0] > 0 else 0
        requests[b, i.PROMPT_LEN] = key_units(np.int64(state[PROMPT, r]), bigram)
        requests[b, i.ENDS] = ends
        requests[b, i.MATCHED_END] = 0


def insert_requests(
    config: CacheConfig,
    rows: Rows,
    tree: RadixTree,
    given: Int32Array,
    keys: KeyBatch,
    hints: Ragged | None,
    *,
    ends: bool = False,
) -> Int64Array:
    """Check the arguments of a call that inserts; return its requests, [n, NUM_REQUEST] (tree/insert.py).

    Raises:
        InvalidInputError: A key contradicts the prefix that the row holds, or has a token outside
            [0, 2^31); or a batch size is wrong.
    """
    check_type("keys", keys, KeyBatch)
    if len(keys) != given.size:
        raise InvalidInputError(f"keys must have {given.size} entries, got {len(keys)}")
    indptr = _NO_HINTS
    if hints is not None:
        check_type("hints", hints, Ragged)
        if len(hints) != given.size:
            raise InvalidInputError(f"hints must have {given.size} entries, got {len(hints)}")
        if config.keeps_hints:
            indptr = hints.indptr
    requests = np.empty((given.size, i.NUM_REQUEST), np.int64)
    fill_requests(
        rows.state,
        rows.receipts,
        given,
        keys.starts,
        keys.lens,
        indptr,
        config.page_size,
        config.bigram,
        config.keeps_branches,
        ends,
        requests,
    )
    b, token = tree.first_bad_key(keys.tokens, requests, whole=config.debug)
    if b >= 0:
        raise InvalidInputError(
            f"keys[{b}] must repeat the prefix of row {given[b]} and hold tokens in [0, 2^31), "
            f"got another token at or after position {token}"
        )
    return requests
