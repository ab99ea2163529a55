"""Child look-up: an open-addressing table from (parent, hash of the first page) to the child node.

The hash only says where to look. Whether a child continues a key is decided by comparing tokens, so a
collision costs a probe and never a wrong hit; and who does not know the seed cannot make many (hashing.py).
"""

from __future__ import annotations

import numpy as np

from kvcache.compiled import compiled, inlined
from kvcache.tree.arrays import (
    CHILD,
    CHILDREN,
    HEAD,
    M_MOVED,
    M_NODES,
    M_OLD_BASE,
    M_OLD_MASK,
    M_PAGE_SIZE,
    M_TABLE_BASE,
    M_TABLE_MASK,
    NODE,
    PAGES,
    PARENT,
    START,
    TAG,
    Int32Array,
    Int64Array,
    TokenArray,
)
from kvcache.tree.changes import note_slot
from kvcache.tree.hashing import child_tag, page_hash
from kvcache.tree.tokens import matching_tokens

# slots of the older level that are emptied whenever a node is filed: one would do to be done in time
_MOVED_AT_A_TIME = 4


@inlined
def _put(meta: Int64Array, table: Int32Array, tag: int, node: int) -> None:
    mask, base = meta[M_TABLE_MASK], meta[M_TABLE_BASE]
    i = np.int64(np.uint32(tag)) & mask
    while table[base + i, NODE] != 0:
        i = (i + 1) & mask
    table[base + i, TAG] = tag
    table[base + i, NODE] = node
    note_slot(meta, base + i)


@compiled
def _go_on_growing(meta: Int64Array, table: Int32Array) -> None:
    """Begin with a level of twice the size, or bring some entries of the older level along."""
    if meta[M_OLD_MASK] == 0:
        base, mask = meta[M_TABLE_BASE], meta[M_TABLE_MASK]
        meta[M_TABLE_MASK] = 2 * mask + 1
        meta[M_TABLE_BASE] = meta[M_OLD_BASE]
        meta[M_OLD_MASK] = mask
        meta[M_OLD_BASE] = base
        meta[M_MOVED] = 0
        return
    at = meta[M_MOVED]
    end = min(at + _MOVED_AT_A_TIME, meta[M_OLD_MASK] + 1)
    while at < end:
        i = meta[M_OLD_BASE] + at
        # what follows may close the gap
        while table[i, NODE] != 0:
            tag, node = table[i, TAG], table[i, NODE]
            unfile_slot(meta, table, i)
            _put(meta, table, tag, node)
        at += 1
    meta[M_MOVED] = at
    if at > meta[M_OLD_MASK]:
        meta[M_OLD_MASK] = 0


@inlined
def file_child(meta: Int64Array, table: Int32Array, tag: int, node: int) -> None:
    """Enter `node`, which M_NODES does not count yet, under `tag`."""
    _put(meta, table, tag, node)
    if meta[M_OLD_MASK] > 0 or 2 * (meta[M_NODES] + 1) > meta[M_TABLE_MASK] + 1:
        _go_on_growing(meta, table)


@inlined
def slot_of_child(meta: Int64Array, table: Int32Array, tag: int, node: int) -> int:
    """Return the table slot that holds `node`, which must be filed under `tag`."""
    mask, base = meta[M_TABLE_MASK], meta[M_TABLE_BASE]
    i = np.int64(np.uint32(tag)) & mask
    while table[base + i, NODE] != node:
        if table[base + i, NODE] == 0:
            mask, base = meta[M_OLD_MASK], meta[M_OLD_BASE]
            i = np.int64(np.uint32(tag)) & mask
        else:
            i = (i + 1) & mask
    return base + i


@compiled
def unfile_slot(meta: Int64Array, table: Int32Array, slot: int) -> None:
    """Empty a table slot and close the gap, so that probing needs no tombstones."""
    mask, base = meta[M_TABLE_MASK], meta[M_TABLE_BASE]
    if slot < base or slot > base + mask:
        mask, base = meta[M_OLD_MASK], meta[M_OLD_BASE]
    i = slot - base
    j = i
    while True:
        table[base + i, NODE] = 0
        note_slot(meta, base + i)
        while True:
            j = (j + 1) & mask
            if table[base + j, NODE] == 0:
                return
            home = np.int64(np.uint32(table[base + j, TAG])) & mask
            # the entry at j may fill the gap at i unless its home lies between them
            if ((j - home) & mask) >= ((j - i) & mask):
                break
        table[base + i, TAG] = table[base + j, TAG]
        table[base + i, NODE] = table[base + j, NODE]
        i = j


@inlined
def _matching_pages(
    nodes: Int32Array,
    slab: Int32Array,
    child: int,
    keys: TokenArray,
    at: int,
    pages: int,
    page_size: int,
) -> int:
    """Return how many pages of `child` agree with the key units from `keys[at]` on, `pages` at most."""
    n = min(np.int64(nodes[PAGES, child]), pages)
    start = np.int64(nodes[START, child]) * page_size
    return matching_tokens(slab, start, keys, at, n * page_size) // page_size


@inlined
def find_child(
    nodes: Int32Array,
    meta: Int64Array,
    table: Int32Array,
    slab: Int32Array,
    parent: int,
    keys: TokenArray,
    at: int,
    pages: int,
    head: int,
) -> tuple[int, int]:
    """Return (child, pages of it that match) for the key units from `keys[at]` on; (0, 0): there is none.

    `pages` is how many pages the key has left, `head` the key's first token with bigram keys, -1 with plain.
    """
    page_size = meta[M_PAGE_SIZE]
    at_top = head >= 0 and nodes[PARENT, parent] == 0
    if nodes[CHILDREN, parent] <= 1:
        child = np.int64(nodes[CHILD, parent])
        if child == 0 or (at_top and nodes[HEAD, child] != head):
            return 0, 0
        matched = _matching_pages(nodes, slab, child, keys, at, pages, page_size)
        return (child, matched) if matched > 0 else (np.int64(0), np.int64(0))
    mask, base = meta[M_TABLE_MASK], meta[M_TABLE_BASE]
    tag = child_tag(parent, page_hash(meta, keys, at, page_size, head if at_top else -1))
    i = np.int64(np.uint32(tag)) & mask
    while True:
        child = np.int64(table[base + i, NODE])
        if child == 0:
            old = meta[M_OLD_MASK]
            if old == 0 or mask == old:
                return 0, 0
            mask, base = old, meta[M_OLD_BASE]
            i = np.int64(np.uint32(tag)) & mask
            continue
        if (
            table[base + i, TAG] == tag
            and nodes[PARENT, child] == parent
            and (not at_top or nodes[HEAD, child] == head)
        ):
            matched = _matching_pages(nodes, slab, child, keys, at, pages, page_size)
            if matched > 0:
                return child, matched
        i = (i + 1) & mask


@compiled
def first_page_hash_of(nodes: Int32Array, meta: Int64Array, slab: Int32Array, node: int) -> int:
    """Recompute HASH of `node` from its tokens."""
    page_size = meta[M_PAGE_SIZE]
    start = np.int64(nodes[START, node]) * page_size
    # HEAD is -1 but at DEPTH 0
    return page_hash(meta, slab, start, page_size, nodes[HEAD, node])
