"""Namespaces: each has a root of its own, so two of them can never share a page."""

from __future__ import annotations

import numpy as np

from kvcache.compiled import compiled
from kvcache.tree.arrays import (
    CHILD,
    CHILDREN,
    DEPTH,
    FULL_LOCKS,
    FULL_NEXT,
    FULL_PREV,
    GEN,
    HEAD,
    LIVE,
    LOCK_GEN,
    LOCK_NODE,
    M_BORN,
    M_BUMP,
    M_BY_VALUE,
    M_CLOCK,
    M_EVICTED_KEY,
    M_FULL_LOCKED,
    M_FULL_PAGES,
    M_HAND,
    M_HIT,
    M_JOINED,
    M_JOINED_LAST,
    M_LOCKS_FREE,
    M_LOG_LOST,
    M_LOG_ROOM,
    M_MADE,
    M_MOVED,
    M_NODES,
    M_NUM_JOINED,
    M_OLD_MASK,
    M_RUN_CLASSES,
    M_RUN_HEAD,
    M_SLAB_TOP,
    M_SPARE,
    M_SWA_LOCKED,
    M_SWA_PAGES,
    M_TOUCHES,
    M_WINDOWS,
    NO_NODE,
    NUM_RUN_CLASSES,
    NUM_WINDOW_CLASSES,
    OUT,
    PAGES,
    PARENT,
    SPACE_NEXT,
    SPACE_PREV,
    START,
    SWA_LOCKS,
    SWA_NEXT,
    SWA_PREV,
    WIN_NEXT,
    WIN_PAGES,
    WIN_PLACE,
    WIN_PREV,
    WIN_REFS,
    Int32Array,
    Int64Array,
)
from kvcache.tree.changes import note_node
from kvcache.tree.evict import cut
from kvcache.tree.slab import new_record, spare_record


@compiled
def new_root(nodes: Int32Array, meta: Int64Array) -> int:
    """Make a namespace root; return the record. Its GEN is at least 1, so that no small int is a handle."""
    root = new_record(nodes, meta)
    nodes[GEN, root] = max(nodes[GEN, root], 1)
    nodes[PARENT, root] = 0
    nodes[START, root] = 0
    nodes[PAGES, root] = 0
    nodes[DEPTH, root] = 0
    nodes[CHILDREN, root] = 0
    nodes[CHILD, root] = 0
    nodes[FULL_LOCKS, root] = 0
    nodes[SWA_LOCKS, root] = 0
    nodes[LIVE, root] = 0
    nodes[FULL_PREV, root] = OUT
    nodes[SWA_PREV, root] = OUT
    nodes[HEAD, root] = -1
    nodes[SPACE_PREV, root] = root
    nodes[SPACE_NEXT, root] = root
    note_node(nodes, meta, root)
    return root


@compiled
def reset(nodes: Int32Array, meta: Int64Array, locks: Int32Array, free_locks: Int32Array) -> None:
    """Remove all nodes, runs and locks but the roots; the child table must be empty already."""
    meta[M_SPARE] = 0
    meta[M_JOINED] = 0
    meta[M_JOINED_LAST] = 0
    meta[M_NUM_JOINED] = 0
    for n in range(meta[M_BUMP] - 1, 0, -1):
        if nodes[SWA_LOCKS, n] >= 0 and nodes[PARENT, n] == 0:
            nodes[CHILDREN, n] = 0
            nodes[CHILD, n] = 0
            nodes[FULL_LOCKS, n] = 0
            nodes[SWA_LOCKS, n] = 0
            nodes[SPACE_PREV, n] = n
            nodes[SPACE_NEXT, n] = n
            note_node(nodes, meta, n)
        else:
            spare_record(nodes, meta, n)
    for list_end in (FULL_PREV, FULL_NEXT, SWA_PREV, SWA_NEXT, WIN_PREV, WIN_NEXT):
        nodes[list_end, NO_NODE] = NO_NODE
    for count in (M_NODES, M_FULL_PAGES, M_SWA_PAGES, M_FULL_LOCKED, M_SWA_LOCKED, M_TOUCHES):
        meta[count] = 0
    for count in (M_CLOCK, M_WINDOWS, M_BORN, M_HAND, M_EVICTED_KEY):
        meta[count] = 0
    for c in range(NUM_WINDOW_CLASSES):
        meta[M_HIT + c] = 0
        meta[M_MADE + c] = 0
    if meta[M_BY_VALUE] != 0:
        nodes[WIN_REFS, :] = 0
        nodes[WIN_PAGES, :] = 0
        nodes[WIN_PLACE, :] = 0
    meta[M_OLD_MASK] = 0
    meta[M_MOVED] = 0
    meta[M_SLAB_TOP] = 0
    meta[M_RUN_CLASSES] = 0
    for c in range(NUM_RUN_CLASSES):
        meta[M_RUN_HEAD + c] = 0
    num_locks = locks.shape[1]
    for k in range(num_locks):
        if locks[LOCK_NODE, k] != 0:
            locks[LOCK_NODE, k] = 0
            locks[LOCK_GEN, k] += 2
        free_locks[k] = num_locks - 1 - k
    meta[M_LOCKS_FREE] = num_locks
    if meta[M_LOG_ROOM] > 0:
        meta[M_LOG_LOST] = 1


@compiled
def is_root(nodes: Int32Array, handle: int) -> bool:
    """Return whether `handle` (GEN << 32 | root) is of a standing namespace."""
    root = handle & 0xFFFFFFFF
    # GEN 0: a record that was never used looks like a root otherwise
    if handle < 1 << 32 or root == 0 or root >= nodes.shape[1]:
        return False
    return (
        nodes[GEN, root] == handle >> 32
        and nodes[SWA_LOCKS, root] >= 0
        and nodes[PARENT, root] == 0
    )


@compiled
def first_bad_handle(nodes: Int32Array, handles: Int64Array) -> int:
    """Return the first handle that is of no standing namespace, or -1."""
    for i in range(handles.shape[0]):
        if not is_root(nodes, handles[i]):
            return i
    return -1


@compiled
def nodes_of_roots(nodes: Int32Array, roots: Int64Array) -> int:
    """Return how many nodes namespaces have."""
    num = 0
    for i in range(roots.shape[0]):
        x = np.int64(nodes[SPACE_NEXT, roots[i]])
        while x != roots[i]:
            num += 1
            x = np.int64(nodes[SPACE_NEXT, x])
    return num


@compiled
def drop_roots(
    nodes: Int32Array,
    meta: Int64Array,
    table: Int32Array,
    slab: Int32Array,
    ranges: Int32Array,
    roots: Int64Array,
) -> tuple[int, int, int]:
    """Remove unlocked namespaces with all their nodes; (ranges, Full pages freed, SWA pages freed).

    Walks their own nodes only, backwards: a node comes after its ancestors, so it is a leaf when its turn
    comes. `ranges` needs room for one a node.
    """
    num = 0
    full = np.int64(0)
    swa = np.int64(0)
    for i in range(roots.shape[0]):
        root = roots[i]
        x = np.int64(nodes[SPACE_PREV, root])
        while x != root:
            before = np.int64(nodes[SPACE_PREV, x])
            pages = np.int64(nodes[PAGES, x])
            full += pages
            if nodes[LIVE, x] != 0:
                swa += pages
            num = cut(nodes, meta, table, slab, ranges, num, x, pages)
            x = before
        spare_record(nodes, meta, root)
    return num, full, swa
