"""Nodes: make, split, remove. Splitting keeps the record of the lower half, so locks and hints stay valid."""

from __future__ import annotations

import numpy as np

from kvcache.compiled import compiled, inlined
from kvcache.tree.arrays import (
    ANSWER_TAIL,
    CHILD,
    CHILDREN,
    DEPTH,
    FULL_LOCKS,
    FULL_PREV,
    GEN,
    HASH,
    HEAD,
    LIVE,
    M_BY_VALUE,
    M_FULL_PAGES,
    M_NODES,
    M_SWA_LOCKED,
    M_SWA_PAGES,
    NODE,
    OUT,
    PAGES,
    PARENT,
    SPACE_NEXT,
    SPACE_PREV,
    START,
    SWA_LOCKS,
    SWA_PREV,
    TAIL,
    WIN_PAGES,
    WIN_REFS,
    Int32Array,
    Int64Array,
)
from kvcache.tree.changes import note_node, note_slot
from kvcache.tree.children import file_child, first_page_hash_of, slot_of_child, unfile_slot
from kvcache.tree.hashing import child_tag
from kvcache.tree.recency import push_full, push_swa, unlink_full, unlink_swa
from kvcache.tree.slab import free_slots, new_record, spare_record


@inlined
def join_space(nodes: Int32Array, n: int, after: int) -> None:
    """Enter `n` into the ring of its namespace, behind its parent or what follows that."""
    x = nodes[SPACE_NEXT, after]
    nodes[SPACE_PREV, n] = after
    nodes[SPACE_NEXT, n] = x
    nodes[SPACE_NEXT, after] = n
    nodes[SPACE_PREV, x] = n


@inlined
def leave_space(nodes: Int32Array, n: int) -> None:
    """Take `n` out of the ring of its namespace; every node that goes does so."""
    p = nodes[SPACE_PREV, n]
    x = nodes[SPACE_NEXT, n]
    nodes[SPACE_NEXT, p] = x
    nodes[SPACE_PREV, x] = p


@inlined
def new_node(
    nodes: Int32Array, meta: Int64Array, parent: int, start: int, pages: int, depth: int, head: int
) -> int:
    """Make an unlocked tombstone that is in no recency list and not filed yet."""
    n = new_record(nodes, meta)
    nodes[PARENT, n] = parent
    nodes[START, n] = start
    nodes[PAGES, n] = pages
    nodes[DEPTH, n] = depth
    nodes[CHILDREN, n] = 0
    nodes[CHILD, n] = 0
    nodes[FULL_LOCKS, n] = 0
    nodes[SWA_LOCKS, n] = 0
    nodes[LIVE, n] = 0
    nodes[FULL_PREV, n] = OUT
    nodes[SWA_PREV, n] = OUT
    nodes[HEAD, n] = head
    if meta[M_BY_VALUE] != 0:
        nodes[WIN_REFS, n] = 0
        nodes[WIN_PAGES, n] = 0
        nodes[TAIL, n] = 0
        nodes[ANSWER_TAIL, n] = 0
    join_space(nodes, n, parent)
    note_node(nodes, meta, n)
    return n


@inlined
def file_node(
    nodes: Int32Array, meta: Int64Array, table: Int32Array, slab: Int32Array, n: int
) -> None:
    """Hash the first page of a new node and enter it under its parent."""
    first = first_page_hash_of(nodes, meta, slab, n)
    nodes[HASH, n] = first
    parent = nodes[PARENT, n]
    file_child(meta, table, child_tag(parent, first), n)
    nodes[CHILDREN, parent] += 1
    nodes[CHILD, parent] ^= n
    meta[M_NODES] += 1
    meta[M_FULL_PAGES] += nodes[PAGES, n]


