"""A tree and its copy on the device: keys that share a first edge, each with an edge of its own."""

from __future__ import annotations

import numpy as np
import torch

from kvcache.bench.case import WINDOW, Size, State
from kvcache.bench.scene import Ints, int32, on_device, rng_of
from kvcache.device.tree_mirror import write_records
from kvcache.kernels.layout import MATCH_FIELDS, RECORD_FIELDS
from kvcache.tree import arrays as a
from kvcache.tree import insert as i
from kvcache.tree.radix_tree import RadixTree

_LOW_WORD = 0xFFFFFFFF
_VOCABULARY = 100_000


def edges(size: Size) -> tuple[int, int]:
    """Return the pages of the shared edge and of each key's own."""
    shared = max(1, size.pages // 2)
    return shared, max(1, size.pages - shared)


def grown_tree(size: Size) -> tuple[State, Ints]:
    """Return the arguments of `match` and the handle of the tree's root for the host.

    keys [batch * length] int32, starts, lens, roots, records, table, tokens, hash_words, results; and tree,
    the RadixTree itself.
    """
    shared, own = edges(size)
    length = (shared + own) * size.page_size
    rng = rng_of(size)
    keys = rng.integers(1, _VOCABULARY, (size.batch, length)).astype(np.int32)
    keys[:, : shared * size.page_size] = keys[0, : shared * size.page_size]
    # no two keys go on alike after the shared edge, at a page size of 1 neither
    keys[:, shared * size.page_size] = _VOCABULARY + np.arange(size.batch)
    tree = RadixTree(
        page_size=size.page_size,
        keep_pages=-(-WINDOW // size.page_size),
        bigram=False,
        num_slots=shared + size.batch * own,
        max_locks=4,
        max_roots=1,
        # so large that nothing ever moves to another level
        first_level=1 << (8 * size.batch).bit_length(),
    )
    handle = tree.new_root()
    for key in keys:
        _insert(tree, key, handle)
    records = np.zeros((int(tree.meta[a.M_BUMP]), RECORD_FIELDS), np.int32)
    write_records(tree.nodes, tree.meta, records)
    device = size.device
    mask, base = (int(tree.meta[place]) for place in (a.M_TABLE_MASK, a.M_TABLE_BASE))
    state: State = {
        "keys": int32(keys.reshape(-1), device),
        "starts": on_device(np.arange(size.batch, dtype=np.int64) * length, device),
        "lens": int32(np.full(size.batch, length), device),
        "roots": int32(np.full(size.batch, handle & _LOW_WORD), device),
        "records": int32(records, device),
        "table": int32(tree.table[base : base + mask + 1], device),
        "tokens": int32(tree.tokens, device),
        "hash_words": on_device(tree.hash_words.copy(), device),
        "results": torch.full((MATCH_FIELDS, size.batch), -7, dtype=torch.int32, device=device),
        "table_mask": mask,
        "keep_pages": -(-WINDOW // size.page_size),
        "page_size": size.page_size,
        "tree": tree,
        "host_keys": keys,
    }
    return state, np.full(size.batch, handle, np.int64)


def _insert(tree: RadixTree, key: Ints, handle: int) -> None:
    """Insert a key of whole pages, all of them live."""
    receipts = tree.lock(np.array([handle & _LOW_WORD]), np.zeros(1, np.int64))
    requests = np.zeros((1, i.NUM_REQUEST), np.int64)
    requests[0, i.KEY_LEN] = key.size
    requests[0, i.INSERT_END] = key.size // tree.meta[a.M_PAGE_SIZE]
    requests[0, i.BRANCH_AT] = -1
    requests[0, i.RECEIPT] = receipts[0]
    tree.insert(key, requests, np.zeros(0, np.int64), 0)
    tree.unlock(receipts)
