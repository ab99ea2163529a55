"""Heap of the windows: at place 1 is the node whose window goes first. The places are in the nodes."""

from __future__ import annotations

import numpy as np

from kvcache.compiled import compiled, inlined
from kvcache.tree.arrays import (
    HEAP,
    M_WINDOWS,
    WIN_BORN,
    WIN_KEY,
    WIN_PLACE,
    Int32Array,
    Int64Array,
)


@inlined
def _before(nodes: Int32Array, x: int, y: int) -> bool:
    """Whether the window of `x` goes before that of `y`: the lesser key, then the older."""
    return nodes[WIN_KEY, x] < nodes[WIN_KEY, y] or (
        nodes[WIN_KEY, x] == nodes[WIN_KEY, y] and nodes[WIN_BORN, x] < nodes[WIN_BORN, y]
    )


@inlined
def _put(nodes: Int32Array, place: int, n: int) -> None:
    nodes[HEAP, place] = n
    nodes[WIN_PLACE, n] = place


@compiled
def settle(nodes: Int32Array, meta: Int64Array, n: int) -> None:
    """Move `n`, which is in the heap and whose key has changed, to where it belongs."""
    place = np.int64(nodes[WIN_PLACE, n])
    while place > 1 and _before(nodes, n, nodes[HEAP, place >> 1]):
        _put(nodes, place, nodes[HEAP, place >> 1])
        place >>= 1
    size = meta[M_WINDOWS]
    while 2 * place <= size:
        child = 2 * place
        if child < size and _before(nodes, nodes[HEAP, child + 1], nodes[HEAP, child]):
            child += 1
        if not _before(nodes, nodes[HEAP, child], n):
            break
        _put(nodes, place, nodes[HEAP, child])
        place = child
    _put(nodes, place, n)


@compiled
def push(nodes: Int32Array, meta: Int64Array, n: int) -> None:
    """Enter `n`, whose key is set."""
    meta[M_WINDOWS] += 1
    _put(nodes, meta[M_WINDOWS], n)
    settle(nodes, meta, n)


@compiled
def remove(nodes: Int32Array, meta: Int64Array, n: int) -> None:
    """Take `n` out."""
    place = np.int64(nodes[WIN_PLACE, n])
    last = np.int64(nodes[HEAP, meta[M_WINDOWS]])
    meta[M_WINDOWS] -= 1
    nodes[WIN_PLACE, n] = 0
    if last != n:
        _put(nodes, place, last)
        settle(nodes, meta, last)
