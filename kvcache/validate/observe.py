"""What the manager's state is, from the tree's arrays and the device, in the oracle's words.

Everything is read raw (tree/arrays.py, pools.py) and put together here, so that a wrong sum or a
wrong link shows as a difference. This reads the device back: tests and `kvcache validate` only.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcache.oracle.state import RowState, State, TreePage, WindowState, require
from kvcache.tree import arrays as a

if TYPE_CHECKING:
    from kvcache.manager import KVCacheManager


class _Device(NamedTuple):
    """The device tensors as lists."""

    page_table: list[list[int]]
    slab: list[int]
    swa_map: list[int]
    full_stack: list[int]
    swa_stack: list[int]
    row_state: list[list[int]]
    tops: list[int]

    @classmethod
    def read(cls, manager: KVCacheManager) -> _Device:
        pools: Any = manager.pools
        return cls(*(getattr(pools, name).cpu().tolist() for name in cls._fields))


def touches_wait(manager: KVCacheManager) -> bool:
    """Whether matches wait to be worked into the recency order: until then it is not comparable."""
    return bool(manager.tree.meta[a.M_TOUCHES] > 0)


def observe(manager: KVCacheManager) -> State:
    """Return the manager's state. The recency orders lag behind while `touches_wait`."""
    device = _Device.read(manager)
    config = manager.config
    tree, full_order, swa_order = _Tree(manager, device).read()
    stats, room = manager.stats(), manager.capacity()
    full_free, swa_free = device.tops
    for name, stack, top in (
        ("Full", device.full_stack, full_free),
        ("SWA", device.swa_stack, swa_free),
    ):
        require(0 <= top <= len(stack), f"{name} stack: top {top} of {len(stack)}")
        free = stack[:top]
        require(len(set(free)) == top, f"{name} stack: a page is on it twice: {free}")
    rows = manager.rows
    counts = {
        name: int(getattr(stats, name))
        for name in (
            "full_pages_free",
            "swa_pages_free",
            "tree_full_pages",
            "tree_swa_pages",
            "locked_full_pages",
            "locked_swa_pages",
            "row_full_pages",
            "row_swa_pages",
            "running_rows",
            "evicted_full_pages",
            "evicted_swa_pages",
        )
    }
    require(
        (counts["full_pages_free"], counts["swa_pages_free"]) == (full_free, swa_free),
        f"free pages: the host says {counts}, the device {device.tops}",
    )
    counts["free_rows"] = int(room.rows)
    counts["full_capacity"], counts["swa_capacity"] = int(room.full_pages), int(room.swa_pages)
    running = {}
    lengths = (rows.computed_len, rows.allocated_len, rows.owned_len, rows.frontier)
    host = [x.tolist() for x in lengths]
    for row, active in enumerate(rows.active.tolist()):
        if not active:
            continue
        mine = [field[row] for field in host]
        device_lens = [field[row] for field in device.row_state]
        require(mine == device_lens, f"row {row}: host lengths {mine}, device {device_lens}")
        computed, allocated, owned, frontier = mine
        pages = device.page_table[row][: -(-allocated // config.page_size)]
        handle = int(rows.generation[row]) << 32 | row
        running[handle] = RowState(computed, allocated, owned, frontier, pages)
    require(not device.swa_map or device.swa_map[0] == 0, "the map of page 0 is 0")
    return State(
        tree=tree,
        full_order=full_order,
        swa_order=swa_order,
        windows=_windows(manager, device),
        tails=_tails(manager, device),
        learned=_learned(manager),
        free_full=frozenset(device.full_stack[:full_free]),
        free_swa=frozenset(device.swa_stack[:swa_free]),
        swa_map={full_id: swa_id for full_id, swa_id in enumerate(device.swa_map) if swa_id},
        rows=running,
        counts=counts,
    )


def _windows(manager: KVCacheManager, device: _Device) -> dict[int, WindowState]:
    f, windows = manager.tree.nodes, {}
    for n in f[a.HEAP, 1 : int(manager.tree.meta[a.M_WINDOWS]) + 1].tolist():
        pages: list[int] = []
        x = n
        while len(pages) < f[a.WIN_PAGES, n]:
            start = int(f[a.START, x])
            pages = device.slab[start : start + int(f[a.PAGES, x])] + pages
            x = int(f[a.PARENT, x])
        mask = int(f[a.WIN_MASK, n])
        windows[pages[-1]] = WindowState(
            pages,
            int(f[a.WIN_CLASS, n]),
            int(f[a.WIN_LAST, n]),
            int(f[a.WIN_USES, n]),
            int(f[a.WIN_PRIORITY, n]),
            int(f[a.WIN_GAP, n]),
            [kind for kind in range(31) if mask >> kind & 1],
            int(f[a.WIN_KEY, n]),
        )
    return windows


def _tails(manager: KVCacheManager, device: _Device) -> dict[int, tuple[int, int]]:
    f, tree = manager.tree.nodes, manager.tree
    found = {}
    for n in range(1, int(tree.meta[a.M_BUMP])):
        if f[a.SWA_LOCKS, n] >= 0 and f[a.PARENT, n] != 0:
            start = int(f[a.START, n])
            for full_id in device.slab[start : start + int(f[a.PAGES, n])]:
                found[full_id] = int(f[a.TAIL, n]), int(f[a.ANSWER_TAIL, n])
    return found


def _learned(manager: KVCacheManager) -> list[int]:
    meta = manager.tree.meta
    return [int(meta[first + kind]) for first in (a.M_HIT, a.M_MADE) for kind in range(24)]


class _Tree:
    """Expands nodes into pages."""

    def __init__(self, manager: KVCacheManager, device: _Device) -> None:
        tree = manager.tree
        self.page_size, self.bigram = manager.config.page_size, manager.config.bigram
        self.nodes: list[list[int]] = tree.nodes[:, : int(tree.meta[a.M_BUMP])].tolist()
        slots = int(tree.meta[a.M_SLAB_TOP])
        self.tokens: list[int] = tree.tokens[: slots * self.page_size].tolist()
        self.slab, self.swa_map = device.slab, device.swa_map

    def read(self) -> tuple[dict[int, TreePage], list[int], list[int]]:
        """Return (pages, Full order, SWA order), in the words of `State`."""
        nodes = self.nodes
        records = [n for n in range(1, len(nodes[0])) if nodes[a.SWA_LOCKS][n] >= 0]
        pages: dict[int, TreePage] = {}
        for n in records:
            if nodes[a.PARENT][n] != 0:
                self._expand(n, pages)
        full_order = [
            full_id for n in self._walk(a.FULL_PREV) for full_id in reversed(self._full_ids(n))
        ]
        swa_order = [full_id for n in self._walk(a.SWA_PREV) for full_id in self._full_ids(n)]
        return pages, full_order, swa_order

    def _full_ids(self, n: int) -> list[int]:
        start = self.nodes[a.START][n]
        return self.slab[start : start + self.nodes[a.PAGES][n]]

    def _walk(self, towards_recent: int) -> list[int]:
        """Nodes of a recency list, the least recent first."""
        order: list[int] = []
        n = self.nodes[towards_recent][a.NO_NODE]
        while n != a.NO_NODE:
            require(n > 0 and len(order) < len(self.nodes[0]), "a recency list is a ring through 0")
            order.append(n)
            n = self.nodes[towards_recent][n]
        return order

    def _expand(self, n: int, pages: dict[int, TreePage]) -> None:
        nodes, size = self.nodes, self.page_size
        parent = nodes[a.PARENT][n]
        above, before = 0, nodes[a.HEAD][n]
        if nodes[a.PARENT][parent] != 0:
            above = self._full_ids(parent)[-1]
            last_slot = nodes[a.START][parent] + nodes[a.PAGES][parent] - 1
            before = self.tokens[(last_slot + 1) * size - 1]
        root = parent
        while nodes[a.PARENT][root] != 0:
            root = nodes[a.PARENT][root]
        handle = nodes[a.GEN][root] << 32 | root
        first_slot = nodes[a.START][n]
        for i, full_id in enumerate(self._full_ids(n)):
            tokens = self.tokens[(first_slot + i) * size : (first_slot + i + 1) * size]
            units: tuple[object, ...] = tuple(tokens)
            if self.bigram:
                units = tuple(pairwise([before, *tokens]))
            swa_id = self.swa_map[full_id] if self.swa_map else 0
            live = nodes[a.LIVE][n] != 0
            require(live == (swa_id != 0), f"Full page {full_id}: LIVE is {live}, map is {swa_id}")
            require(full_id not in pages, f"Full page {full_id} is in two slots of the tree")
            pages[full_id] = TreePage(
                handle, above, units, swa_id, nodes[a.FULL_LOCKS][n], nodes[a.SWA_LOCKS][n]
            )
            above, before = full_id, tokens[-1]
