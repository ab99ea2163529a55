"""Slots of the slab: runs of free slots in size classes, joined with their neighbours when freed.

Nothing is ever compacted. Where no run is long enough, an edge takes several shorter runs and becomes a
chain of nodes, so an allocation never fails while enough slots are free.
"""

from __future__ import annotations

import numpy as np

from kvcache.compiled import compiled, inlined
from kvcache.tree.arrays import (
    BIRTH,
    FULL_NEXT,
    FULL_PREV,
    GEN,
    M_BUMP,
    M_JOINED,
    M_NUM_JOINED,
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
# Records of joined nodes that are left alone: a match that named one of them still holds.
_KEEP_JOINED = 1024


@inlined
def new_record(nodes: Int32Array, meta: Int64Array) -> int:
    """Take a record: a spare one, one that was joined long ago, the next never used one, any joined one."""
    n = meta[M_SPARE]
    if n != 0:
        meta[M_SPARE] = nodes[PARENT, n]
    elif meta[M_NUM_JOINED] > _KEEP_JOINED or meta[M_BUMP] == nodes.shape[1]:
        n = meta[M_JOINED]
        meta[M_JOINED] = nodes[PARENT, n]
        meta[M_NUM_JOINED] -= 1
    else:
        n = meta[M_BUMP]
        meta[M_BUMP] = n + 1
    nodes[BIRTH, n] += 1
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
def _take_from(
    nodes: Int32Array, meta: Int64Array, slab: Int32Array, r: int, n: int
) -> tuple[int, int]:
    """Take the first `n` slots of the free run `r`, or all it has; return (first slot, how many)."""
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


@inlined
def _free_run_at(nodes: Int32Array, meta: Int64Array, slab: Int32Array, start: int) -> int:
    """Return the record of the free run that begins at slot `start`, 0 = none."""
    if start <= 0 or start >= meta[M_SLAB_TOP]:
        return np.int64(0)
    return max(-np.int64(slab[start * meta[M_PAGE_SIZE]]), 0)


@compiled
def take_slots(
    nodes: Int32Array, meta: Int64Array, slab: Int32Array, n: int, after: int
) -> tuple[int, int]:
    """Take up to `n` >= 1 slots in one run; return (first slot, how many). (0, 0): no slot is free.

    Slots from `after` on come first (0: no matter): a prefix whose pages lie side by side is one node.
    """
    top = meta[M_SLAB_TOP]
    if after > 0 and after == top and meta[M_SLAB_SIZE] - top >= n:
        meta[M_SLAB_TOP] = top + n
        return top, n
    near = _free_run_at(nodes, meta, slab, after)
    if near != 0 and nodes[PAGES, near] >= n:
        return _take_from(nodes, meta, slab, near, n)
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
        fresh = meta[M_SLAB_SIZE] - top
        if fresh > 0 and (fresh >= n or meta[M_RUN_CLASSES] == 0):
            n = min(n, fresh)
            meta[M_SLAB_TOP] = top + n
            return top, n
        if meta[M_RUN_CLASSES] == 0:
            return 0, 0
        r = meta[M_RUN_HEAD + size_class(meta[M_RUN_CLASSES])]
    return _take_from(nodes, meta, slab, r, n)
