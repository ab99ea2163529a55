"""Random trees and keys for the kernels of the match on the device; used like kernel_cases.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from kernel_cases import GARBAGE, Array, Case

from kvcache.device.tree_mirror import write_records
from kvcache.kernels.layout import MATCH_FIELDS
from kvcache.tree import arrays as a
from kvcache.tree import insert as i
from kvcache.tree.radix_tree import RadixTree


class RandomTree:
    """A tree grown by inserts that fork, stop inside an edge, leave tombstones, and are evicted in part."""

    def __init__(
        self,
        seed: int,
        *,
        page_size: int,
        keep_pages: int,
        bigram: bool = False,
        num_slots: int = 60,
        inserts: int = 25,
        key_pages: int = 12,
        vocabulary: int = 2,
        first_level: int | None = None,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.page_size, self.bigram, self.vocabulary = page_size, bigram, vocabulary
        self.key_pages = key_pages
        self.tree = RadixTree(
            page_size=page_size,
            keep_pages=keep_pages,
            bigram=bigram,
            num_slots=num_slots,
            max_locks=4,
            max_roots=3,
            first_level=first_level,
        )
        self.roots = [self.tree.new_root() for _ in range(2)]
        self.keys = [np.zeros(0, np.int32)]
        for _ in range(inserts):
            self.insert()

    def key(self, most_pages: int) -> Array:
        """A key that follows an earlier one for a while, then goes its own way."""
        base = self.keys[self.rng.integers(len(self.keys))]
        cut = int(self.rng.integers(0, base.size + 1))
        if self.rng.random() < 0.4:
            cut = base.size  # grows: the earlier end keeps its window, tombstones follow
        elif self.rng.random() < 0.5:
            cut = cut // self.page_size * self.page_size
        more = self.rng.integers(0, most_pages * self.page_size // 2 + 2)
        own = self.rng.integers(0, self.vocabulary, more)
        if self.rng.random() < 0.3:
            own = np.repeat(
                own[:1], more
            )  # long runs of one token: pages that hash alike by position
        return np.concatenate([base[:cut], own]).astype(np.int32)[: most_pages * self.page_size + 1]

    def insert(self) -> None:
        """Insert a key below one of the roots, with tombstones at random; evict where the slots run out."""
        tree, size = self.tree, self.page_size
        key = self.key(self.key_pages)
        end = max(key.size - self.bigram, 0) // size
        room = tree.meta[a.M_SLAB_SIZE] - tree.full_pages
        if end > room:
            tree.evict(int(end), 0)
        if self.rng.random() < 0.3:
            tree.evict(0, int(self.rng.integers(0, 6)))
        handle = self.roots[self.rng.integers(len(self.roots))]
        receipts = tree.lock(np.array([handle & 0xFFFFFFFF]), np.zeros(1, np.int64))
        requests = np.zeros((1, i.NUM_REQUEST), np.int64)
        requests[0, i.KEY_LEN] = key.size
        requests[0, i.INSERT_END] = min(end, tree.meta[a.M_SLAB_SIZE] - tree.full_pages)
        requests[0, i.FRONTIER] = self.rng.integers(0, end + 1) if self.rng.random() < 0.5 else 0
        requests[0, i.BRANCH_AT] = -1
        requests[0, i.RECEIPT] = receipts[0]
        tree.insert(key, requests, np.zeros(0, np.int64), 0)
        tree.unlock(receipts)
        self.keys.append(key)

    def levels(self) -> dict[str, int]:
        """Where its child table has entries."""
        names = {"table_mask": a.M_TABLE_MASK, "table_base": a.M_TABLE_BASE}
        names |= {"old_mask": a.M_OLD_MASK, "old_base": a.M_OLD_BASE}
        return {name: int(self.tree.meta[place]) for name, place in names.items()}

    def copy(self) -> dict[str, Array]:
        """What the device has of the tree."""
        tree = self.tree
        records = np.full((int(tree.meta[a.M_BUMP]), 8), GARBAGE, np.int32)
        write_records(tree.nodes, tree.meta, records)
        return {
            "records": records,
            "table": tree.table.copy(),
            "tokens": tree.tokens.copy(),
            "hash_words": tree.hash_words.copy(),
        }


def match_case(
    seed: int,
    *,
    num: int,
    page_size: int,
    keep_pages: int = 2,
    bigram: bool = False,
    aligned: bool = False,
    dtype: npt.DTypeLike = np.int32,
    **tree_sizes: Any,
) -> tuple[Case, RandomTree]:
    """Keys of a random tree: whole, cut, changed in one token, unknown; odd ones with tokens out of range."""
    grown = RandomTree(
        seed, page_size=page_size, keep_pages=keep_pages, bigram=bigram, **tree_sizes
    )
    rng = grown.rng
    keys = []
    for _ in range(num):
        key = grown.key(grown.key_pages + 2).astype(dtype)
        kind = rng.random()
        if key.size and kind < 0.3:
            key[rng.integers(key.size)] += 1
        elif key.size and kind < 0.4:
            odd = [-1, GARBAGE, 2**31 - 1]
            odd += [2**31, 2**32, 2**40 + int(key[0])] if np.dtype(dtype) == np.int64 else []
            key[rng.integers(key.size)] = rng.choice(odd)
        keys.append(key)
    starts = np.zeros(num, np.int64)
    at = 8
    parts: list[Array] = [np.full(at, GARBAGE, dtype)]
    for b, key in enumerate(keys):
        gap = (-at) % 4 if aligned else int(rng.integers(0, 3))
        parts += [np.full(gap, GARBAGE, dtype), key]
        starts[b] = at + gap
        at += gap + key.size
    roots = np.array(grown.roots, np.int64)[rng.integers(len(grown.roots), size=num)]
    arrays: dict[str, Array | None] = {
        "keys": np.concatenate(parts),
        "starts": starts,
        "lens": np.array([key.size for key in keys], np.int32),
        "roots": (roots & 0xFFFFFFFF).astype(np.int32),
        **grown.copy(),
        "results": np.full((MATCH_FIELDS, num), GARBAGE, np.int32),
    }
    scalars = {
        "num": num,
        "page_size": page_size,
        **grown.levels(),
        "keep_pages": keep_pages,
        "bigram": bigram,
        "aligned": aligned,
    }
    return Case("match", arrays, scalars), grown


def expected_match(case: Case, grown: RandomTree) -> dict[str, Array]:
    """Return what all arrays must hold after the call: the host's match of the same keys."""
    arrays = {name: array.copy() for name, array in case.arrays.items() if array is not None}
    lens = arrays["lens"].astype(np.int64)
    roots = arrays["roots"].astype(np.int64)
    handles = grown.tree.nodes[a.GEN, roots].astype(np.int64) << 32 | roots
    tree = grown.tree
    arrays["results"][:] = tree.match(arrays["keys"], arrays["starts"], lens, handles, touch=False)
    return arrays


