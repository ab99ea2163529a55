"""Insert: hand what a row computed to the tree, in one walk, with a live window at every checkpoint.

    tree    |== live ==|==== tombstone ====|                      (the pages that it already has)
    row     |..........|........[wwww].....|........[wwww]..[www]  w: kept, . : not
    then    |== live ==|== t ===|live| t ==|== t ===|live|t |live|
    row's    freed      freed    ADOPT freed STORE   STORE   STORE

The walk begins at the row's own locked prefix, so no token is compared twice. What happens to pages is
written down as ranges; the tree itself never sees a page id.
"""

from __future__ import annotations

import numpy as np

from kvcache.compiled import compiled
from kvcache.tree.arrays import (
    CHILD,
    DEPTH,
    HEAD,
    LIVE,
    LOCK_END,
    LOCK_LEARNS,
    LOCK_NODE,
    LOCK_PRIORITY,
    LOCK_SWA,
    M_BIGRAM,
    M_BY_VALUE,
    M_KEEP_PAGES,
    M_LADDER,
    M_PAGE_SIZE,
    PAGES,
    PARENT,
    START,
    SWA_LOCKS,
    Int32Array,
    Int64Array,
    TokenArray,
)
from kvcache.tree.changes import note_tokens
from kvcache.tree.children import find_child
from kvcache.tree.edges import file_node, make_live, new_node, split
from kvcache.tree.join import are_alike, join
from kvcache.tree.kept import make_window, note_tails
from kvcache.tree.ladder import checkpoints
from kvcache.tree.lock import lock_full, lock_swa, unlock_swa
from kvcache.tree.ranges import (
    ADOPT,
    BIND,
    DROP_ROW,
    FREE_ROW,
    FREE_ROW_SWA,
    STORE,
    emit,
)
from kvcache.tree.slab import take_slots
from kvcache.tree.tokens import copy_tokens, matching_tokens, storable_tokens
from kvcache.tree.value import ANSWER, learn_fork
from kvcache.tree.windows import kept_windows, next_edge, windows_at

# columns of an insert request, int64 [batch, NUM_REQUEST]
(
    AT,  # first token of the key in the flat buffer
    KEY_LEN,  # tokens of the key
    INSERT_END,  # pages to insert; nothing to do where <= the pages that the lock covers
    RESEND_END,  # pages that the same key without its last unit can reuse: a window ends there too
    FRONTIER,  # pages of the row below it have no SWA page
    BRANCH_AT,  # tokens, -1 = none: checkpoint found by the match
    RECEIPT,  # the row's lock; it moves to the new end
    HINT_FROM,  # first hint of the request
    HINT_TO,
    PROMPT_LEN,  # units of the prompt, 0 = unknown
    ENDS,  # 1: the request ends with this insert
    MATCHED_END,  # out: pages from the row's prefix on that the tree already had
) = range(12)
NUM_REQUEST = 12


@compiled
def first_bad_key(
    nodes: Int32Array,
    meta: Int64Array,
    slab: Int32Array,
    locks: Int32Array,
    keys: TokenArray,
    requests: Int64Array,
    whole: bool,
) -> tuple[int, int]:
    """Check that each key repeats the prefix that its lock covers and can be stored.

    Args:
        whole: Compare all of the prefix. Else only the last page of it that the key covers: re-reading a
            prefix at every commit costs the square of its length over a prefill in chunks.

    Returns:
        (request, token): the first fault and the token of the key at or after which it lies; (-1, -1): none.
    """
    page_size = meta[M_PAGE_SIZE]
    bigram = meta[M_BIGRAM]
    for b in range(requests.shape[0]):
        k = requests[b, RECEIPT] & 0xFFFFFFFF
        at = requests[b, AT] + bigram
        owned = np.int64(locks[LOCK_END, k])
        end = requests[b, INSERT_END]
        if end > owned:
            first = owned * page_size
            if not storable_tokens(keys, at + first - bigram, (end - owned) * page_size + bigram):
                return b, first
        x = np.int64(locks[LOCK_NODE, k])
        # tokens of the prefix that the key covers; it may be behind, or lack the last unit of a bigram
        covered = min(owned * page_size, requests[b, KEY_LEN] - bigram)
        lowest = np.int64(0) if whole else max(covered - 1, 0) // page_size * page_size
        while nodes[PARENT, x] != 0:
            first = np.int64(nodes[DEPTH, x]) * page_size
            begin = max(first, lowest)
            n = max(min(first + np.int64(nodes[PAGES, x]) * page_size, covered) - begin, 0)
            start = np.int64(nodes[START, x]) * page_size + begin - first
            same = matching_tokens(slab, start, keys, at + begin, n)
            if same < n:
                return b, begin + same + bigram
            if n > 0 and begin == 0 and bigram != 0 and keys[at - 1] != nodes[HEAD, x]:
                return b, 0
            if first <= lowest:
                break
            x = np.int64(nodes[PARENT, x])
    return -1, -1


