"""Windows as things: make one that ends at a checkpoint, and drop one."""

from __future__ import annotations

import numpy as np

from kvcache.compiled import compiled
from kvcache.tree import heap
from kvcache.tree.arrays import (
    ANSWER_TAIL,
    DEPTH,
    LIVE,
    M_BORN,
    M_CLOCK,
    M_EVICTED_KEY,
    M_HAND,
    M_KEEP_PAGES,
    M_MADE,
    NO_NODE,
    PAGES,
    PARENT,
    SWA_LOCKS,
    SWA_PREV,
    TAIL,
    WIN_AWAITED,
    WIN_BORN,
    WIN_CLASS,
    WIN_GAP,
    WIN_KEY,
    WIN_LAST,
    WIN_MASK,
    WIN_NEXT,
    WIN_PAGES,
    WIN_PREV,
    WIN_PRIORITY,
    WIN_REFS,
    WIN_USES,
    Int32Array,
    Int64Array,
)
from kvcache.tree.edges import node_ending_at
from kvcache.tree.recency import push_swa, unlink_swa
from kvcache.tree.value import FORK, RUNGS, USED_OFTEN, fallback, key_of, rekey

_ONE = 1 << 16
# admissions before a rung can be turned away: until then too little is learned
_LEARNED_AFTER = 200


@compiled
def _is_whole(nodes: Int32Array, n: int, first: int) -> bool:
    """Whether all pages from `first` to the end of node `n` are live."""
    x = np.int64(n)
    while nodes[PARENT, x] != 0 and nodes[DEPTH, x] + nodes[PAGES, x] > first:
        if nodes[LIVE, x] == 0:
            return False
        x = np.int64(nodes[PARENT, x])
    return True


@compiled
def make_window(
    nodes: Int32Array,
    meta: Int64Array,
    table: Int32Array,
    slab: Int32Array,
    node: int,
    end: int,
    kind: int,
    priority: int,
) -> None:
    """Keep the window that ends at page `end` of the path of `node`, if all of it is live.

    A rung that would be worth less than what was given up last is not made: it would go next.
    """
    now = meta[M_CLOCK]
    first = max(end - meta[M_KEEP_PAGES], 0)
    n = np.int64(node_ending_at(nodes, meta, table, slab, node, end))
    if nodes[WIN_PAGES, n] != 0:
        nodes[WIN_LAST, n] = now
        nodes[WIN_PRIORITY, n] = max(nodes[WIN_PRIORITY, n], priority)
        if kind == FORK and nodes[WIN_USES, n] < 2:
            nodes[WIN_USES, n] = 2
            meta[M_MADE + USED_OFTEN] += _ONE
        rekey(nodes, meta, n)
        return
    if not _is_whole(nodes, n, first):
        return
    if first > 0:
        node_ending_at(nodes, meta, table, slab, n, first)
    x = n
    while nodes[PARENT, x] != 0 and nodes[DEPTH, x] >= first:
        nodes[WIN_REFS, x] += 1
        unlink_swa(nodes, x)
        x = np.int64(nodes[PARENT, x])
    nodes[WIN_PAGES, n] = end - first
    nodes[WIN_LAST, n] = now
    nodes[WIN_PRIORITY, n] = priority
    nodes[WIN_AWAITED, n] = 0
    nodes[WIN_CLASS, n] = kind
    nodes[WIN_MASK, n] = 0
    nodes[WIN_GAP, n] = 0
    nodes[WIN_USES, n] = 2 if kind == FORK else 0
    nodes[WIN_BORN, n] = meta[M_BORN] & 0x7FFFFFFF
    meta[M_BORN] += 1
    meta[M_MADE + (USED_OFTEN if kind == FORK else kind)] += _ONE
    last = np.int64(nodes[WIN_PREV, NO_NODE])
    nodes[WIN_PREV, n] = last
    nodes[WIN_NEXT, n] = NO_NODE
    nodes[WIN_NEXT, last] = n
    nodes[WIN_PREV, NO_NODE] = n
    nodes[WIN_KEY, n] = key_of(nodes, meta, n)
    heap.push(nodes, meta, n)
    if kind < RUNGS and now > _LEARNED_AFTER and nodes[WIN_KEY, n] < meta[M_EVICTED_KEY]:
        drop_window(nodes, meta, n, False)


@compiled
def drop_window(nodes: Int32Array, meta: Int64Array, n: int, inherits: bool) -> None:
    """Forget the window that ends with `n`: what nothing keeps any more goes first, its end last.

    Args:
        inherits: Whether the next shallower window takes over its classes.
    """
    if inherits:
        f = fallback(nodes, n)
        if f != 0:
            nodes[WIN_MASK, f] |= nodes[WIN_MASK, n] | (1 << nodes[WIN_CLASS, n])
    heap.remove(nodes, meta, n)
    before, after = np.int64(nodes[WIN_PREV, n]), np.int64(nodes[WIN_NEXT, n])
    nodes[WIN_NEXT, before] = after
    nodes[WIN_PREV, after] = before
    if meta[M_HAND] == n:
        meta[M_HAND] = before
    first = np.int64(nodes[DEPTH, n] + nodes[PAGES, n] - nodes[WIN_PAGES, n])
    nodes[WIN_PAGES, n] = 0
    x = np.int64(n)
    while nodes[PARENT, x] != 0 and nodes[DEPTH, x] >= first:
        nodes[WIN_REFS, x] -= 1
        if nodes[WIN_REFS, x] == 0 and nodes[SWA_LOCKS, x] == 0:
            push_swa(nodes, x, np.int64(nodes[SWA_PREV, NO_NODE]))
        x = np.int64(nodes[PARENT, x])


@compiled
def note_tails(nodes: Int32Array, meta: Int64Array, node: int, prompt: int, end: int) -> None:
    """Note on the path that ends with `node` where the last prompt through it ended, and its answer."""
    x = np.int64(node)
    while nodes[PARENT, x] != 0:
        nodes[TAIL, x] = prompt
        nodes[ANSWER_TAIL, x] = end
        x = np.int64(nodes[PARENT, x])


@compiled
def give_up_window(nodes: Int32Array, meta: Int64Array, n: int) -> None:
    """Drop the window that is worth least, to make room."""
    meta[M_EVICTED_KEY] = nodes[WIN_KEY, n]
    drop_window(nodes, meta, n, True)
