"""What a call is given: rows, lengths and keys, checked before anything is changed."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcache.checks import as_int_array, check_type
from kvcache.config import CacheConfig
from kvcache.errors import InvalidInputError
from kvcache.keys import KeyBatch, Ragged
from kvcache.rows import Int32Array, Int64Array, Rows, first_bad_row
from kvcache.tree import insert as i
from kvcache.tree.radix_tree import RadixTree


def running_rows(rows: Rows, given: Any) -> Int32Array:
    """Return `given` as int32 rows, or raise InvalidInputError unless all are running, each named once."""
    array = as_int_array("rows", given, dtype=np.int32)
    bad = first_bad_row(rows.state, array)
    if bad >= 0:
        raise InvalidInputError(f"rows[{bad}] must be a running row, once; got {array[bad]}")
    return array


def check_lens(name: str, rows: Rows, given: Int32Array, lens: Int32Array, most: Any) -> None:
    """Raise InvalidInputError unless each length is in [computed_len, most] of its row."""
    if lens.size != given.size:
        raise InvalidInputError(f"{name} must have {given.size} entries, got {lens.size}")
    low = rows.computed_len[given]
    bad = np.flatnonzero((lens < low) | (lens > most))
    if bad.size:
        b = int(bad[0])
        high = most if np.ndim(most) == 0 else most[b]
        raise InvalidInputError(f"{name}[{b}] must be in [{low[b]}, {high}], got {lens[b]}")


def insert_requests(
    config: CacheConfig,
    rows: Rows,
    tree: RadixTree,
    given: Int32Array,
    keys: KeyBatch,
    hints: Ragged | None,
) -> Int64Array:
    """Check the arguments of a call that inserts; return its requests, [n, NUM_REQUEST] (tree/insert.py).

    Raises:
        InvalidInputError: A key is shorter than what its row computed, contradicts the prefix that the row
            holds, or has a token outside [0, 2^31); or a batch size is wrong.
    """
    check_type("keys", keys, KeyBatch)
    if len(keys) != given.size:
        raise InvalidInputError(f"keys must have {given.size} entries, got {len(keys)}")
    computed = rows.computed_len[given]
    short = np.flatnonzero(keys.lens < computed)
    if short.size:
        b = int(short[0])
        raise InvalidInputError(
            f"keys[{b}] must have at least computed_len ({computed[b]}) tokens, got {keys.lens[b]}"
        )
    requests = np.zeros((given.size, i.NUM_REQUEST), np.int64)
    if hints is not None:
        check_type("hints", hints, Ragged)
        if len(hints) != given.size:
            raise InvalidInputError(f"hints must have {given.size} entries, got {len(hints)}")
        if config.keeps_hints:
            requests[:, i.HINT_FROM] = hints.indptr[:-1]
            requests[:, i.HINT_TO] = hints.indptr[1:]
    units = np.maximum(computed - 1, 0) if config.bigram else computed
    requests[:, i.AT] = keys.starts
    requests[:, i.KEY_LEN] = keys.lens
    requests[:, i.INSERT_END] = units // config.page_size
    requests[:, i.FRONTIER] = rows.frontier[given] // config.page_size
    requests[:, i.BRANCH_AT] = rows.branch_len[given] if config.keeps_branches else -1
    requests[:, i.RECEIPT] = rows.receipts[given]
    b, token = tree.first_bad_key(keys.tokens, requests)
    if b >= 0:
        raise InvalidInputError(
            f"keys[{b}] must repeat the prefix of row {given[b]} and hold tokens in [0, 2^31), "
            f"got another token at or after position {token}"
        )
    return requests
