"""Segments: where in the slab the pages of a locked prefix lie, for binding them into a row."""

from __future__ import annotations

import numpy as np

from kvcache.compiled import compiled
from kvcache.tree.arrays import DEPTH, LOCK_NODE, PAGES, PARENT, START, Int32Array, Int64Array
from kvcache.tree.ranges import BIND, COUNT, KIND, PAGE, REQUEST, SLOT


@compiled
def bind_ranges(
    nodes: Int32Array, locks: Int32Array, receipts: Int64Array, ranges: Int32Array
) -> int:
    """Write a BIND range for every run of slots on each locked path, deepest first; return how many."""
    num = 0
    for b in range(receipts.shape[0]):
        x = np.int64(locks[LOCK_NODE, receipts[b] & 0xFFFFFFFF])
        first = num
        while nodes[PARENT, x] != 0:
            start = nodes[START, x]
            pages = nodes[PAGES, x]
            if num > first and ranges[num - 1, SLOT] == start + pages:
                ranges[num - 1, PAGE] = nodes[DEPTH, x]
                ranges[num - 1, SLOT] = start
                ranges[num - 1, COUNT] += pages
            else:
                ranges[num, KIND] = BIND
                ranges[num, REQUEST] = b
                ranges[num, PAGE] = nodes[DEPTH, x]
                ranges[num, SLOT] = start
                ranges[num, COUNT] = pages
                num += 1
            x = np.int64(nodes[PARENT, x])
    return num
