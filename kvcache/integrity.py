"""Rules of the pools, page by page: conservation, map, rows. Reads the device; for tests and `validate`.

P1  in each pool every page but 0 is in exactly one place: free stack, a tree slot, or one row
P2  map[full] != 0 exactly while that Full page has a live SWA page; no two share one; map[0] = 0
P3  the host's lengths and counts are the device's
P4  a row names the tree's pages below owned_len, its own pages above
P5  a frontier is page-aligned and at most what the computed length allows
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcache import rows as row_ops
from kvcache.errors import IntegrityError
from kvcache.state import CacheState
from kvcache.tree import arrays as a
from kvcache.tree.check import check_tree

Ints = npt.NDArray[np.int64]


def _require(holds: bool, name: str, detail: str = "") -> None:
    if not holds:
        raise IntegrityError(f"{name}{': ' if detail else ''}{detail}")


def _path_slots(state: CacheState, row: int) -> list[int]:
    """Return the slots of a row's locked prefix, first page first."""
    f = state.tree.nodes
    n = int(state.tree.locks[a.LOCK_NODE, state.rows.receipts[row] & 0xFFFFFFFF])
    slots: list[int] = []
    while f[a.PARENT, n] != 0:
        start = int(f[a.START, n])
        slots = [*range(start, start + int(f[a.PAGES, n])), *slots]
        n = int(f[a.PARENT, n])
    return slots


def check_state(state: CacheState) -> None:
    """Raise IntegrityError unless the tree's invariants and P1 to P5 hold."""
    check_tree(state.tree)
    config, tree, rows, plane = state.config, state.tree, state.rows, state.plane
    pools = {name: x.cpu().numpy() for name, x in vars(plane.pools).items()}
    table, slab, swa_map = pools["page_table"], pools["slab"], pools["swa_map"]
    page_size = config.page_size

    tops = pools["tops"].tolist()
    _require(tops == [plane.full_top, plane.swa_top], "P3 tops", str(tops))
    running = np.flatnonzero(rows.active)
    _require(
        bool((pools["row_state"][:, running] == rows.state[:4, running]).all()), "P3 row lengths"
    )

    f, bump = tree.nodes, int(tree.meta[a.M_BUMP])
    is_node = (f[a.SWA_LOCKS, :bump] >= 0) & (f[a.PARENT, :bump] != 0)
    full_owners = [pools["full_stack"][: tops[0]]]
    live_full = []
    for n in np.flatnonzero(is_node).tolist():
        start = int(f[a.START, n])
        pages = slab[start : start + int(f[a.PAGES, n])]
        full_owners.append(pages)
        if f[a.LIVE, n]:
            live_full.append(pages)
    for row in running.tolist():
        owned = int(rows.owned_len[row]) // page_size
        end = -(-int(rows.allocated_len[row]) // page_size)
        full_owners.append(table[row, owned:end])
        if config.has_swa:
            live_full.append(table[row, max(owned, int(rows.frontier[row]) // page_size) : end])
        slots = _path_slots(state, row)
        _require(len(slots) == owned, "P4 the lock covers owned_len", f"row {row}")
        _require(bool((table[row, :owned] == slab[slots]).all()), "P4 names of tree pages")
        most = row_ops.frontier_of(
            int(rows.computed_len[row]), page_size, config.keep_tokens, config.bigram
        )
        at = int(rows.frontier[row])
        _require(at % page_size == 0 and at <= max(most, 0), "P5 frontier", f"row {row}: {at}")
        _require(int(rows.computed_len[row]) <= int(rows.allocated_len[row]), "P5 computed_len")

    _check_owners("Full", np.concatenate(full_owners), config.full_pages)
    if not config.has_swa:
        return
    live = np.concatenate([np.zeros(0, np.int32), *live_full])
    _require(int(swa_map[0]) == 0, "P2 map[0]")
    mapped = np.flatnonzero(swa_map)
    _require(sorted(live.tolist()) == mapped.tolist(), "P2 map entries are the live pages")
    _check_owners(
        "SWA", np.concatenate([pools["swa_stack"][: tops[1]], swa_map[mapped]]), config.swa_pages
    )


def _check_owners(pool: str, owners: npt.NDArray[np.int32], pages: int) -> None:
    counts = np.bincount(owners, minlength=pages + 1)
    _require(counts.size == pages + 1, f"P1 {pool} page out of range", str(int(owners.max())))
    _require(int(counts[0]) == 0, f"P1 {pool} page 0 is owned")
    wrong = np.flatnonzero(counts[1:] != 1) + 1
    if wrong.size:
        page = int(wrong[0])
        raise IntegrityError(f"P1 {pool} page {page} has {counts[page]} owners, must have 1")
