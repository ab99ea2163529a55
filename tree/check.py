"""Invariants of the tree, numbered; for tests, `validate` and benchmarks, never for the hot path.

T1  every record is the null node, a root, a node, a run of free slots, spare, or joined with the node below;
    spare and joined ones are linked
T2  CHILDREN, CHILD, DEPTH and PAGES agree along every edge
T3  nodes and runs cover the used slots exactly once; no two runs touch
T4  every node can be found under its parent; nothing else is filed
T5  the Full list holds exactly the unlocked nodes, each less recent than its ancestors
T6  the SWA list holds exactly the live nodes that no lock of their SWA and no window covers
T7  lock counts are what the standing locks say
T8  the counters are the sums that they stand for
T9  stored tokens are >= 0; siblings differ in their first page
T10 the ring of a namespace holds exactly its nodes, each after its ancestors
T11 WIN_REFS are what the windows say, and all of a window is live; the heap holds exactly the windows, none
    before the one above it
"""

from __future__ import annotations

import numpy as np

from kvcache.errors import IntegrityError
from kvcache.tree import arrays as a
from kvcache.tree.children import first_page_hash_of
from kvcache.tree.hashing import child_tag
from kvcache.tree.radix_tree import RadixTree


def check_tree(tree: RadixTree) -> None:
    """Raise IntegrityError, with the invariant's number and name, unless all of T1 to T11 hold."""
    kinds = _check_records(tree)
    nodes = np.flatnonzero(kinds == _NODE)
    _check_edges(tree, nodes, kinds)
    _check_slots(tree, nodes, np.flatnonzero(kinds == _RUN))
    _check_table(tree, nodes)
    _check_lists(tree, nodes)
    _check_locks(tree, nodes, np.flatnonzero(kinds == _ROOT))
    _check_counters(tree, nodes, kinds)
    _check_tokens(tree, nodes)
    _check_spaces(tree, nodes, np.flatnonzero(kinds == _ROOT))
    _check_windows(tree, nodes)


_NULL, _ROOT, _NODE, _RUN, _SPARE, _JOINED = range(6)


def _require(holds: bool, name: str, detail: str = "") -> None:
    if not holds:
        raise IntegrityError(f"{name}{': ' if detail else ''}{detail}")


def _check_records(tree: RadixTree) -> np.ndarray:
    nodes, meta = tree.nodes, tree.meta
    bump = int(meta[a.M_BUMP])
    kinds = np.full(bump, _NODE)
    kinds[nodes[a.PARENT, :bump] == 0] = _ROOT
    kinds[nodes[a.SWA_LOCKS, :bump] == a.SPARE] = _SPARE
    kinds[nodes[a.SWA_LOCKS, :bump] == a.RUN] = _RUN
    kinds[nodes[a.SWA_LOCKS, :bump] == a.JOINED] = _JOINED
    kinds[0] = _NULL
    spare, n = set(), int(meta[a.M_SPARE])
    while n != 0 and n not in spare:
        spare.add(n)
        n = int(nodes[a.PARENT, n])
    _require(n == 0 and spare == set(np.flatnonzero(kinds == _SPARE).tolist()), "T1 spare list")
    joined: list[int] = []
    n = int(meta[a.M_JOINED])
    while len(joined) < int(meta[a.M_NUM_JOINED]):
        joined.append(n)
        n = int(nodes[a.PARENT, n])
    _require(sorted(joined) == np.flatnonzero(kinds == _JOINED).tolist(), "T1 joined list")
    _require(not joined or joined[-1] == int(meta[a.M_JOINED_LAST]), "T1 end of the joined list")
    roots = int((kinds == _ROOT).sum())
    _require(roots == tree.num_roots, "T1 roots", f"{roots} records, {tree.num_roots} counted")
    return kinds


def _check_edges(tree: RadixTree, nodes: np.ndarray, kinds: np.ndarray) -> None:
    f = tree.nodes
    parents = f[a.PARENT, nodes]
    _require(bool(np.isin(kinds[parents], (_NODE, _ROOT)).all()), "T2 parent is no node")
    _require(bool((f[a.PAGES, nodes] >= 1).all()), "T2 empty edge")
    depth = f[a.DEPTH, parents] + f[a.PAGES, parents]
    _require(bool((f[a.DEPTH, nodes] == depth).all()), "T2 DEPTH")
    children = np.bincount(parents, minlength=kinds.size)
    inner = np.flatnonzero(np.isin(kinds, (_NODE, _ROOT)))
    _require(bool((children[inner] == f[a.CHILDREN, inner]).all()), "T2 CHILDREN")
    xor = np.zeros(kinds.size, np.int32)
    np.bitwise_xor.at(xor, parents, nodes)
    _require(bool((xor[inner] == f[a.CHILD, inner]).all()), "T2 CHILD")