def bind_match_case(seed: int, *, num: int, page_size: int, **tree_sizes: Any) -> Case:
    """Rows for some requests of a match; one request may be bound twice."""
    case, grown = match_case(seed, num=max(num, 1), page_size=page_size, **tree_sizes)
    results = expected_match(case, grown)["results"]
    rng = grown.rng
    max_rows, most = num + 3, int(results[1].max()) // page_size
    page_table = np.full((max_rows, most + 2), GARBAGE, np.int32)
    index = np.concatenate([rng.integers(0, results.shape[1], num), [GARBAGE]]).astype(np.int32)
    rows = np.concatenate([rng.permutation(max_rows)[:num], [GARBAGE]]).astype(np.int32)
    records = case.arrays["records"]
    assert records is not None
    if num:
        # prefixes that end inside an edge or above it: the lowest parts of nodes that were split since
        for b in {int(x) for x in index[:num]}:
            results[1, b] = rng.integers(0, results[1, b] // page_size + 1) * page_size
    arrays: dict[str, Array | None] = {
        "results": results,
        "index": index,
        "rows": rows,
        "records": records,
        "slab": rng.permutation(grown.tree.meta[a.M_SLAB_SIZE] + 1).astype(np.int32) + 1,
        "page_table": page_table,
    }
    return Case("bind_match", arrays, {"num": num, "max_pages": most, "page_size": page_size})


def expected_bind(case: Case) -> dict[str, Array]:
    """Bind page by page: the slot of a page is found by climbing to the node that holds it."""
    arrays = {name: array.copy() for name, array in case.arrays.items() if array is not None}
    records, size = arrays["records"], case.scalars["page_size"]
    for b, row in zip(arrays["index"][: case.scalars["num"]], arrays["rows"], strict=False):
        for page in range(arrays["results"][1, b] // size):
            node = arrays["results"][5, b]
            while records[node, 3] > page:
                node = records[node, 0]
            slot = records[node, 1] + page - records[node, 3]
            arrays["page_table"][row, page] = arrays["slab"][slot]
    return arrays


def update_mirror_case(seed: int, *, num: tuple[int, int, int], page_size: int) -> Case:
    """New records, entries and pages at random places."""
    rng = np.random.default_rng(seed)
    nodes, slots, pages = num

    def places(n: int) -> Array:
        return np.append(rng.permutation(n + 5)[:n], GARBAGE).astype(np.int32)

    arrays: dict[str, Array | None] = {
        "node_ids": places(nodes),
        "node_rows": rng.integers(-100, 100, (nodes + 1, 8), dtype=np.int32),
        "slot_ids": places(slots),
        "slot_rows": rng.integers(-100, 100, (slots + 1, 2), dtype=np.int32),
        "page_ids": places(pages),
        "page_rows": rng.integers(-100, 100, (pages + 1, page_size), dtype=np.int32),
        "records": np.full((nodes + 5, 8), GARBAGE, np.int32),
        "table": np.full((slots + 5, 2), GARBAGE, np.int32),
        "tokens": np.full((pages + 5) * page_size, GARBAGE, np.int32),
    }
    scalars = {"num_nodes": nodes, "num_slots": slots, "num_pages": pages, "page_size": page_size}
    return Case("update_mirror", arrays, scalars)


def expected_update(case: Case) -> dict[str, Array]:
    """Return what all arrays must hold after the call."""
    arrays = {name: array.copy() for name, array in case.arrays.items() if array is not None}
    s = case.scalars
    arrays["records"][arrays["node_ids"][: s["num_nodes"]]] = arrays["node_rows"][: s["num_nodes"]]
    arrays["table"][arrays["slot_ids"][: s["num_slots"]]] = arrays["slot_rows"][: s["num_slots"]]
    tokens = arrays["tokens"].reshape(-1, s["page_size"])
    tokens[arrays["page_ids"][: s["num_pages"]]] = arrays["page_rows"][: s["num_pages"]]
    return arrays