@compiled
def insert_size(locks: Int32Array, requests: Int64Array) -> tuple[int, int]:
    """Return (pages that the requests insert at most, most of one request)."""
    pages = 0
    widest = 0
    for b in range(requests.shape[0]):
        grown = requests[b, INSERT_END] - locks[LOCK_END, requests[b, RECEIPT] & 0xFFFFFFFF]
        pages += max(grown, 0)
        widest = max(widest, grown)
    return pages, widest


@compiled
def _has_room(
    locks: Int32Array,
    requests: Int64Array,
    ranges: Int32Array,
    marks: Int64Array,
) -> bool:
    pages, widest = insert_size(locks, requests)
    return ranges.shape[0] >= 2 * pages + 4 * requests.shape[0] and marks.shape[0] > widest


@compiled
def _free_row(ranges: Int32Array, num: int, b: int, first: int, end: int, frontier: int) -> int:
    """Free the row's Full pages [first, end), with SWA from `frontier` on."""
    cut = min(max(frontier, first), end)
    if first < cut:
        num = emit(ranges, num, FREE_ROW, b, first, -1, cut - first)
    if cut < end:
        num = emit(ranges, num, FREE_ROW_SWA, b, cut, -1, end - cut)
    return num


@compiled
def _take_over(
    nodes: Int32Array,
    meta: Int64Array,
    table: Int32Array,
    slab: Int32Array,
    ranges: Int32Array,
    num: int,
    b: int,
    child: int,
    frontier: int,
    kept: Int64Array,
    num_kept: int,
    i: int,
) -> tuple[int, int]:
    """The row computed what `child` already holds: adopt its SWA where a window is kept, free the rest."""
    page = np.int64(nodes[DEPTH, child])
    end = page + nodes[PAGES, child]
    offset = np.int64(nodes[START, child]) - page
    num = emit(ranges, num, BIND, b, page, offset + page, end - page)
    if nodes[LIVE, child] != 0:
        return _free_row(ranges, num, b, page, end, frontier), i
    while page < end:
        i, stop, keep = next_edge(kept, num_kept, i, page, end)
        if keep:
            n = child
            if nodes[DEPTH, n] < page:
                split(nodes, meta, table, slab, n, page - nodes[DEPTH, n])
            if stop < end:
                n = split(nodes, meta, table, slab, n, stop - page)
            make_live(nodes, meta, n)
            num = emit(ranges, num, ADOPT, b, page, offset + page, stop - page)
        else:
            num = _free_row(ranges, num, b, page, stop, frontier)
        page = stop
    return num, i


@compiled
def _append(
    nodes: Int32Array,
    meta: Int64Array,
    table: Int32Array,
    slab: Int32Array,
    ranges: Int32Array,
    num: int,
    b: int,
    node: int,
    keys: TokenArray,
    at: int,
    page: int,
    end: int,
    frontier: int,
    head: int,
    kept: Int64Array,
    num_kept: int,
    i: int,
) -> tuple[int, int]:
    """Append pages [page, end) of the row below `node`; return (ranges, last node)."""
    page_size = meta[M_PAGE_SIZE]
    after = np.int64(nodes[START, node]) + nodes[PAGES, node]
    while page < end:
        i, stop, keep = next_edge(kept, num_kept, i, page, end)
        while page < stop:
            start, got = take_slots(nodes, meta, slab, stop - page, after)
            after = start + got
            copy_tokens(slab, start * page_size, keys, at + page * page_size, got * page_size)
            note_tokens(meta, start, got)
            n = new_node(nodes, meta, node, start, got, page, head if page == 0 else -1)
            file_node(nodes, meta, table, slab, n)
            num = emit(ranges, num, STORE, b, page, start, got)
            if keep:
                make_live(nodes, meta, n)
            elif page + got > frontier and meta[M_KEEP_PAGES] > 0:
                first = max(page, frontier)
                num = emit(ranges, num, DROP_ROW, b, first, -1, page + got - first)
            node = n
            page += got
    return num, node


