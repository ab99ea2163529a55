"""Join: undo a split that no longer tells two things apart; constant time, when a call passes by.

A node and its only child become one where every page of both would be treated alike: the same liveness, the
same locks, slots side by side, and neighbours in the order of both recency lists. No order changes.

The lower node's record stays, since locks and matches name a prefix by the node in which it ends. The upper
one's names its new owner from then on (`standing`), so a match that ended in it still holds. Such records
are used again in the order of their joins, and only after a good many others.
"""

from __future__ import annotations

import numpy as np

from kvcache.compiled import compiled, inlined
from kvcache.tree.arrays import (
    ANSWER_TAIL,
    BIRTH,
    CHILD,
    CHILDREN,
    DEPTH,
    FULL_LOCKS,
    FULL_PREV,
    GEN,
    HASH,
    HEAD,
    JOINED,
    LIVE,
    M_JOINED,
    M_JOINED_LAST,
    M_NODES,
    M_NUM_JOINED,
    NODE,
    OUT,
    PAGES,
    PARENT,
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
from kvcache.tree.children import slot_of_child, unfile_slot
from kvcache.tree.edges import leave_space
from kvcache.tree.hashing import child_tag
from kvcache.tree.recency import unlink_full, unlink_swa


@inlined
def are_alike(nodes: Int32Array, upper: int, lower: int) -> bool:
    """Return whether `upper` and its child `lower` can be one node."""
    return (
        nodes[CHILDREN, upper] == 1
        and nodes[LIVE, upper] == nodes[LIVE, lower]
        and nodes[FULL_LOCKS, upper] == nodes[FULL_LOCKS, lower]
        and nodes[SWA_LOCKS, upper] == nodes[SWA_LOCKS, lower]
        and nodes[START, upper] + nodes[PAGES, upper] == nodes[START, lower]
        and nodes[PARENT, upper] != 0
        # of the same windows: with as many of them and none that ends between the two
        and nodes[WIN_REFS, upper] == nodes[WIN_REFS, lower]
        and nodes[WIN_PAGES, upper] == 0
        and nodes[TAIL, upper] == nodes[TAIL, lower]
        and nodes[ANSWER_TAIL, upper] == nodes[ANSWER_TAIL, lower]
        # pages of a node go from its end in the Full list, from its beginning in the SWA list
        and (nodes[FULL_PREV, lower] == upper or nodes[FULL_PREV, lower] == OUT)
        and (nodes[SWA_PREV, upper] == lower or nodes[SWA_PREV, upper] == OUT)
    )


@compiled
def join(nodes: Int32Array, meta: Int64Array, table: Int32Array, upper: int, lower: int) -> None:
    """Make one node of `upper` and its only child `lower`, which are alike; `lower` keeps its record."""
    parent = np.int64(nodes[PARENT, upper])
    unfile_slot(
        meta, table, slot_of_child(meta, table, child_tag(upper, nodes[HASH, lower]), lower)
    )
    i = slot_of_child(meta, table, child_tag(parent, nodes[HASH, upper]), upper)
    table[i, NODE] = lower
    note_slot(meta, i)
    nodes[CHILD, parent] ^= upper ^ lower
    nodes[PARENT, lower] = parent
    nodes[START, lower] = nodes[START, upper]
    nodes[PAGES, lower] += nodes[PAGES, upper]
    nodes[DEPTH, lower] = nodes[DEPTH, upper]
    nodes[HASH, lower] = nodes[HASH, upper]
    nodes[HEAD, lower] = nodes[HEAD, upper]
    unlink_full(nodes, upper)
    unlink_swa(nodes, upper)
    leave_space(nodes, upper)
    meta[M_NODES] -= 1
    note_node(nodes, meta, lower)

    nodes[SWA_LOCKS, upper] = JOINED
    nodes[GEN, upper] += 1
    nodes[CHILD, upper] = lower
    nodes[HASH, upper] = nodes[BIRTH, lower]
    nodes[PARENT, upper] = 0
    if meta[M_NUM_JOINED] == 0:
        meta[M_JOINED] = upper
    else:
        nodes[PARENT, meta[M_JOINED_LAST]] = upper
    meta[M_JOINED_LAST] = upper
    meta[M_NUM_JOINED] += 1


@compiled
def _owner(nodes: Int32Array, n: int, end: int) -> int:
    """Return the node that has the pages of the joined record `n` up to page `end`; 0: one of them is gone.

    A node's end only ever moves back, and a joined record keeps the end that it had: where no record on the
    way ends before `end`, the pages below it are those that were named.
    """
    x = np.int64(n)
    while nodes[SWA_LOCKS, x] == JOINED:
        birth = nodes[HASH, x]
        x = np.int64(nodes[CHILD, x])
        if nodes[BIRTH, x] != birth or nodes[DEPTH, x] + nodes[PAGES, x] < end:
            return np.int64(0)
    return x if nodes[SWA_LOCKS, x] >= 0 else np.int64(0)


@inlined
def standing(nodes: Int32Array, n: int, gen: int, end: int) -> int:
    """Return the node that has page `end` - 1 of the prefix that (`n`, `gen`) named; 0: it is gone."""
    x = np.int64(n)
    if nodes[GEN, x] == gen:
        return x
    if nodes[SWA_LOCKS, x] == JOINED and nodes[GEN, x] == gen + 1:
        return _owner(nodes, x, end)
    return np.int64(0)
