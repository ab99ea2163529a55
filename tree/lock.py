"""Locks: Full up the whole path, SWA over the trailing window only; receipts survive every split.

A lock is (node, end, first page whose SWA is locked). Positions never change and a split leaves the end with
the same record, so a receipt stays right whatever happens to the nodes on its path.
"""

from __future__ import annotations

import numpy as np

from kvcache.compiled import compiled
from kvcache.tree.arrays import (
    CHILD,
    CHILDREN,
    DEPTH,
    FULL_LOCKS,
    JOINED,
    LIVE,
    LOCK_END,
    LOCK_GEN,
    LOCK_LEARNS,
    LOCK_NODE,
    LOCK_PRIORITY,
    LOCK_SWA,
    M_BY_VALUE,
    M_FULL_LOCKED,
    M_KEEP_PAGES,
    M_LOCKS_FREE,
    M_PAGE_SIZE,
    M_SWA_LOCKED,
    OUT,
    PAGES,
    PARENT,
    SWA_LOCKS,
    SWA_PREV,
    WIN_REFS,
    Int32Array,
    Int64Array,
)
from kvcache.tree.edges import node_ending_at
from kvcache.tree.join import are_alike, join, standing
from kvcache.tree.match import FULL_HIT, REUSE, REUSE_GEN, REUSE_NODE
from kvcache.tree.recency import push_full, push_swa, unlink_full, unlink_swa
from kvcache.tree.value import note_admission, rekey_locked


@compiled
def lock_full(nodes: Int32Array, meta: Int64Array, node: int, above: int) -> None:
    """Lock the Full pages from `node` up to, but not including, node `above` (0: the root included)."""
    x = np.int64(node)
    while x != above:
        if nodes[FULL_LOCKS, x] == 0:
            unlink_full(nodes, x)
            meta[M_FULL_LOCKED] += nodes[PAGES, x]
        nodes[FULL_LOCKS, x] += 1
        x = np.int64(nodes[PARENT, x])


@compiled
def unlock_full(nodes: Int32Array, meta: Int64Array, table: Int32Array, node: int) -> None:
    """Unlock the Full pages of the path; what nobody locks any more becomes the most recent.

    Nodes that are alike then are joined.
    """
    x = np.int64(node)
    below = np.int64(nodes[CHILD, x]) if nodes[CHILDREN, x] == 1 else np.int64(0)
    while x != 0:
        nodes[FULL_LOCKS, x] -= 1
        parent = np.int64(nodes[PARENT, x])
        if nodes[FULL_LOCKS, x] == 0 and parent != 0:
            meta[M_FULL_LOCKED] -= nodes[PAGES, x]
            push_full(nodes, x, 0)
        if below != 0 and are_alike(nodes, x, below):
            join(nodes, meta, table, x, below)
        else:
            below = x
        x = parent


@compiled
def lock_swa(
    nodes: Int32Array,
    meta: Int64Array,
    table: Int32Array,
    slab: Int32Array,
    node: int,
    end: int,
    frontier: int,
) -> int:
    """Lock the SWA of the window before `end`, where `node` ends, from `frontier` on; return its start."""
    first = max(end - meta[M_KEEP_PAGES], min(frontier, end), 0)
    if first > 0 and first < end:
        node_ending_at(nodes, meta, table, slab, node, first)
    x = np.int64(node)
    while nodes[PARENT, x] != 0 and nodes[DEPTH, x] >= first:
        if nodes[SWA_LOCKS, x] == 0 and nodes[LIVE, x] != 0:
            unlink_swa(nodes, x)
            meta[M_SWA_LOCKED] += nodes[PAGES, x]
        nodes[SWA_LOCKS, x] += 1
        x = np.int64(nodes[PARENT, x])
    if meta[M_BY_VALUE] != 0:
        rekey_locked(nodes, meta, node, first, end, 1)
    return first


@compiled
def unlock_swa(
    nodes: Int32Array, meta: Int64Array, table: Int32Array, node: int, first: int
) -> None:
    """Unlock the SWA from page `first` to the end of `node`; what nobody locks becomes the most recent.

    Nodes that are alike then are joined.
    """
    x = np.int64(node)
    end = np.int64(nodes[DEPTH, x] + nodes[PAGES, x])
    after = np.int64(0)
    below = np.int64(nodes[CHILD, x]) if nodes[CHILDREN, x] == 1 else np.int64(0)
    while nodes[PARENT, x] != 0 and nodes[DEPTH, x] >= first:
        nodes[SWA_LOCKS, x] -= 1
        if nodes[SWA_LOCKS, x] == 0 and nodes[LIVE, x] != 0:
            meta[M_SWA_LOCKED] -= nodes[PAGES, x]
            if nodes[SWA_PREV, x] == OUT and nodes[WIN_REFS, x] == 0:
                push_swa(nodes, x, after)
                after = x
        parent = np.int64(nodes[PARENT, x])
        if below != 0 and are_alike(nodes, x, below):
            join(nodes, meta, table, x, below)
            after = below if after == x else after
        else:
            below = x
        x = parent
    if below != 0 and are_alike(nodes, x, below):
        join(nodes, meta, table, x, below)
    if meta[M_BY_VALUE] != 0:
        # it may have been joined with the one below, which ends later
        x = np.int64(nodes[CHILD, node] if nodes[SWA_LOCKS, node] == JOINED else node)
        rekey_locked(nodes, meta, x, first, end, 0)


