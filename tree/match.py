"""Match: how far the tree holds each key, and how much of that can be reused. One walk of the path.

            0        reuse_len             full_hit_len           key
    Full    |============|======================|- - - - - - - - - |
    SWA     |- - - - [WWW]- - - - - - - - - - - |
                  the last live window      a fork: branch_len = full_hit_len

The walk carries the number of live pages since the last tombstone; where it reaches a window (or the start
of the key), the prefix can be reused.
"""

from __future__ import annotations

import numpy as np

from kvcache.compiled import compiled
from kvcache.tree.arrays import (
    DEPTH,
    GEN,
    LIVE,
    M_BIGRAM,
    M_KEEP_PAGES,
    M_PAGE_SIZE,
    PAGES,
    PARENT,
    START,
    Int32Array,
    Int64Array,
    TokenArray,
)
from kvcache.tree.children import find_child
from kvcache.tree.join import standing
from kvcache.tree.roots import is_root
from kvcache.tree.tokens import matching_tokens

# rows of the match result, int32 [NUM_RESULTS, batch]
(
    FULL_HIT,  # tokens
    REUSE,  # tokens
    BRANCH,  # tokens, -1 = none
    FULL_NODE,  # node that holds the last page of the Full hit; the root if there is none
    FULL_GEN,
    REUSE_NODE,  # node that holds the last page of the reusable prefix
    REUSE_GEN,
    ROOT,  # the namespace's root
) = range(8)
NUM_RESULTS = 8


@compiled
def reusable(nodes: Int32Array, keep_pages: int, node: int, end: int) -> tuple[int, int]:
    """Return (pages, node that holds the last of them) of the longest reusable part of a path.

    The path ends at page `end`, in `node` or above it (a split leaves the lower half with the record).
    Climbs until a window is found.
    """
    x = np.int64(node)
    while nodes[PARENT, x] != 0 and nodes[DEPTH, x] >= end:
        x = np.int64(nodes[PARENT, x])
    if keep_pages == 0:
        return end, x
    best, best_node, run = 0, np.int64(0), 0
    while nodes[PARENT, x] != 0:
        if nodes[LIVE, x] != 0:
            stop = min(np.int64(nodes[DEPTH, x] + nodes[PAGES, x]), end)
            if best_node == 0:
                best, best_node, run = stop, x, 0
            run += stop - nodes[DEPTH, x]
            if run >= keep_pages:
                return best, best_node
        else:
            best_node = np.int64(0)
        x = np.int64(nodes[PARENT, x])
    if best_node == 0:
        return 0, x
    return best, best_node


@compiled
def _resume(
    nodes: Int32Array,
    meta: Int64Array,
    slab: Int32Array,
    keys: TokenArray,
    at: int,
    pages: int,
    node: int,
    known: int,
) -> tuple[int, int, bool]:
    """Start a walk from a hint: (node, pages matched so far, whether the walk may go on below)."""
    page_size = meta[M_PAGE_SIZE]
    pos = min(known, pages)
    x = np.int64(node)
    # the node may have been split since: its lower half kept the record
    while nodes[PARENT, x] != 0 and nodes[DEPTH, x] >= pos:
        x = np.int64(nodes[PARENT, x])
    end = np.int64(nodes[DEPTH, x] + nodes[PAGES, x])
    rest = min(end, pages) - pos
    if rest > 0:
        start = (np.int64(nodes[START, x]) + pos - nodes[DEPTH, x]) * page_size
        n = matching_tokens(slab, start, keys, at + pos * page_size, rest * page_size)
        pos += n // page_size
    return x, pos, pos == end


@compiled
def match(
    nodes: Int32Array,
    meta: Int64Array,
    table: Int32Array,
    slab: Int32Array,
    keys: TokenArray,
    starts: Int64Array,
    lens: Int64Array,
    results: Int32Array,
    hints: Int32Array,
) -> int:
    """Match a batch of keys. Reads the tree and writes `results` only.

    Args:
        keys: Flat token buffer.
        starts, lens: [batch] first token and number of tokens of each key.
        results: [NUM_RESULTS, batch], out; ROOT is in.
        hints: [NUM_RESULTS, batch] results of an earlier match of the same keys, or [NUM_RESULTS, 0]. A hint
            whose node still stands saves reading the tokens below its length.

    Returns:
        The number of hints that no longer held.
    """
    page_size = meta[M_PAGE_SIZE]
    keep = meta[M_KEEP_PAGES]
    bigram = meta[M_BIGRAM]
    hinted = hints.shape[1] > 0
    stale = 0
    for b in range(starts.shape[0]):
        at = starts[b] + bigram
        pages = max(lens[b] - bigram, 0) // page_size
        head = np.int64(-1)
        if bigram != 0 and pages > 0:
            head = np.int64(keys[starts[b]])
            if head < 0:
                pages = 0
        node = np.int64(results[ROOT, b])
        pos = np.int64(0)
        best, best_node = np.int64(0), node
        go = True
        run = np.int64(1) << 40
        climb = False
        if hinted:
            known = np.int64(hints[FULL_HIT, b]) // page_size
            hint = standing(nodes, hints[FULL_NODE, b], hints[FULL_GEN, b], known)
            if hint != 0:
                node, pos, go = _resume(nodes, meta, slab, keys, at, pages, hint, known)
                climb = True
            else:
                stale += 1
        while go and pos < pages:
            child, n = find_child(
                nodes, meta, table, slab, node, keys, at + pos * page_size, pages - pos, head
            )
            if child == 0:
                break
            node = child
            pos += n
            run = run + n if nodes[LIVE, node] != 0 else np.int64(0)
            if run >= keep:
                best, best_node = pos, node
            go = n == nodes[PAGES, node]
        if climb:
            best, best_node = reusable(nodes, keep, node, pos)
        results[FULL_HIT, b] = pos * page_size
        results[REUSE, b] = best * page_size
        results[BRANCH, b] = pos * page_size if pos > best else -1
        results[FULL_NODE, b] = node
        results[FULL_GEN, b] = nodes[GEN, node]
        results[REUSE_NODE, b] = best_node
        results[REUSE_GEN, b] = nodes[GEN, best_node]
    return stale


@compiled
def stand(nodes: Int32Array, meta: Int64Array, results: Int32Array) -> None:
    """Make FULL_NODE what it is now; a request whose full hit has lost a page hits nothing any more."""
    for b in range(results.shape[1]):
        end = np.int64(results[FULL_HIT, b]) // meta[M_PAGE_SIZE]
        n = standing(nodes, results[FULL_NODE, b], results[FULL_GEN, b], end)
        if n == 0:
            results[:, b] = 0
        else:
            results[FULL_NODE, b] = n


@compiled
def still_holds(
    nodes: Int32Array, meta: Int64Array, results: Int32Array, index: Int64Array, handles: Int64Array
) -> int:
    """Return the first of `index` whose match no longer holds, or -1.

    It does not if the reusable prefix lost a page or the namespace is gone.
    """
    page_size = meta[M_PAGE_SIZE]
    keep = meta[M_KEEP_PAGES]
    for i in range(index.shape[0]):
        b = index[i]
        end = np.int64(results[REUSE, b]) // page_size
        n = standing(nodes, results[REUSE_NODE, b], results[REUSE_GEN, b], end)
        if n == 0 or not is_root(nodes, handles[b]):
            return b
        if end > 0 and reusable(nodes, keep, n, end)[0] != end:
            return b
    return -1
