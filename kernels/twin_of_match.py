"""The CPU twin of `match` (match.py): the same walk as tree/match.py, on the tree's copy."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcache.compiled import compiled
from kvcache.kernels.layout import (
    ENTRY_NODE,
    ENTRY_TAG,
    HASH_ADDEND,
    HASH_HEAD_FACTOR,
    HASH_HEAD_KEY,
    HASH_MULTIPLIER,
    HASH_ODD_FACTOR,
    HASH_TOKEN_KEYS,
    MATCH_BRANCH,
    MATCH_FULL_GEN,
    MATCH_FULL_HIT,
    MATCH_FULL_NODE,
    MATCH_REUSE,
    MATCH_REUSE_GEN,
    MATCH_REUSE_NODE,
    MATCH_ROOT,
    RECORD_GEN,
    RECORD_HEAD,
    RECORD_LIVE,
    RECORD_PAGES,
    RECORD_PARENT,
    RECORD_START,
)

# constants of the tag's mixing function (splitmix64)
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB
_LOW_WORD = 0xFFFFFFFF
# a path has fewer pages: before the first tombstone any window is whole
_NO_TOMBSTONE = 2**31


@compiled
def _sum32(x: int, y: int) -> int:
    return np.uint64(np.uint32(np.uint32(x) + np.uint32(y)))


@compiled
def _tag(keys: Any, at: int, page_size: int, hash_words: Any, parent: int, head: int) -> int:
    """The tag of tree/hashing.py: child_tag of page_hash; as uint64."""
    low = np.uint64(_LOW_WORD)
    words = hash_words[:HASH_TOKEN_KEYS]
    token_keys = hash_words[HASH_TOKEN_KEYS:]
    half, last = page_size // 2, page_size - 1
    total = _sum32(head, words[HASH_HEAD_KEY]) * np.uint64(words[HASH_HEAD_FACTOR])
    if page_size % 2:
        total += _sum32(keys[at + last], token_keys[last]) * np.uint64(words[HASH_ODD_FACTOR])
    for i in range(half):
        first = _sum32(keys[at + i], token_keys[i])
        total += first * _sum32(keys[at + half + i], token_keys[half + i])
    x = total * np.uint64(words[HASH_MULTIPLIER]) + np.uint64(words[HASH_ADDEND])
    x = (np.uint64(parent) << np.uint64(32)) | (x >> np.uint64(32))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX2)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(16)) & low


@compiled
def match_twin(
    keys: Any,
    starts: Any,
    lens: Any,
    roots: Any,
    records: Any,
    table: Any,
    tokens: Any,
    hash_words: Any,
    results: Any,
    num: int,
    page_size: int,
    table_mask: int,
    table_base: int,
    old_mask: int,
    old_base: int,
    keep_pages: int,
    bigram: bool,
) -> None:
    """CPU twin of `match`; the specification. The same walk as tree/match.py, on the tree's copy."""
    for b in range(num):
        root = np.int64(roots[b])
        at = starts[b] + bigram
        num_pages = max(lens[b] - bigram, 0) // page_size
        head = np.int64(-1)
        if bigram and num_pages > 0:
            head = np.int64(keys[starts[b]])
            if head < 0 or head >= 2147483648:
                num_pages = 0
        node, pos = root, np.int64(0)
        best, best_node = np.int64(0), root
        run = np.int64(_NO_TOMBSTONE)
        walks = num_pages > 0
        while walks:
            page_at = at + pos * page_size
            top_head = head if node == root else np.int64(-1)
            x = _tag(keys, page_at, page_size, hash_words, node, top_head)
            mask, base = table_mask, table_base
            slot = np.int64(x) & mask
            found, matched = np.int64(0), np.int64(0)
            while found == 0:
                child = np.int64(table[base + slot, ENTRY_NODE])
                if child == 0:
                    if old_mask == 0 or mask == old_mask:
                        break
                    mask, base = old_mask, old_base
                    slot = np.int64(x) & mask
                    continue
                tag = np.uint32(table[base + slot, ENTRY_TAG])
                if tag == x and records[child, RECORD_PARENT] == node:
                    if top_head < 0 or records[child, RECORD_HEAD] == top_head:
                        edge_at = np.int64(records[child, RECORD_START]) * page_size
                        limit = min(np.int64(records[child, RECORD_PAGES]), num_pages - pos)
                        same = 0
                        while (
                            same < limit * page_size
                            and keys[page_at + same] == tokens[edge_at + same]
                        ):
                            same += 1
                        matched = np.int64(same // page_size)
                        if matched > 0:
                            found = child
                slot = (slot + 1) & mask
            walks = found != 0
            if walks:
                node = found
                pos += matched
                run = run + matched if records[node, RECORD_LIVE] != 0 else np.int64(0)
                if run >= keep_pages:
                    best, best_node = pos, node
                walks = records[node, RECORD_PAGES] == matched and pos < num_pages
        results[MATCH_FULL_HIT, b] = pos * page_size
        results[MATCH_REUSE, b] = best * page_size
        results[MATCH_BRANCH, b] = pos * page_size if pos > best else -1
        results[MATCH_FULL_NODE, b] = node
        results[MATCH_FULL_GEN, b] = records[node, RECORD_GEN]
        results[MATCH_REUSE_NODE, b] = best_node
        results[MATCH_REUSE_GEN, b] = records[best_node, RECORD_GEN]
        results[MATCH_ROOT, b] = root