def _check_slots(tree: RadixTree, nodes: np.ndarray, runs: np.ndarray) -> None:
    f, meta = tree.nodes, tree.meta
    page = int(meta[a.M_PAGE_SIZE])
    owners = np.concatenate([nodes, runs])
    owners = owners[np.argsort(f[a.START, owners])]
    ends = np.cumsum(f[a.PAGES, owners])
    starts = ends - f[a.PAGES, owners]
    _require(bool((f[a.START, owners] == starts).all()), "T3 slots overlap or leak")
    used = int(ends[-1]) if ends.size else 0
    _require(used == meta[a.M_SLAB_TOP], "T3 slab top", f"{used} != {meta[a.M_SLAB_TOP]}")
    is_run = np.isin(owners, runs)
    _require(not (is_run[1:] & is_run[:-1]).any(), "T3 two free runs touch")
    _require(not (is_run.size and is_run[-1]), "T3 a free run ends the slab")
    linked = set()
    for c in range(a.NUM_RUN_CLASSES):
        r = int(meta[a.M_RUN_HEAD + c])
        _require((r != 0) == bool(meta[a.M_RUN_CLASSES] >> c & 1), "T3 class bits")
        while r != 0:
            size = int(f[a.PAGES, r])
            _require(size >> c == 1, "T3 run in a wrong size class", f"{size} pages in class {c}")
            first, last = int(f[a.START, r]) * page, (int(f[a.START, r]) + size) * page - 1
            _require(tree.tokens[first] == -r == tree.tokens[last], "T3 marks of a free run")
            linked.add(r)
            r = int(f[a.FULL_NEXT, r])
    _require(linked == set(runs.tolist()), "T3 free runs not linked")


def _check_table(tree: RadixTree, nodes: np.ndarray) -> None:
    f, meta, table = tree.nodes, tree.meta, tree.table
    levels = [(int(meta[a.M_TABLE_BASE]), int(meta[a.M_TABLE_MASK]))]
    if meta[a.M_OLD_MASK]:
        levels.append((int(meta[a.M_OLD_BASE]), int(meta[a.M_OLD_MASK])))
        gone = table[levels[1][0] : levels[1][0] + int(meta[a.M_MOVED]), a.NODE]
        _require(not gone.any(), "T4 an entry was left behind")
    used = sum(int((table[base : base + mask + 1, a.NODE] != 0).sum()) for base, mask in levels)
    _require(used == int((table[:, a.NODE] != 0).sum()) == nodes.size, "T4 number of entries")
    _require(2 * nodes.size <= levels[0][1] + 1, "T4 more than half full")
    for n in nodes.tolist():
        first = first_page_hash_of(f, meta, tree.tokens, n)
        _require(first == f[a.HASH, n], "T4 HASH", f"node {n}")
        tag = child_tag(f[a.PARENT, n], f[a.HASH, n])
        found = []
        for base, mask in levels:
            i = int(tag) & 0xFFFFFFFF & mask
            while table[base + i, a.NODE] not in (0, n):
                i = (i + 1) & mask
            found.append(table[base + i, a.NODE] == n and table[base + i, a.TAG] == tag)
        _require(sum(found) == 1, "T4 node not found", f"node {n}")


def linked_nodes(tree: RadixTree, previous: int, following: int) -> list[int]:
    """Return a recency list from the least to the most recent node; IntegrityError if its links disagree."""
    f = tree.nodes
    order: list[int] = []
    n = int(f[previous, a.NO_NODE])
    while n != a.NO_NODE:
        _require(len(order) <= tree.num_nodes, "T5 list has a cycle")
        _require(int(f[following, f[previous, n]]) == n, "T5 links disagree", f"node {n}")
        order.append(n)
        n = int(f[previous, n])
    return order


def _check_lists(tree: RadixTree, nodes: np.ndarray) -> None:
    f = tree.nodes
    full = linked_nodes(tree, a.FULL_PREV, a.FULL_NEXT)
    unlocked = nodes[f[a.FULL_LOCKS, nodes] == 0]
    _require(sorted(full) == unlocked.tolist(), "T5 members of the Full list")
    place = {n: i for i, n in enumerate(full)}
    for n in full:
        above = place.get(int(f[a.PARENT, n]))
        _require(above is None or above > place[n], "T5 a node is more recent than its parent")
    swa = linked_nodes(tree, a.SWA_PREV, a.SWA_NEXT)
    loose = (f[a.SWA_LOCKS, nodes] == 0) & (f[a.WIN_REFS, nodes] == 0)
    free = nodes[loose & (f[a.LIVE, nodes] != 0)]
    _require(sorted(swa) == free.tolist(), "T6 members of the SWA list")
    for field, members in ((a.FULL_PREV, full), (a.SWA_PREV, swa)):
        outside = np.setdiff1d(nodes, np.array(members, np.int64))
        _require(bool((f[field, outside] == a.OUT).all()), "T6 a node outside a list has links")


