"""Which pages of an insert keep their SWA: the union of the windows that end at the checkpoints.

W = 8, P = 4, owned 8, 41 units, checkpoints at 20 and 40 (the end is one always):

page        2   3   4   5   6   7   8   9
tokens      8  12  16  20  24  28  32  36  40
kept            [#######]           [#######]      -> intervals [3, 5), [8, 10)

With 40 units the same key without its last one ends at 36, and its window is kept too: [3, 5), [7, 10).
"""

from __future__ import annotations

import numpy as np

from kvcache.compiled import compiled, inlined
from kvcache.tree.arrays import Int64Array


@inlined
def _keep_window(
    kept: Int64Array, n: int, c: int, owned: int, end: int, frontier: int, keep: int
) -> int:
    """Add the window before `c`, which is not before the last one, to `n` intervals; return how many now."""
    first = max(c - keep, owned)
    if c <= owned or c > end or first < frontier:
        return n
    if n > 0 and first <= kept[n - 1, 1]:
        kept[n - 1, 1] = max(kept[n - 1, 1], c)
        return n
    kept[n, 0] = first
    kept[n, 1] = c
    return n + 1


@inlined
def _keep_trailing(kept: Int64Array, n: int, owned: int, end: int, frontier: int, keep: int) -> int:
    """Add what the row still has of the window before `end`; return how many intervals there are now.

    Where the key is behind what is computed, the frontier may be in that window, and the row's next forward
    reads from there on.
    """
    first = max(end - keep, owned, frontier)
    if first >= end:
        return n
    if n > 0 and first <= kept[n - 1, 1]:
        kept[n - 1, 1] = end
        return n
    kept[n, 0] = first
    kept[n, 1] = end
    return n + 1


@inlined
def _mark(marks: Int64Array, c: int, owned: int, end: int) -> None:
    if owned < c and c <= end:
        marks[c - owned] = 1


@compiled
def kept_windows(
    owned: int,
    end: int,
    frontier: int,
    keep: int,
    resend: int,
    branch: int,
    every: int,
    page_size: int,
    hints: Int64Array,
    marks: Int64Array,
    kept: Int64Array,
) -> int:
    """Write the kept intervals, ascending and disjoint, and return how many there are. All units are pages.

    A checkpoint c keeps [max(0, c - keep), c), clipped to [owned, end). It is left out if the row no longer
    has its part of that window: the pages from `owned` on must not be below `frontier`. The end is a
    checkpoint always (of its window stays what there is), and so is `resend`. Costs the pages of the insert
    and the hints, in any order of them.

    Args:
        resend: What the same key without its last unit can reuse: `end`, or the page before.
        branch: Checkpoint of the match, in tokens, or -1.
        every: Period of the periodic checkpoints, in tokens, or 0.
        hints: [any] lengths that the caller wants kept, in tokens, in any order.
        marks: Scratch, [more than pages of the insert], all 0 before and after.
        kept: [at least pages of the insert + 1, 2], out: first page, end page.
    """
    if keep == 0:
        return 0
    n = 0
    fork = branch // page_size if branch >= 0 else -1
    if every == 0 and hints.shape[0] == 0:
        if fork < resend:
            n = _keep_window(kept, n, fork, owned, end, frontier, keep)
        n = _keep_window(kept, n, resend, owned, end, frontier, keep)
        return _keep_trailing(kept, n, owned, end, frontier, keep)
    _mark(marks, fork, owned, end)
    _mark(marks, resend, owned, end)
    for i in range(hints.shape[0]):
        _mark(marks, hints[i] // page_size, owned, end)
    if every > 0:
        k = (owned * page_size) // every + 1
        while (k * every) // page_size < end:
            c = (k * every) // page_size
            _mark(marks, c, owned, end)
            # skip the multiples that fall into the same page
            k = max(k + 1, ((c + 1) * page_size + every - 1) // every)
    for c in range(owned + 1, end + 1):
        if marks[c - owned] != 0:
            marks[c - owned] = 0
            n = _keep_window(kept, n, c, owned, end, frontier, keep)
    return _keep_trailing(kept, n, owned, end, frontier, keep)


@compiled
def windows_at(
    found: Int64Array,
    num: int,
    owned: int,
    end: int,
    frontier: int,
    keep: int,
    kept: Int64Array,
) -> int:
    """As `kept_windows`, for checkpoints `found[:num, 0]`, ascending, and what the row has before `end`."""
    n = 0
    for i in range(num if keep > 0 else 0):
        n = _keep_window(kept, n, found[i, 0], owned, end, frontier, keep)
    return _keep_trailing(kept, n, owned, end, frontier, keep) if keep > 0 else 0


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