@compiled
def insert(
    nodes: Int32Array,
    meta: Int64Array,
    table: Int32Array,
    slab: Int32Array,
    locks: Int32Array,
    keys: TokenArray,
    requests: Int64Array,
    hints: Int64Array,
    every: int,
    ranges: Int32Array,
    marks: Int64Array,
    kept: Int64Array,
    found: Int64Array,
) -> int:
    """Insert a batch, strictly in order, and move each row's lock to its new end.

    Args:
        keys: Flat token buffer, checked by `first_bad_key`.
        requests: [batch, NUM_REQUEST], see above; MATCHED_END is out.
        hints: Flat buffer of hints, tokens.
        every: Period of the periodic checkpoints, tokens; 0 = none.
        ranges: [capacity, 5], out; room for three ranges a page and four a request.
        marks, kept: Scratch of `kept_windows`.
        found: [at least pages of the insert, 2], scratch.

    Returns:
        -1: `ranges` or the scratch is too small, and nothing was done. Else the number of ranges.
        In each batch: first STORE, DROP_* and FREE_*, then ADOPT, then BIND may run.
    """
    if not _has_room(locks, requests, ranges, marks):
        return -1
    page_size = meta[M_PAGE_SIZE]
    keep_pages = meta[M_KEEP_PAGES]
    bigram = meta[M_BIGRAM]
    num = 0
    for b in range(requests.shape[0]):
        k = requests[b, RECEIPT] & 0xFFFFFFFF
        anchor = np.int64(locks[LOCK_NODE, k])
        owned = np.int64(locks[LOCK_END, k])
        end = requests[b, INSERT_END]
        requests[b, MATCHED_END] = owned
        by_value = meta[M_BY_VALUE] != 0
        priority = np.int64(locks[LOCK_PRIORITY, k])
        num_found = 0
        prompt = requests[b, PROMPT_LEN] // page_size
        if end <= owned:
            if by_value and requests[b, ENDS] != 0 and owned > 0:
                if locks[LOCK_LEARNS, k] != 0:
                    learn_fork(nodes, meta, anchor, owned)
                make_window(nodes, meta, table, slab, anchor, owned, ANSWER, priority)
                note_tails(nodes, meta, anchor, prompt, owned)
            continue
        at = requests[b, AT] + bigram
        head = np.int64(keys[at - 1]) if bigram != 0 else np.int64(-1)
        frontier = requests[b, FRONTIER] if keep_pages > 0 else end
        if by_value or meta[M_LADDER] != 0:
            num_found = checkpoints(
                meta,
                owned,
                end,
                requests[b, RESEND_END],
                requests[b, PROMPT_LEN],
                requests[b, BRANCH_AT],
                every,
                hints[requests[b, HINT_FROM] : requests[b, HINT_TO]],
                requests[b, ENDS] != 0,
                marks,
                found,
            )
            num_kept = windows_at(found, num_found, owned, end, frontier, keep_pages, kept)
        else:
            num_kept = kept_windows(
                owned,
                end,
                frontier,
                keep_pages,
                requests[b, RESEND_END],
                requests[b, BRANCH_AT],
                every,
                page_size,
                hints[requests[b, HINT_FROM] : requests[b, HINT_TO]],
                marks,
                kept,
            )
        i = 0
        node, page = anchor, owned
        while page < end:
            child, n = find_child(
                nodes, meta, table, slab, node, keys, at + page * page_size, end - page, head
            )
            if child == 0:
                break
            if n < nodes[PAGES, child]:
                child = np.int64(split(nodes, meta, table, slab, child, n))
            num, i = _take_over(
                nodes, meta, table, slab, ranges, num, b, child, frontier, kept, num_kept, i
            )
            node = child
            page += n
        requests[b, MATCHED_END] = page
        if by_value and locks[LOCK_LEARNS, k] != 0 and (page < end or end >= prompt):
            locks[LOCK_LEARNS, k] = 0
            if page > 0:
                learn_fork(nodes, meta, node, page)
        num, last = _append(
            nodes,
            meta,
            table,
            slab,
            ranges,
            num,
            b,
            node,
            keys,
            at,
            page,
            end,
            frontier,
            head,
            kept,
            num_kept,
            i,
        )
        node = np.int64(last)
        lock_full(nodes, meta, node, anchor)
        first = lock_swa(nodes, meta, table, slab, node, end, frontier)
        if locks[LOCK_SWA, k] < owned:
            unlock_swa(nodes, meta, table, anchor, np.int64(locks[LOCK_SWA, k]))
        locks[LOCK_NODE, k] = node
        locks[LOCK_END, k] = end
        locks[LOCK_SWA, k] = first
        if by_value:
            for c in range(num_found):
                kind = found[c, 1]
                make_window(nodes, meta, table, slab, node, found[c, 0], kind, priority)
            if (owned < prompt and prompt <= end) or requests[b, ENDS] != 0:
                note_tails(nodes, meta, node, prompt, end)
        below = np.int64(nodes[CHILD, anchor])
        # unlocking may have joined the two already
        if nodes[SWA_LOCKS, anchor] >= 0 and below != 0 and are_alike(nodes, anchor, below):
            join(nodes, meta, table, anchor, below)
    return num