def _check_locks(tree: RadixTree, nodes: np.ndarray, roots: np.ndarray) -> None:
    f, locks = tree.nodes, tree.locks
    full = np.zeros(f.shape[1], np.int64)
    swa = np.zeros(f.shape[1], np.int64)
    standing = np.flatnonzero(locks[a.LOCK_NODE] != 0)
    for k in standing.tolist():
        n = int(locks[a.LOCK_NODE, k])
        end = int(f[a.DEPTH, n] + f[a.PAGES, n])
        _require(end == locks[a.LOCK_END, k], "T7 a lock does not end where its node ends")
        while n != 0:
            full[n] += 1
            if f[a.PARENT, n] != 0 and f[a.DEPTH, n] >= locks[a.LOCK_SWA, k]:
                swa[n] += 1
            n = int(f[a.PARENT, n])
    both = np.concatenate([nodes, roots])
    _require(bool((f[a.FULL_LOCKS, both] == full[both]).all()), "T7 FULL_LOCKS")
    _require(bool((f[a.SWA_LOCKS, both] == swa[both]).all()), "T7 SWA_LOCKS")
    free = tree.free_locks[: int(tree.meta[a.M_LOCKS_FREE])].tolist()
    every = sorted(free + standing.tolist())
    _require(every == list(range(locks.shape[1])), "T7 free locks")


def _check_counters(tree: RadixTree, nodes: np.ndarray, kinds: np.ndarray) -> None:
    f, meta = tree.nodes, tree.meta
    pages = f[a.PAGES, nodes]
    live = f[a.LIVE, nodes] != 0
    for name, counter, value in (
        ("nodes", a.M_NODES, nodes.size),
        ("Full pages", a.M_FULL_PAGES, pages.sum()),
        ("SWA pages", a.M_SWA_PAGES, pages[live].sum()),
        ("locked Full pages", a.M_FULL_LOCKED, pages[f[a.FULL_LOCKS, nodes] > 0].sum()),
        ("locked SWA pages", a.M_SWA_LOCKED, pages[live & (f[a.SWA_LOCKS, nodes] > 0)].sum()),
    ):
        _require(int(meta[counter]) == int(value), f"T8 {name}", f"{meta[counter]} != {value}")


def _check_tokens(tree: RadixTree, nodes: np.ndarray) -> None:
    f, page = tree.nodes, int(tree.meta[a.M_PAGE_SIZE])
    seen = set()
    for n in nodes.tolist():
        start = int(f[a.START, n]) * page
        edge = tree.tokens[start : start + int(f[a.PAGES, n]) * page]
        _require(bool((edge >= 0).all()), "T9 a stored token is negative", f"node {n}")
        filed = (int(f[a.PARENT, n]), int(f[a.HEAD, n]), edge[:page].tobytes())
        _require(filed not in seen, "T9 two children begin with the same page", f"node {n}")
        seen.add(filed)


def _check_spaces(tree: RadixTree, nodes: np.ndarray, roots: np.ndarray) -> None:
    f = tree.nodes
    met: set[int] = set()
    for root in roots.tolist():
        above, n = {root}, int(f[a.SPACE_NEXT, root])
        while n != root:
            _require(
                int(f[a.PARENT, n]) in above, "T10 a node comes before its parent", f"node {n}"
            )
            _require(n not in above, "T10 ring does not close", f"root {root}")
            above.add(n)
            n = int(f[a.SPACE_NEXT, n])
        for n in above:
            _require(int(f[a.SPACE_PREV, f[a.SPACE_NEXT, n]]) == n, "T10 links", f"node {n}")
        met |= above
    _require(met == {*nodes.tolist(), *roots.tolist()}, "T10 a node is in no ring")


def _check_windows(tree: RadixTree, nodes: np.ndarray) -> None:
    f = tree.nodes
    refs = np.zeros(f.shape[1], np.int64)
    ends = nodes[f[a.WIN_PAGES, nodes] != 0]
    for end in ends.tolist():
        n, left = end, int(f[a.WIN_PAGES, end])
        while left > 0 and f[a.PARENT, n] != 0:
            _require(f[a.LIVE, n] == 1, "T11 a window has lost a page", f"node {end}")
            refs[n] += 1
            left -= int(f[a.PAGES, n])
            n = int(f[a.PARENT, n])
        _require(left == 0, "T11 a window begins inside a node", f"node {end}")
    _require(bool((f[a.WIN_REFS, nodes] == refs[nodes]).all()), "T11 WIN_REFS")
    num = int(tree.meta[a.M_WINDOWS])
    heap = f[a.HEAP, 1 : num + 1]
    _require(sorted(heap.tolist()) == sorted(ends.tolist()), "T11 members of the heap")
    _require(bool((f[a.WIN_PLACE, heap] == np.arange(1, num + 1)).all()), "T11 WIN_PLACE")
    keys = [(int(f[a.WIN_KEY, n]), int(f[a.WIN_BORN, n])) for n in heap.tolist()]
    for i in range(1, num):
        _require(keys[(i + 1) // 2 - 1] < keys[i], "T11 order of the heap", f"place {i + 1}")
