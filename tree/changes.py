"""Log of changes, for a copy of the tree elsewhere: which records, child-table slots and tokens are new.

Off until a copy is made (`RadixTree.log_changes`). The log is the end of `meta`; when it is
full, it says so, and the copy is made anew.
"""

from __future__ import annotations

from kvcache.compiled import inlined
from kvcache.tree.arrays import (
    CHANGED,
    M_LOG_AT,
    M_LOG_LEN,
    M_LOG_LOST,
    M_LOG_ROOM,
    Int32Array,
    Int64Array,
)

# an entry: what << 2 | kind; tokens: pages << 34 | first slot << 2 | kind
NODE_CHANGED, SLOT_CHANGED, TOKENS_CHANGED = range(3)


@inlined
def _note(meta: Int64Array, entry: int) -> None:
    n = meta[M_LOG_LEN]
    if n < meta[M_LOG_ROOM]:
        meta[meta[M_LOG_AT] + n] = entry
        meta[M_LOG_LEN] = n + 1
    else:
        meta[M_LOG_LOST] = 1


@inlined
def note_node(nodes: Int32Array, meta: Int64Array, n: int) -> None:
    """Note that record `n` changed; a second time before the log is read costs nothing."""
    if meta[M_LOG_ROOM] > 0 and nodes[CHANGED, n] == 0:
        nodes[CHANGED, n] = 1
        _note(meta, (n << 2) | NODE_CHANGED)


@inlined
def note_slot(meta: Int64Array, i: int) -> None:
    """Note that slot `i` of the child table changed."""
    if meta[M_LOG_ROOM] > 0:
        _note(meta, (i << 2) | SLOT_CHANGED)


@inlined
def note_tokens(meta: Int64Array, start: int, pages: int) -> None:
    """Note that the tokens of slab slots [start, start + pages) are new."""
    if meta[M_LOG_ROOM] > 0:
        _note(meta, (pages << 34) | (start << 2) | TOKENS_CHANGED)
