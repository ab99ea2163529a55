"""Checkpoints of an insert by the policies that are on: at which lengths windows are kept.

prompt  |===========================================|  its end; D0, 2 D0, 4 D0, ... before it: a ladder
                 ^                   ^       ^  ^ ^ ^
A request that forks d tokens before the end computes at most about d more of what is cached.
"""

from __future__ import annotations

from kvcache.compiled import compiled, inlined
from kvcache.tree.arrays import (
    M_BY_VALUE,
    M_CHUNKS,
    M_LADDER,
    M_LADDER_FACTOR,
    M_PAGE_SIZE,
    Int64Array,
)
from kvcache.tree.value import ANSWER, CHUNK, FORK, HINT, PERIOD, PROMPT, RUNGS, first_rung


@inlined
def _mark(marks: Int64Array, c: int, owned: int, end: int, kind: int) -> None:
    if owned < c and c <= end:
        marks[c - owned] = kind + 1


@compiled
def checkpoints(
    meta: Int64Array,
    owned: int,
    end: int,
    resend: int,
    prompt: int,
    fork: int,
    every: int,
    hints: Int64Array,
    ends: bool,
    marks: Int64Array,
    found: Int64Array,
) -> int:
    """Write the checkpoints in (owned, end] as (page, class of value.py), ascending; return how many.

    Where two policies name one length, the class is, first to last: fork, prompt end, hint, request end, the
    shortest rung, period. Windows that go by recency are kept at the end of every insert, too; by value where
    `M_CHUNKS` is set, with a class of their own before the rungs'.

    Args:
        owned, end: Pages that the tree has of the row, and will have.
        resend: Page that the same key without its last unit can reuse.
        prompt: Units of the prompt; 0: unknown.
        fork: Tokens of the fork that the match found, or -1.
        every: Period of the periodic checkpoints, in tokens, or 0.
        hints: [any] lengths that the caller wants kept, in tokens, in any order.
        ends: Whether the request ends with this insert.
        marks: Scratch, [more than end - owned], all 0 before and after.
        found: [at least end - owned, 2], out.
    """
    page_size = meta[M_PAGE_SIZE]
    if every > 0:
        k = (owned * page_size) // every + 1
        while (k * every) // page_size <= end:
            c = (k * every) // page_size
            _mark(marks, c, owned, end, PERIOD)
            # skip the multiples that fall into the same page
            k = max(k + 1, ((c + 1) * page_size + every - 1) // every)
    if meta[M_LADDER] != 0:
        reach = first_rung(meta)
        num = 0
        while reach < prompt:
            reach *= meta[M_LADDER_FACTOR]
            num += 1
        while num > 0:  # the shortest one last
            num -= 1
            reach //= meta[M_LADDER_FACTOR]
            _mark(marks, (prompt - reach) // page_size, owned, end, min(num, RUNGS - 1))
    if ends or meta[M_BY_VALUE] == 0 or meta[M_CHUNKS] != 0:
        kind = ANSWER if ends else CHUNK
        _mark(marks, resend, owned, end, kind)
        _mark(marks, end, owned, end, kind)
    for i in range(hints.shape[0]):
        _mark(marks, hints[i] // page_size, owned, end, HINT)
    if prompt > 0 and meta[M_BY_VALUE] != 0:
        _mark(marks, (prompt - 1) // page_size, owned, end, PROMPT)
        _mark(marks, prompt // page_size, owned, end, PROMPT)
    if fork >= 0:
        _mark(marks, fork // page_size, owned, end, FORK)
    num = 0
    for c in range(owned + 1, end + 1):
        if marks[c - owned] != 0:
            found[num, 0] = c
            found[num, 1] = marks[c - owned] - 1
            marks[c - owned] = 0
            num += 1
    return num
