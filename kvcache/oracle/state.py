"""What manager and oracle must agree on after every call, and the rules that it always obeys."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from kvcache.errors import IntegrityError


class TreePage(NamedTuple):
    """One page that the tree owns; the key of `State.tree` is its Full page id."""

    namespace: int
    parent: int  # Full page above it, 0 below a root
    units: tuple[object, ...]  # its tokens, or its pairs of tokens with bigram keys
    swa_id: int  # 0: tombstone
    full_locks: int
    swa_locks: int


class RowState(NamedTuple):
    """One running row. Lengths in tokens."""

    computed: int
    allocated: int
    owned: int
    frontier: int
    pages: list[int]  # Full pages by position: the tree's in [0, owned), then its own


class WindowState(NamedTuple):
    """One kept window; the key of `State.windows` is the Full page at which it ends."""

    pages: list[int]  # Full pages
    kind: int
    last: int
    uses: int
    priority: int
    gap: int
    inherited: list[int]
    key: int


class State(NamedTuple):
    """A snapshot. Page ids are those of the device; a list is in order, all else is a set."""

    tree: dict[int, TreePage]
    full_order: list[int]  # Full pages of the tree without a Full lock, first to go first
    swa_order: list[int]  # Full pages of live tree pages that nothing keeps, first to go first
    windows: dict[int, WindowState]
    tails: dict[
        int, tuple[int, int]
    ]  # Full page -> ends of the last prompt and answer through it, pages
    learned: list[int]  # hits and windows made, by class
    free_full: frozenset[int]
    free_swa: frozenset[int]
    swa_map: dict[int, int]  # Full page -> SWA page, live entries only
    rows: dict[int, RowState]
    counts: dict[str, int]  # as in Stats and Capacity


def require(holds: bool, rule: str) -> None:
    """Raise IntegrityError unless the rule holds."""
    if not holds:
        raise IntegrityError(rule)


def _partition(name: str, every: frozenset[int], *owners: list[int]) -> None:
    held = [page for owner in owners for page in owner]
    twice = [page for page, times in Counter(held).items() if times > 1]
    require(not twice, f"{name} pages with two owners: {twice}")
    require(set(held) <= every, f"{name} pages that do not exist: {sorted(set(held) - every)}")
    require(set(held) == every, f"{name} pages that nobody owns: {sorted(every - set(held))}")


def check_rules(
    state: State, all_full: frozenset[int], all_swa: frozenset[int], page_size: int
) -> None:
    """Raise IntegrityError unless design.md section 4 holds: owners, map, frontier, locks."""
    own = {row: [*range(s.owned // page_size, len(s.pages))] for row, s in state.rows.items()}
    own_full = [state.rows[row].pages[i] for row, places in own.items() for i in places]
    _partition("Full", all_full, [*state.free_full], [*state.tree], own_full)
    tree_swa = [page.swa_id for page in state.tree.values() if page.swa_id]
    own_swa = [state.swa_map[full_id] for full_id in own_full if full_id in state.swa_map]
    _partition("SWA", all_swa, [*state.free_swa], tree_swa, own_swa)
    require(not state.free_full & set(state.swa_map), "a free Full page has no map entry")
    for full_id, page in state.tree.items():
        require(state.swa_map.get(full_id, 0) == page.swa_id, f"map of tree page {full_id}")
        require(page.swa_locks <= page.full_locks, f"page {full_id}: SWA locks <= Full locks")
        require(page.swa_locks == 0 or page.swa_id != 0, f"page {full_id}: locked, so live")
        if page.parent:
            require(page.parent in state.tree, f"page {full_id} hangs below a tree page")
            above = state.tree[page.parent]
            require(above.namespace == page.namespace, f"page {full_id}: its namespace")
            require(above.full_locks >= page.full_locks, f"page {full_id}: locks of a path")
    for row, s in state.rows.items():
        require(s.computed <= s.allocated, f"row {row}: computed <= allocated")
        require(s.owned % page_size == 0 and s.frontier % page_size == 0, f"row {row}: whole pages")
        require(len(s.pages) * page_size < s.allocated + page_size, f"row {row}: no page too many")
        require(len(s.pages) * page_size >= s.allocated, f"row {row}: a page for each token")
        chain = s.pages[: s.owned // page_size]
        for above_id, full_id in zip([0, *chain], chain, strict=False):
            require(full_id in state.tree, f"row {row}: names a page that the tree does not own")
            require(state.tree[full_id].parent == above_id, f"row {row}: names a path of the tree")
        if all_swa:
            for i in own[row]:
                live = s.pages[i] in state.swa_map
                require(live == (i * page_size >= s.frontier), f"row {row}: SWA at page {i}")
    require(
        sorted(state.full_order) == sorted(f for f, p in state.tree.items() if p.full_locks == 0),
        "every page without a Full lock is in the Full recency order",
    )
    kept = {full_id for window in state.windows.values() for full_id in window.pages}
    require(
        sorted(state.swa_order)
        == sorted(
            f for f, p in state.tree.items() if p.swa_id and not p.swa_locks and f not in kept
        ),
        "every live page that no SWA lock and no window keeps is in the SWA recency order",
    )
