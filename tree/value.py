"""Value: what a kept window is worth, as the time until which it is kept.

    key = last use + T * log2(chance of a return * tokens lost without it / pages that it frees)

All of it is in whole numbers, so all ranks agree; times are admissions, no clock of the machine. A window is
of the class of its checkpoint: how far it lies before the end of its prompt (the rung of the ladder), a
prompt's or an answer's end, a fork. How likely a class is to be returned to is learned from where requests
fork, counted from the end of the last prompt through that point. A window that goes leaves its classes to
the next shallower one, which now serves its forks. A window that a request of priority p makes or uses is
worth 2^p times as much; what a waiting request has matched goes last.
"""

from __future__ import annotations

import numpy as np

from kvcache.compiled import compiled, inlined
from kvcache.tree import heap
from kvcache.tree.arrays import (
    ANSWER_TAIL,
    DEPTH,
    HEAP,
    M_CLOCK,
    M_HAND,
    M_HIT,
    M_KEEP_PAGES,
    M_LADDER,
    M_LADDER_FACTOR,
    M_MADE,
    M_PAGE_SIZE,
    M_WINDOWS,
    NO_NODE,
    NUM_WINDOW_CLASSES,
    PAGES,
    PARENT,
    SWA_LOCKS,
    TAIL,
    WIN_AWAITED,
    WIN_CLASS,
    WIN_GAP,
    WIN_KEY,
    WIN_LAST,
    WIN_MASK,
    WIN_NEXT,
    WIN_PAGES,
    WIN_PRIORITY,
    WIN_REFS,
    WIN_USES,
    Int32Array,
    Int64Array,
)

# classes 0 .. RUNGS - 1 are the rungs of the ladder
RUNGS = 16
PROMPT, ANSWER, FORK, HINT, PERIOD, USED_ONCE, USED_OFTEN, CHUNK = range(RUNGS, RUNGS + 8)

# T, admissions: a window twice as likely to be returned to is kept for so many more
HORIZON = 256
# binary digits of a key's logarithm: T * log2(x) is then the logarithm as it is stored
_LOG_BITS = 8
assert HORIZON == 1 << _LOG_BITS
_ONE = np.int64(1) << 16
# admissions after which what was learned counts nine tenths
_FADES_AFTER = 100
# keys that are computed anew at each admission: what was learned since moves them
_REFRESHED = 64
# of a window under a lock: it goes after all others
LOCKED_KEY = 1 << 29
# of one that a waiting request matched: it goes before those, if that is at most so many admissions ago
AWAITED_KEY = 1 << 28
_AWAITED_FOR = 64

_LOG_TABLE = np.round(np.log2(1 + np.arange(256) / 256) * 256).astype(np.int64)


@compiled
def log2_fixed(x: int) -> int:
    """Return log2(x) with 8 binary digits, rounded down to a table of 256 steps an octave; x >= 1."""
    bits = 0
    y = np.int64(x)
    while y > 1:
        y >>= 1
        bits += 1
    rest = (np.int64(x) << _LOG_BITS >> bits) if bits < 40 else (np.int64(x) >> (bits - _LOG_BITS))
    return (bits << _LOG_BITS) + _LOG_TABLE[rest & 255]


@compiled
def rung_of(meta: Int64Array, distance: int) -> int:
    """Return the class of the least rung that lies at least `distance` tokens before a prompt's end."""
    reach = first_rung(meta)
    k = 0
    while reach < distance and k < RUNGS - 1:
        reach *= meta[M_LADDER_FACTOR]
        k += 1
    return k


@inlined
def first_rung(meta: Int64Array) -> int:
    """Return how many tokens the first rung lies before a prompt's end; without a ladder, would lie."""
    first = meta[M_LADDER] if meta[M_LADDER] > 0 else np.int64(128)
    return max(first, meta[M_PAGE_SIZE])


