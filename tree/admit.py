"""Admit: the locks of a batch of matched prefixes, and where their pages lie, in one call."""

from __future__ import annotations

import numpy as np

from kvcache.compiled import compiled
from kvcache.tree.arrays import M_PAGE_SIZE, M_TOUCHES, Int32Array, Int64Array
from kvcache.tree.lock import lock_matched
from kvcache.tree.match import REUSE
from kvcache.tree.segments import bind_ranges
from kvcache.tree.touch import apply_touches


@compiled
def admit(
    nodes: Int32Array,
    meta: Int64Array,
    table: Int32Array,
    slab: Int32Array,
    locks: Int32Array,
    free_locks: Int32Array,
    notes: Int32Array,
    results: Int32Array,
    index: Int64Array,
    receipts: Int64Array,
    priorities: Int64Array,
    ranges: Int32Array,
) -> int:
    """Work off the notes of matches, then lock the reusable prefixes of requests `index` of a match.

    Args:
        receipts: [n], out.
        priorities: [n], of the requests.
        ranges: [capacity, 5], out: BIND ranges of the prefixes; room for one a page.

    Returns:
        The number of ranges; or -1 - pages, and then `ranges` is too small and nothing was done.
    """
    pages = 0
    for i in range(index.shape[0]):
        pages += np.int64(results[REUSE, index[i]]) // meta[M_PAGE_SIZE]
    if pages > ranges.shape[0]:
        return -1 - pages
    if meta[M_TOUCHES] > 0:
        apply_touches(nodes, meta, table, slab, notes)
    lock_matched(
        nodes, meta, table, slab, locks, free_locks, results, index, receipts, priorities, True
    )
    return bind_ranges(nodes, locks, receipts, ranges)
