"""Fits: how many matched requests, in order, the pools can hold beside what they lock. Changes nothing.

What a request reuses is locked when it is admitted, and then it can no longer be evicted for others. Of two
requests that reuse the same pages only the first one takes them away; what is locked already is not there to
be taken. P = 1, W = 2, requests 0 and 1 reuse 6 and 4 tokens of one path, of which 2 are locked already:

    page    0   1   2   3   4   5
    Full    L   L   0   0   0   0       request 0 takes 4 evictable pages away, request 1 none
    SWA             1   1   0   0       each takes the 2 of its window
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcache.compiled import compiled
from kvcache.tree.arrays import (
    DEPTH,
    FULL_LOCKS,
    LIVE,
    M_KEEP_PAGES,
    M_PAGE_SIZE,
    PAGES,
    PARENT,
    START,
    SWA_LOCKS,
    Int32Array,
    Int64Array,
)
from kvcache.tree.join import standing
from kvcache.tree.match import REUSE, REUSE_GEN, REUSE_NODE

Bytes = npt.NDArray[np.uint8]


@compiled
def _end_node(nodes: Int32Array, results: Int32Array, b: int, end: int) -> int:
    """Return the node that holds the last reusable page of request `b`, split or joined since or not."""
    x = np.int64(standing(nodes, results[REUSE_NODE, b], results[REUSE_GEN, b], end))
    while nodes[PARENT, x] != 0 and nodes[DEPTH, x] >= end:
        x = np.int64(nodes[PARENT, x])
    return x


@compiled
def _mark_full(nodes: Int32Array, node: int, end: int) -> int:
    """Mark the path of `node` up to page `end`; return the pages of it that nothing locks or has marked.

    A marked node has minus its marked pages, its first ones, in FULL_LOCKS. All nodes above it are locked or
    marked whole.
    """
    x = np.int64(node)
    more = 0
    while nodes[PARENT, x] != 0:
        known = nodes[FULL_LOCKS, x]
        pages = min(np.int64(nodes[PAGES, x]), end - nodes[DEPTH, x])
        if known > 0 or -known >= pages:
            break
        nodes[FULL_LOCKS, x] = -pages
        more += pages + known
        x = np.int64(nodes[PARENT, x])
    return more


@compiled
def _mark_swa(nodes: Int32Array, node: int, end: int, keep: int, mark: int, marked: Bytes) -> int:
    """Set `marked` of the slots of the window that ends at page `end`; return how many changed.

    Left out are nodes whose SWA is locked or gone.
    """
    first = max(end - keep, 0)
    x = np.int64(node)
    more = 0
    while nodes[PARENT, x] != 0 and nodes[DEPTH, x] + nodes[PAGES, x] > first:
        if nodes[SWA_LOCKS, x] == 0 and nodes[LIVE, x] != 0:
            slot = np.int64(nodes[START, x]) - nodes[DEPTH, x]  # of page 0, were it in this node
            above = min(np.int64(nodes[DEPTH, x] + nodes[PAGES, x]), end)
            for s in range(slot + max(first, np.int64(nodes[DEPTH, x])), slot + above):
                more += marked[s] != mark
                marked[s] = mark
        x = np.int64(nodes[PARENT, x])
    return more


@compiled
def how_many_fit(
    nodes: Int32Array,
    meta: Int64Array,
    results: Int32Array,
    index: Int64Array,
    pages: Int64Array,
    full_room: int,
    swa_room: int,
    marked: Bytes,
) -> int:
    """Return how many of the requests `index` of a match, which must still hold, fit in order.

    Args:
        pages: [n] pages that each takes of both pools, beside what it reuses.
        full_room, swa_room: Pages that are free or evictable now.
        marked: [slots], scratch, all 0 before and after.
    """
    page_size = meta[M_PAGE_SIZE]
    keep = meta[M_KEEP_PAGES]
    fit = 0
    seen = 0
    while seen < index.shape[0]:
        end = np.int64(results[REUSE, index[seen]]) // page_size
        n = _end_node(nodes, results, index[seen], end)
        full_room -= pages[seen] + _mark_full(nodes, n, end)
        swa_room -= pages[seen] + _mark_swa(nodes, n, end, keep, 1, marked)
        seen += 1
        if full_room < 0 or (keep > 0 and swa_room < 0):
            break
        fit += 1
    for i in range(seen):
        end = np.int64(results[REUSE, index[i]]) // page_size
        n = _end_node(nodes, results, index[i], end)
        _mark_swa(nodes, n, end, keep, 0, marked)
        while nodes[FULL_LOCKS, n] < 0:
            nodes[FULL_LOCKS, n] = 0
            n = np.int64(nodes[PARENT, n])
    return fit
