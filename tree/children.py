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
    HASH,
    HEAD,
    M_BUMP,
    M_PAGE_SIZE,
    M_TABLE_MASK,
    NODE,
    PAGES,
    PARENT,
    START,
    SWA_LOCKS,
    TAG,
    Int32Array,
    Int64Array,
    TokenArray,
)
from kvcache.tree.changes import note_slot, note_table
from kvcache.tree.hashing import child_tag, page_hash
from kvcache.tree.tokens import matching_tokens


@inlined
def file_child(meta: Int64Array, table: Int32Array, tag: int, node: int) -> None:
    """Enter `node` under `tag`."""
    mask = meta[M_TABLE_MASK]
    i = np.int64(np.uint32(tag)) & mask
    while table[i, NODE] != 0:
        i = (i + 1) & mask
    table[i, TAG] = tag
    table[i, NODE] = node
    note_slot(meta, i)


@inlined
def slot_of_child(table: Int32Array, mask: int, tag: int, node: int) -> int:
    """Return the table slot that holds `node`, which must be filed under `tag`."""
    i = np.int64(np.uint32(tag)) & mask
    while table[i, NODE] != node:
        i = (i + 1) & mask
    return i


@compiled
def unfile_slot(meta: Int64Array, table: Int32Array, i: int) -> None:
    """Empty table slot `i` and close the gap, so that probing needs no tombstones."""
    mask = meta[M_TABLE_MASK]
    j = i
    while True:
        table[i, NODE] = 0
        note_slot(meta, i)
        while True:
            j = (j + 1) & mask
            if table[j, NODE] == 0:
                return
            home = np.int64(np.uint32(table[j, TAG])) & mask
            # the entry at j may fill the gap at i unless its home lies between them
            if ((j - home) & mask) >= ((j - i) & mask):
                break
        table[i, TAG] = table[j, TAG]
        table[i, NODE] = table[j, NODE]
        i = j


@compiled
def refile_all(nodes: Int32Array, meta: Int64Array, table: Int32Array) -> None:
    """Fill an empty `table` with every node but the roots."""
    meta[M_TABLE_MASK] = table.shape[0] - 1
    note_table(meta)
    for n in range(1, meta[M_BUMP]):
        if nodes[SWA_LOCKS, n] >= 0 and nodes[PARENT, n] != 0:
            file_child(meta, table, child_tag(nodes[PARENT, n], nodes[HASH, n]), n)


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
    mask = meta[M_TABLE_MASK]
    tag = child_tag(parent, page_hash(meta, keys, at, page_size, head if at_top else -1))
    i = np.int64(np.uint32(tag)) & mask
    while True:
        child = np.int64(table[i, NODE])
        if child == 0:
            return 0, 0
        if (
            table[i, TAG] == tag
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