@compiled
def split(
    nodes: Int32Array, meta: Int64Array, table: Int32Array, slab: Int32Array, n: int, pages: int
) -> int:
    """Cut the first `pages` pages off `n` into a new node above it and return that; `n` keeps its end."""
    parent = nodes[PARENT, n]
    upper = new_node(nodes, meta, parent, nodes[START, n], pages, nodes[DEPTH, n], nodes[HEAD, n])
    nodes[CHILDREN, upper] = 1
    nodes[CHILD, upper] = n
    nodes[CHILD, parent] ^= n ^ upper
    nodes[FULL_LOCKS, upper] = nodes[FULL_LOCKS, n]
    nodes[SWA_LOCKS, upper] = nodes[SWA_LOCKS, n]
    nodes[LIVE, upper] = nodes[LIVE, n]
    if meta[M_BY_VALUE] != 0:
        nodes[WIN_REFS, upper] = nodes[WIN_REFS, n]
        nodes[TAIL, upper] = nodes[TAIL, n]
        nodes[ANSWER_TAIL, upper] = nodes[ANSWER_TAIL, n]
    nodes[HASH, upper] = nodes[HASH, n]
    i = slot_of_child(meta, table, child_tag(parent, nodes[HASH, n]), n)
    table[i, NODE] = upper
    note_slot(meta, i)
    note_node(nodes, meta, n)

    nodes[PARENT, n] = upper
    nodes[START, n] += pages
    nodes[PAGES, n] -= pages
    nodes[DEPTH, n] += pages
    nodes[HEAD, n] = -1
    first = first_page_hash_of(nodes, meta, slab, n)
    nodes[HASH, n] = first
    file_child(meta, table, child_tag(upper, first), n)
    meta[M_NODES] += 1
    if nodes[FULL_PREV, n] != OUT:
        push_full(nodes, upper, nodes[FULL_PREV, n])
    if nodes[SWA_PREV, n] != OUT:
        push_swa(nodes, upper, n)
    return upper


@compiled
def node_ending_at(
    nodes: Int32Array, meta: Int64Array, table: Int32Array, slab: Int32Array, n: int, end: int
) -> int:
    """Return the node on the path of `n` whose last page ends at page `end`; split one where need be."""
    x = np.int64(n)
    while nodes[PARENT, x] != 0 and nodes[DEPTH, x] >= end:
        x = np.int64(nodes[PARENT, x])
    if nodes[DEPTH, x] + nodes[PAGES, x] > end:
        return split(nodes, meta, table, slab, x, end - nodes[DEPTH, x])
    return x


@compiled
def remove_tail(
    nodes: Int32Array, meta: Int64Array, table: Int32Array, slab: Int32Array, n: int, pages: int
) -> None:
    """Remove the last `pages` pages of the unlocked leaf `n`; all of them removes the node."""
    left = nodes[PAGES, n] - pages
    start = np.int64(nodes[START, n]) + left
    meta[M_FULL_PAGES] -= pages
    if nodes[LIVE, n] != 0:
        meta[M_SWA_PAGES] -= pages
    if left > 0:
        nodes[PAGES, n] = left
        nodes[GEN, n] += 1
        note_node(nodes, meta, n)
    else:
        parent = nodes[PARENT, n]
        tag = child_tag(parent, nodes[HASH, n])
        unfile_slot(meta, table, slot_of_child(meta, table, tag, n))
        nodes[CHILDREN, parent] -= 1
        nodes[CHILD, parent] ^= n
        unlink_full(nodes, n)
        unlink_swa(nodes, n)
        leave_space(nodes, n)
        meta[M_NODES] -= 1
        spare_record(nodes, meta, n)
    free_slots(nodes, meta, slab, start, pages)


@inlined
def make_live(nodes: Int32Array, meta: Int64Array, n: int) -> None:
    """Turn the tombstone `n` live, as the most recent of the SWA list unless it is locked."""
    nodes[LIVE, n] = 1
    note_node(nodes, meta, n)
    meta[M_SWA_PAGES] += nodes[PAGES, n]
    if nodes[SWA_LOCKS, n] == 0:
        push_swa(nodes, n, 0)
    else:
        meta[M_SWA_LOCKED] += nodes[PAGES, n]


@compiled
def make_tombstone(nodes: Int32Array, meta: Int64Array, n: int) -> None:
    """Turn the live node `n`, whose SWA is not locked, into a tombstone."""
    nodes[LIVE, n] = 0
    note_node(nodes, meta, n)
    meta[M_SWA_PAGES] -= nodes[PAGES, n]
    unlink_swa(nodes, n)
