"""Recency of matches, kept for later: a match changes nothing, the next call that changes the tree does.

Refreshing exactly what a match covered means splitting the node in which it ends, and a match must not
split. So it leaves a note, and every call that changes the tree first works the notes off, in order.
"""

from __future__ import annotations

import numpy as np

from kvcache.compiled import compiled
from kvcache.tree.arrays import (
    M_BY_VALUE,
    M_CLOCK,
    M_KEEP_PAGES,
    M_PAGE_SIZE,
    M_TOUCHES,
    WIN_AWAITED,
    WIN_PAGES,
    Int32Array,
    Int64Array,
    TokenArray,
)
from kvcache.tree.edges import node_ending_at
from kvcache.tree.match import FULL_HIT, FULL_NODE, REUSE, ROOT, match
from kvcache.tree.recency import touch_full, touch_swa
from kvcache.tree.value import rekey

# a note, int32 [NUM_NOTE]: the node in which the hit ends, pages of the Full hit, pages of the reusable part
NOTE_NODE, NOTE_FULL, NOTE_REUSE = range(3)
NUM_NOTE = 3


@compiled
def note_touches(meta: Int64Array, results: Int32Array, notes: Int32Array) -> None:
    """Note the matches of a batch; `notes` must have room for them.

    Where they repeat the notes that came last, as when a queue is matched again, nothing is added: touched
    a second time in the same order, nothing changes its place.
    """
    page_size = meta[M_PAGE_SIZE]
    first = meta[M_TOUCHES]
    n = first
    for b in range(results.shape[1]):
        if results[FULL_HIT, b] > 0:
            notes[n, NOTE_NODE] = results[FULL_NODE, b]
            notes[n, NOTE_FULL] = results[FULL_HIT, b] // page_size
            notes[n, NOTE_REUSE] = results[REUSE, b] // page_size
            n += 1
    num = n - first
    repeats = num <= first
    for i in range(num if repeats else 0):
        for field in range(NUM_NOTE):
            repeats = repeats and notes[first + i, field] == notes[first - num + i, field]
    meta[M_TOUCHES] = first if repeats else n


@compiled
def match_and_note(
    nodes: Int32Array,
    meta: Int64Array,
    table: Int32Array,
    slab: Int32Array,
    keys: TokenArray,
    starts: Int64Array,
    lens: Int64Array,
    handles: Int64Array,
    hints: Int32Array,
    results: Int32Array,
    notes: Int32Array,
    touch: bool,
) -> None:
    """Match a batch (match.py) below the roots that `handles` name and, with `touch`, note it."""
    for b in range(starts.shape[0]):
        results[ROOT, b] = handles[b] & 0xFFFFFFFF
    match(nodes, meta, table, slab, keys, starts, lens, results, hints)
    if touch:
        note_touches(meta, results, notes)


@compiled
def apply_touches(
    nodes: Int32Array, meta: Int64Array, table: Int32Array, slab: Int32Array, notes: Int32Array
) -> None:
    """Work off all notes: refresh exactly the pages that the matches covered, await windows (value.py)."""
    keep = meta[M_KEEP_PAGES]
    for i in range(meta[M_TOUCHES]):
        full = np.int64(notes[i, NOTE_FULL])
        reuse = np.int64(notes[i, NOTE_REUSE])
        last = node_ending_at(nodes, meta, table, slab, np.int64(notes[i, NOTE_NODE]), full)
        touch_full(nodes, last)
        if keep > 0 and reuse > 0:
            first = max(reuse - keep, 0)
            last = node_ending_at(nodes, meta, table, slab, last, reuse)
            if first > 0:
                node_ending_at(nodes, meta, table, slab, last, first)
            touch_swa(nodes, last, first)
            if meta[M_BY_VALUE] != 0 and nodes[WIN_PAGES, last] != 0:
                nodes[WIN_AWAITED, last] = meta[M_CLOCK] + 1
                rekey(nodes, meta, last)
    meta[M_TOUCHES] = 0