@compiled
def first_bad_receipt(locks: Int32Array, receipts: Int64Array) -> int:
    """Return the index of the first receipt that is not of a standing lock, or that comes twice; -1: none."""
    for i in range(receipts.shape[0]):
        k = receipts[i] & 0xFFFFFFFF
        if receipts[i] < 0 or k >= locks.shape[1] or locks[LOCK_NODE, k] == 0:
            return i
        if locks[LOCK_GEN, k] != receipts[i] >> 32:
            return i
    for i in range(receipts.shape[0]):  # a standing lock's GEN is even: mark what was seen
        k = receipts[i] & 0xFFFFFFFF
        if locks[LOCK_GEN, k] & 1:
            for j in range(i):
                locks[LOCK_GEN, receipts[j] & 0xFFFFFFFF] &= ~1
            return i
        locks[LOCK_GEN, k] |= 1
    for i in range(receipts.shape[0]):
        locks[LOCK_GEN, receipts[i] & 0xFFFFFFFF] &= ~1
    return -1


@compiled
def lock_matched(
    nodes: Int32Array,
    meta: Int64Array,
    table: Int32Array,
    slab: Int32Array,
    locks: Int32Array,
    free_locks: Int32Array,
    results: Int32Array,
    index: Int64Array,
    receipts: Int64Array,
    priorities: Int64Array,
    admits: bool,
) -> None:
    """Lock the reusable prefix of each request in `index` of a match; write a receipt for each.

    `priorities` [n] of the requests; `admits`: as admissions, which count and teach (value.py).
    """
    page_size = meta[M_PAGE_SIZE]
    for i in range(index.shape[0]):
        # a node may have been joined with the one below since the match
        end = np.int64(results[REUSE, index[i]]) // page_size
        anchor = standing(nodes, results[REUSE_NODE, index[i]], results[REUSE_GEN, index[i]], end)
        n = np.int64(node_ending_at(nodes, meta, table, slab, anchor, end))
        learns = False
        if admits and meta[M_BY_VALUE] != 0:
            hit = np.int64(results[FULL_HIT, index[i]]) // page_size
            learns = note_admission(nodes, meta, n, end, hit, priorities[i])
        lock_full(nodes, meta, n, 0)
        first = lock_swa(nodes, meta, table, slab, n, end, 0)
        meta[M_LOCKS_FREE] -= 1
        k = np.int64(free_locks[meta[M_LOCKS_FREE]])
        locks[LOCK_NODE, k] = n
        locks[LOCK_END, k] = end
        locks[LOCK_SWA, k] = first
        locks[LOCK_LEARNS, k] = learns
        locks[LOCK_PRIORITY, k] = priorities[i]
        receipts[i] = (np.int64(locks[LOCK_GEN, k]) << 32) | k


@compiled
def unlock(
    nodes: Int32Array,
    meta: Int64Array,
    table: Int32Array,
    locks: Int32Array,
    free_locks: Int32Array,
    receipts: Int64Array,
) -> int:
    """Release locks, in order.

    Returns:
        -1, or the index of a bad receipt; then nothing was released.
    """
    bad = first_bad_receipt(locks, receipts)
    if bad >= 0:
        return bad
    for i in range(receipts.shape[0]):
        k = receipts[i] & 0xFFFFFFFF
        n = np.int64(locks[LOCK_NODE, k])
        if locks[LOCK_SWA, k] < locks[LOCK_END, k]:
            unlock_swa(nodes, meta, table, n, locks[LOCK_SWA, k])
        unlock_full(nodes, meta, table, n)
        locks[LOCK_NODE, k] = 0
        locks[LOCK_GEN, k] += 2
        free_locks[meta[M_LOCKS_FREE]] = k
        meta[M_LOCKS_FREE] += 1
    return -1


@compiled
def release_swa(
    nodes: Int32Array,
    meta: Int64Array,
    table: Int32Array,
    locks: Int32Array,
    receipts: Int64Array,
) -> int:
    """Release the SWA part of locks early, in order; a second time it changes nothing.

    Returns:
        -1, or the index of a bad receipt; then nothing was released.
    """
    bad = first_bad_receipt(locks, receipts)
    if bad >= 0:
        return bad
    for i in range(receipts.shape[0]):
        k = receipts[i] & 0xFFFFFFFF
        if locks[LOCK_SWA, k] < locks[LOCK_END, k]:
            unlock_swa(nodes, meta, table, np.int64(locks[LOCK_NODE, k]), locks[LOCK_SWA, k])
            locks[LOCK_SWA, k] = locks[LOCK_END, k]
    return -1