@inlined
def _chance(meta: Int64Array, c: int) -> int:
    """Return how likely a window of class `c` is to be returned to, 16 binary digits."""
    return ((meta[M_HIT + c] + (_ONE >> 1)) << 16) // (meta[M_MADE + c] + _ONE)


@compiled
def chance_of(nodes: Int32Array, meta: Int64Array, n: int) -> int:
    """Return the chance of a return to the window of `n`: its own and what it has inherited; 16 digits."""
    c = np.int64(nodes[WIN_CLASS, n])
    uses = np.int64(nodes[WIN_USES, n])
    if uses == 0:
        total = _chance(meta, c)
    else:
        total = _chance(meta, USED_ONCE if uses == 1 else USED_OFTEN)
        gap = np.int64(nodes[WIN_GAP, n])
        if gap > 0:
            total = max(total, total * HORIZON * 256 // gap)
    mask = np.int64(nodes[WIN_MASK, n]) & ~(np.int64(1) << c)
    k = 0
    while mask != 0:
        if mask & 1:
            total += _chance(meta, k)
        mask >>= 1
        k += 1
    return total


@compiled
def fallback(nodes: Int32Array, n: int) -> int:
    """Return the node of the next shallower window on the path of `n`; 0: there is none."""
    x = np.int64(nodes[PARENT, n])
    while nodes[PARENT, x] != 0:
        if nodes[WIN_PAGES, x] != 0:
            return x
        x = np.int64(nodes[PARENT, x])
    return np.int64(0)


@compiled
def freed_pages(nodes: Int32Array, n: int) -> int:
    """Return the pages of the window of `n` that no other window and no lock covers; at least 1."""
    x = np.int64(n)
    first = np.int64(nodes[DEPTH, x] + nodes[PAGES, x] - nodes[WIN_PAGES, x])
    pages = np.int64(0)
    while nodes[PARENT, x] != 0 and nodes[DEPTH, x] >= first:
        if nodes[WIN_REFS, x] == 1 and nodes[SWA_LOCKS, x] == 0:
            pages += nodes[PAGES, x]
        x = np.int64(nodes[PARENT, x])
    return max(pages, 1)


@compiled
def key_of(nodes: Int32Array, meta: Int64Array, n: int) -> int:
    """Return the key of the window of `n` as of now."""
    f = fallback(nodes, n)
    above = np.int64(nodes[DEPTH, f] + nodes[PAGES, f]) if f != 0 else np.int64(0)
    lost = np.int64(nodes[DEPTH, n] + nodes[PAGES, n]) - above
    key = np.int64(nodes[WIN_LAST, n]) - (np.int64(16) << _LOG_BITS)
    key += log2_fixed(max(chance_of(nodes, meta, n), 1)) + log2_fixed(lost)
    key += np.int64(nodes[WIN_PRIORITY, n]) * HORIZON - log2_fixed(freed_pages(nodes, n))
    if nodes[SWA_LOCKS, n] > 0:
        return key + LOCKED_KEY
    awaited = np.int64(nodes[WIN_AWAITED, n])
    return key + AWAITED_KEY if awaited > 0 and meta[M_CLOCK] - awaited < _AWAITED_FOR else key


@compiled
def rekey(nodes: Int32Array, meta: Int64Array, n: int) -> None:
    """Compute the key of the window of `n` anew."""
    nodes[WIN_KEY, n] = key_of(nodes, meta, n)
    heap.settle(nodes, meta, n)


@compiled
def rekey_locked(
    nodes: Int32Array, meta: Int64Array, node: int, first: int, end: int, locks: int
) -> None:
    """Compute the keys anew of windows above `node` that end in (first, end] under `locks` locks."""
    x = np.int64(node)
    while nodes[PARENT, x] != 0 and nodes[DEPTH, x] + nodes[PAGES, x] > first:
        inside = nodes[DEPTH, x] + nodes[PAGES, x] <= end
        if inside and nodes[WIN_PAGES, x] != 0 and nodes[SWA_LOCKS, x] == locks:
            rekey(nodes, meta, x)
        x = np.int64(nodes[PARENT, x])


@compiled
def refresh(nodes: Int32Array, meta: Int64Array, num: int) -> None:
    """Compute the keys of `num` windows anew, going round them in the order in which they were made."""
    for _ in range(min(num, meta[M_WINDOWS])):
        n = np.int64(nodes[WIN_NEXT, meta[M_HAND]])
        if n == NO_NODE:
            n = np.int64(nodes[WIN_NEXT, NO_NODE])
        meta[M_HAND] = n
        rekey(nodes, meta, n)


@compiled
def least_window(nodes: Int32Array, meta: Int64Array) -> int:
    """Return the node whose window is worth least; 0: there is none.

    Keys are as old as the last time round. With few windows for the pages that one frees, all are computed
    anew; else that on top is, until one stays there.
    """
    num = meta[M_WINDOWS]
    if num == 0:
        return np.int64(0)
    if num <= 8 * meta[M_KEEP_PAGES]:
        refresh(nodes, meta, num)
        return np.int64(nodes[HEAP, 1])
    n = np.int64(nodes[HEAP, 1])
    for _ in range(16):
        n = np.int64(nodes[HEAP, 1])
        key = key_of(nodes, meta, n)
        if key <= nodes[WIN_KEY, n]:
            break
        nodes[WIN_KEY, n] = key
        heap.settle(nodes, meta, n)
    return n


@compiled
def note_admission(
    nodes: Int32Array, meta: Int64Array, node: int, reuse: int, hit: int, priority: int
) -> bool:
    """Count an admission, and note the use of the window that the request resumes at.

    Args:
        node: Node that ends with the last reused page.
        reuse, hit: Pages; the Full hit as of the match.
        priority: Of the request.

    Returns:
        Whether it is still to be learned where the request forks.
    """
    meta[M_CLOCK] += 1
    now = meta[M_CLOCK]
    if now % _FADES_AFTER == 0:
        for c in range(NUM_WINDOW_CLASSES):
            meta[M_HIT + c] = meta[M_HIT + c] * 9 // 10
            meta[M_MADE + c] = meta[M_MADE + c] * 9 // 10
    learns = True
    if reuse > 0 and nodes[WIN_PAGES, node] != 0:
        uses = np.int64(nodes[WIN_USES, node])
        if uses > 0 and reuse == hit:
            meta[M_HIT + (USED_ONCE if uses == 1 else USED_OFTEN)] += _ONE
            learns = False
        gap = max(now - nodes[WIN_LAST, node], 1) * 256
        if uses > 0:
            gap = (nodes[WIN_GAP, node] + gap) // 2
        nodes[WIN_GAP, node] = min(gap, np.int64(2**31 - 1))
        nodes[WIN_USES, node] = min(uses + 1, 2)
        meta[M_MADE + (USED_ONCE if uses == 0 else USED_OFTEN)] += _ONE
        nodes[WIN_LAST, node] = now
        nodes[WIN_AWAITED, node] = 0
        nodes[WIN_PRIORITY, node] = max(nodes[WIN_PRIORITY, node], priority)
        rekey(nodes, meta, node)
    refresh(nodes, meta, _REFRESHED)
    return learns


@compiled
def learn_fork(nodes: Int32Array, meta: Int64Array, node: int, hit: int) -> None:
    """Learn from a request that forks from what the tree has at page `hit` > 0, the last one in `node`."""
    tail = np.int64(nodes[TAIL, node])
    answered = np.int64(nodes[ANSWER_TAIL, node])
    if tail > hit:
        meta[M_HIT + rung_of(meta, (tail - hit) * meta[M_PAGE_SIZE])] += _ONE
    elif hit >= answered and answered > tail:
        meta[M_HIT + ANSWER] += _ONE
    else:
        meta[M_HIT + PROMPT] += _ONE
