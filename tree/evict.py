"""Evict: exactly as many pages as asked for, least recent first, at a constant cost a node.

Full pages go from the ends of the least recent unlocked leaves. Where a leaf has lost its end, what is left
of it down to the next length that can be reused is worth nothing and goes too: a tombstone leaf never
survives its window.

SWA pages go in the order of the SWA recency list, a window's shallow pages first. An inner page becomes a
tombstone; the last page of an unlocked leaf goes with its Full page. A window that has lost a page keeps its
place in the order, so it gives up the rest before another window is touched.
"""

from __future__ import annotations

import numpy as np

from kvcache.compiled import compiled
from kvcache.tree.arrays import (
    CHILDREN,
    DEPTH,
    FULL_LOCKS,
    FULL_PREV,
    LIVE,
    M_KEEP_PAGES,
    M_NODES,
    NO_NODE,
    PAGES,
    PARENT,
    START,
    SWA_PREV,
    WIN_PAGES,
    Int32Array,
    Int64Array,
)
from kvcache.tree.edges import make_tombstone, remove_tail, split
from kvcache.tree.kept import drop_window, give_up_window
from kvcache.tree.ranges import DROP_SLOT, FREE_SLOT, FREE_SLOT_SWA, emit
from kvcache.tree.value import least_window


@compiled
def cut(
    nodes: Int32Array,
    meta: Int64Array,
    table: Int32Array,
    slab: Int32Array,
    ranges: Int32Array,
    num: int,
    n: int,
    pages: int,
) -> int:
    """Remove the last `pages` pages of leaf `n` and say so in a range."""
    slot = np.int64(nodes[START, n]) + nodes[PAGES, n] - pages
    kind = FREE_SLOT_SWA if nodes[LIVE, n] != 0 else FREE_SLOT
    if nodes[WIN_PAGES, n] != 0:
        drop_window(nodes, meta, n, False)
    num = emit(ranges, num, kind, -1, -1, slot, pages)
    remove_tail(nodes, meta, table, slab, n, pages)
    return num


@compiled
def _can_be_reused(nodes: Int32Array, keep: int, n: int) -> bool:
    """Whether the prefix that ends with node `n` has its whole window."""
    x = np.int64(n)
    end = np.int64(nodes[DEPTH, x] + nodes[PAGES, x])
    while nodes[PARENT, x] != 0:
        if nodes[LIVE, x] == 0:
            return False
        if end - nodes[DEPTH, x] >= keep:
            return True
        x = np.int64(nodes[PARENT, x])
    return True


@compiled
def _trim(
    nodes: Int32Array,
    meta: Int64Array,
    table: Int32Array,
    slab: Int32Array,
    ranges: Int32Array,
    num: int,
    n: int,
) -> tuple[int, int, int]:
    """Remove unlocked leaves from `n` upwards until one can be reused; (ranges, Full pages, SWA pages).

    If the end of a leaf cannot be reused, no shorter length inside it can: it is live as a whole or not.
    """
    keep = meta[M_KEEP_PAGES]
    full = 0
    swa = 0
    x = np.int64(n)
    while (
        keep > 0
        and nodes[PARENT, x] != 0
        and nodes[CHILDREN, x] == 0
        and nodes[FULL_LOCKS, x] == 0
        and not _can_be_reused(nodes, keep, x)
    ):
        parent = np.int64(nodes[PARENT, x])
        pages = np.int64(nodes[PAGES, x])
        full += pages
        if nodes[LIVE, x] != 0:
            swa += pages
        num = cut(nodes, meta, table, slab, ranges, num, x, pages)
        x = parent
    return num, full, swa


@compiled
def evict(
    nodes: Int32Array,
    meta: Int64Array,
    table: Int32Array,
    slab: Int32Array,
    ranges: Int32Array,
    full_pages: int,
    swa_pages: int,
) -> tuple[int, int, int]:
    """Free at least `full_pages` Full and `swa_pages` SWA pages of what is unlocked, or all there is.

    Args:
        ranges: [capacity, 5], out.

    Returns:
        (ranges, Full pages freed, SWA pages freed); (-1, 0, 0): `ranges` has no room for two ranges a node
        and eight more, and nothing was done.
    """
    num = 0
    full = np.int64(0)
    swa = np.int64(0)
    if ranges.shape[0] < 2 * meta[M_NODES] + 8:
        return -1, full, swa
    while full < full_pages:
        x = np.int64(nodes[FULL_PREV, NO_NODE])
        if x == NO_NODE:
            break
        pages = np.int64(nodes[PAGES, x])
        n = min(pages, full_pages - full)
        above = x if n < pages else np.int64(nodes[PARENT, x])
        full += n
        if nodes[LIVE, x] != 0:
            swa += n
        num = cut(nodes, meta, table, slab, ranges, num, x, n)
        num, more, more_swa = _trim(nodes, meta, table, slab, ranges, num, above)
        full += more
        swa += more_swa
    while swa < swa_pages:
        x = np.int64(nodes[SWA_PREV, NO_NODE])
        if x == NO_NODE:
            x = least_window(nodes, meta)
            if x == 0:
                break
            give_up_window(nodes, meta, x)
            continue
        pages = np.int64(nodes[PAGES, x])
        n = min(pages, swa_pages - swa)
        if n < pages:
            x = np.int64(split(nodes, meta, table, slab, x, n))
        if nodes[CHILDREN, x] > 0 or nodes[FULL_LOCKS, x] > 0:
            num = emit(ranges, num, DROP_SLOT, -1, -1, np.int64(nodes[START, x]), n)
            make_tombstone(nodes, meta, x)
            swa += n
        else:
            parent = np.int64(nodes[PARENT, x])
            num = cut(nodes, meta, table, slab, ranges, num, x, n)
            num, more, more_swa = _trim(nodes, meta, table, slab, ranges, num, parent)
            full += n + more
            swa += n + more_swa
    return num, full, swa
