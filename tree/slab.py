"""Slots of the slab: runs of free slots in size classes, joined with their neighbours when freed.

Nothing is ever compacted. Where no run is long enough, an edge takes several shorter runs and becomes a
chain of nodes, so an allocation never fails while enough slots are free.
"""

from __future__ import annotations

import numpy as np

from kvcache.compiled import compiled, inlined
from kvcache.tree.arrays import (
    FULL_NEXT,
    FULL_PREV,
    GEN,
    M_BUMP,
    M_PAGE_SIZE,
    M_RUN_CLASSES,
    M_RUN_HEAD,
    M_SLAB_SIZE,
    M_SLAB_TOP,
    M_SPARE,
    PAGES,
    PARENT,
    RUN,
    SPARE,
    START,
    SWA_LOCKS,
    Int32Array,
    Int64Array,
)

# Runs of the next smaller class that are looked at before a longer piece of fresh slab is taken.
_LOOKS = 8


@inlined
def new_record(nodes: Int32Array, meta: Int64Array) -> int:
    """Take a record: a spare one, else the next that was never used."""
    n = meta[M_SPARE]
    if n != 0:
        meta[M_SPARE] = nodes[PARENT, n]
    else:
        n = meta[M_BUMP]
        meta[M_BUMP] = n + 1
    return n


@inlined
def spare_record(nodes: Int32Array, meta: Int64Array, n: int) -> None:
    """Give a record back."""
    nodes[SWA_LOCKS, n] = SPARE
    nodes[GEN, n] += 1
    nodes[PARENT, n] = meta[M_SPARE]
    meta[M_SPARE] = n


@inlined
def size_class(pages: int) -> int:
    """Return floor(log2(pages))."""
    c = 0
    while pages > 1:
        pages >>= 1
        c += 1
    return c


@compiled
def _link_run(nodes: Int32Array, meta: Int64Array, slab: Int32Array, r: int) -> None:
    c = size_class(nodes[PAGES, r])
    head = meta[M_RUN_HEAD + c]
    nodes[FULL_PREV, r] = 0
    nodes[FULL_NEXT, r] = head
    if head != 0:
        nodes[FULL_PREV, head] = r
    meta[M_RUN_HEAD + c] = r
    meta[M_RUN_CLASSES] |= np.int64(1) << c
    page_size = meta[M_PAGE_SIZE]
    start = np.int64(nodes[START, r])
    slab[start * page_size] = -r
    slab[(start + nodes[PAGES, r]) * page_size - 1] = -r


@compiled
def _unlink_run(nodes: Int32Array, meta: Int64Array, r: int) -> None:
    c = size_class(nodes[PAGES, r])
    p = nodes[FULL_PREV, r]
    x = nodes[FULL_NEXT, r]
    if p != 0:
        nodes[FULL_NEXT, p] = x
    else:
        meta[M_RUN_HEAD + c] = x
        if x == 0:
            meta[M_RUN_CLASSES] &= ~(np.int64(1) << c)
    if x != 0:
        nodes[FULL_PREV, x] = p


@compiled
def free_slots(nodes: Int32Array, meta: Int64Array, slab: Int32Array, start: int, n: int) -> None:
    """Free slots [start, start + n): join them with free neighbours."""
    page_size = meta[M_PAGE_SIZE]
    end = start + n
    if start > 0:
        left = -np.int64(slab[start * page_size - 1])
        if left > 0:
            start = np.int64(nodes[START, left])
            _unlink_run(nodes, meta, left)
            spare_record(nodes, meta, left)
    if end < meta[M_SLAB_TOP]:
        right = -np.int64(slab[end * page_size])
        if right > 0:
            end += np.int64(nodes[PAGES, right])
            _unlink_run(nodes, meta, right)
            spare_record(nodes, meta, right)
    if end == meta[M_SLAB_TOP]:
        meta[M_SLAB_TOP] = start
        return
    r = new_record(nodes, meta)
    nodes[SWA_LOCKS, r] = RUN
    nodes[START, r] = start
    nodes[PAGES, r] = end - start
    _link_run(nodes, meta, slab, r)


@compiled
def take_slots(nodes: Int32Array, meta: Int64Array, slab: Int32Array, n: int) -> tuple[int, int]:
    """Take up to `n` >= 1 slots in one run; return (first slot, how many). (0, 0): no slot is free."""
    c = size_class(n)
    whole = c if n == (1 << c) else c + 1
    r = np.int64(0)
    classes = meta[M_RUN_CLASSES] >> whole
    if classes != 0:
        while classes & 1 == 0:
            classes >>= 1
            whole += 1
        r = meta[M_RUN_HEAD + whole]
    else:
        r = meta[M_RUN_HEAD + c]
        looks = 0
        while r != 0 and nodes[PAGES, r] < n and looks < _LOOKS:
            r = np.int64(nodes[FULL_NEXT, r])
            looks += 1
        if r != 0 and nodes[PAGES, r] < n:
            r = np.int64(0)
    if r == 0:
        top = meta[M_SLAB_TOP]
        fresh = meta[M_SLAB_SIZE] - top
        if fresh > 0 and (fresh >= n or meta[M_RUN_CLASSES] == 0):
            n = min(n, fresh)
            meta[M_SLAB_TOP] = top + n
            return top, n
        if meta[M_RUN_CLASSES] == 0:
            return 0, 0
        r = meta[M_RUN_HEAD + size_class(meta[M_RUN_CLASSES])]
    start = np.int64(nodes[START, r])
    n = min(n, np.int64(nodes[PAGES, r]))
    _unlink_run(nodes, meta, r)
    if n == nodes[PAGES, r]:
        spare_record(nodes, meta, r)
    else:
        nodes[START, r] += n
        nodes[PAGES, r] -= n
        _link_run(nodes, meta, slab, r)
    return start, n
