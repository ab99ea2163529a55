"""Which pages of an insert keep their SWA: the union of the windows that end at the checkpoints.

W = 8, P = 4, owned 8, end 40, checkpoints at 20 and 40 (the end is one always):

page        2   3   4   5   6   7   8   9
tokens      8  12  16  20  24  28  32  36  40
kept            [#######]           [#######]      -> intervals [3, 5), [8, 10)
"""

from __future__ import annotations

import numpy as np

from kvcache.compiled import compiled, inlined
from kvcache.tree.arrays import Int64Array


@compiled
def _sorted_insert(ends: Int64Array, num: int, end: int) -> int:
    i = num
    while i > 0 and ends[i - 1] > end:
        ends[i] = ends[i - 1]
        i -= 1
    ends[i] = end
    return num + 1


@compiled
def kept_windows(
    owned: int,
    end: int,
    frontier: int,
    keep: int,
    branch: int,
    every: int,
    page_size: int,
    hints: Int64Array,
    ends: Int64Array,
    kept: Int64Array,
) -> int:
    """Write the kept intervals, ascending and disjoint, and return how many there are. All units are pages.

    A checkpoint c keeps [max(0, c - keep), c), clipped to [owned, end). It is left out if the row no longer
    has its part of that window: the pages from `owned` on must not be below `frontier`.

    Args:
        branch: Checkpoint of the match, in tokens, or -1.
        every: Period of the periodic checkpoints, in tokens, or 0.
        hints: [any] lengths that the caller wants kept, in tokens, in any order.
        ends: Scratch, [pages of the insert + hints + 2].
        kept: [at least pages of the insert + 1, 2], out: first page, end page.
    """
    if keep == 0:
        return 0
    num = 0
    ends[0] = end
    num = 1
    if branch >= 0:
        num = _sorted_insert(ends, num, branch // page_size)
    for i in range(hints.shape[0]):
        c = hints[i] // page_size
        if owned < c and c < end:
            num = _sorted_insert(ends, num, c)
    if every > 0:
        k = (owned * page_size) // every + 1
        last = -1
        while (k * every) // page_size < end:
            c = (k * every) // page_size
            if c > owned and c != last:
                num = _sorted_insert(ends, num, c)
                last = c
            # skip the multiples that fall into the same page
            k = max(k + 1, ((c + 1) * page_size + every - 1) // every)
    n = 0
    for i in range(num):
        c = ends[i]
        first = max(c - keep, owned)
        if c <= owned or c > end or first < frontier:
            continue
        if n > 0 and first <= kept[n - 1, 1]:
            kept[n - 1, 1] = max(kept[n - 1, 1], c)
        else:
            kept[n, 0] = first
            kept[n, 1] = c
            n += 1
    return n


@inlined
def next_edge(kept: Int64Array, num: int, i: int, page: int, end: int) -> tuple[int, int, bool]:
    """Return (interval to go on with, end of the stretch from `page` on, whether the stretch is kept)."""
    while i < num and kept[i, 1] <= page:
        i += 1
    if i == num:
        return i, end, False
    if page < kept[i, 0]:
        return i, min(np.int64(kept[i, 0]), end), False
    return i, min(np.int64(kept[i, 1]), end), True
