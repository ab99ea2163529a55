"""Recency: two intrusive lists through the nodes, Full and SWA, both with record 0 as sentinel.

NEXT of the sentinel is the most recent node, PREV the least recent. Within one event a Full node is less
recent than its ancestors, so the least recent node is always a leaf; an SWA node is less recent than the
deeper ones, so the end of a kept window goes last. Locked nodes are in no list.
"""

from __future__ import annotations

import numpy as np

from kvcache.compiled import compiled, inlined
from kvcache.tree.arrays import (
    DEPTH,
    FULL_NEXT,
    FULL_PREV,
    OUT,
    PARENT,
    SWA_NEXT,
    SWA_PREV,
    Int32Array,
)


@inlined
def unlink_full(nodes: Int32Array, n: int) -> None:
    """Take `n` out of the Full list, if it is in."""
    p = nodes[FULL_PREV, n]
    if p != OUT:
        x = nodes[FULL_NEXT, n]
        nodes[FULL_NEXT, p] = x
        nodes[FULL_PREV, x] = p
        nodes[FULL_PREV, n] = OUT


@inlined
def push_full(nodes: Int32Array, n: int, after: int) -> None:
    """Put `n` into the Full list as the next less recent one than `after` (0: as the most recent)."""
    x = nodes[FULL_NEXT, after]
    nodes[FULL_PREV, n] = after
    nodes[FULL_NEXT, n] = x
    nodes[FULL_NEXT, after] = n
    nodes[FULL_PREV, x] = n


@inlined
def unlink_swa(nodes: Int32Array, n: int) -> None:
    """Take `n` out of the SWA list, if it is in."""
    p = nodes[SWA_PREV, n]
    if p != OUT:
        x = nodes[SWA_NEXT, n]
        nodes[SWA_NEXT, p] = x
        nodes[SWA_PREV, x] = p
        nodes[SWA_PREV, n] = OUT


@inlined
def push_swa(nodes: Int32Array, n: int, after: int) -> None:
    """Put `n` into the SWA list as the next less recent one than `after` (0: as the most recent)."""
    x = nodes[SWA_NEXT, after]
    nodes[SWA_PREV, n] = after
    nodes[SWA_NEXT, n] = x
    nodes[SWA_NEXT, after] = n
    nodes[SWA_PREV, x] = n


@compiled
def touch_full(nodes: Int32Array, n: int) -> None:
    """Make the path that ends with `n` the most recent; what is locked stays out."""
    x = np.int64(n)
    while nodes[PARENT, x] != 0:
        if nodes[FULL_PREV, x] != OUT:
            unlink_full(nodes, x)
            push_full(nodes, x, 0)
        x = np.int64(nodes[PARENT, x])


@compiled
def touch_swa(nodes: Int32Array, n: int, first_page: int) -> None:
    """Make the nodes from page `first_page` to the end of `n` the most recent; what is locked stays out.

    A node must begin at `first_page`.
    """
    x = np.int64(n)
    after = 0
    while nodes[PARENT, x] != 0 and nodes[DEPTH, x] >= first_page:
        if nodes[SWA_PREV, x] != OUT:
            unlink_swa(nodes, x)
            push_swa(nodes, x, after)
            after = x
        x = np.int64(nodes[PARENT, x])
