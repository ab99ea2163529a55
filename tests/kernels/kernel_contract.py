"""The contract of every kernel, restated in plain Python on stacks and sets of pages.

Shares no code with the twins: free stacks are Python lists that are popped and appended to, and the pages
that leave are found page by page from their token range. Slow, and only for tests.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from kernel_cases import Array, Case

# fields and op codes as numbers, on purpose: a change in layout.py must be noticed here
COMPUTED, ALLOCATED, OWNED, FRONTIER = range(4)
BIND, STORE, ADOPT, FREE_ROW, FREE_SLOT, DROP_ROW, DROP_SLOT, SET_ROW = range(8)


def expected(case: Case) -> dict[str, Array]:
    """Return what all arrays of `case` must hold after the call."""
    arrays = {name: array.copy() for name, array in case.arrays.items() if array is not None}
    globals()[f"_{case.op}"](arrays, **case.scalars)
    return arrays


def _extend(
    a: dict[str, Array],
    num_rows: int,
    full_top: int,
    swa_top: int,
    total: int,
    max_pages: int,
    has_swa: bool,
) -> None:
    free_full = a["full_stack"][:full_top].tolist()
    free_swa = a["swa_stack"][:swa_top].tolist()
    columns = a["desc"].T.tolist()
    for row, first_page, num_pages, offset, new_allocated in columns[:num_rows]:
        assert offset == full_top - len(free_full), "the case's offsets are no prefix sum"
        for page in range(first_page, first_page + num_pages):
            full_page = free_full.pop()
            a["page_table"][row, page] = full_page
            if has_swa:
                a["swa_map"][full_page] = free_swa.pop()
        a["row_state"][ALLOCATED, row] = new_allocated
    assert len(free_full) == full_top - total, "the case's total is wrong"
    if num_rows:
        a["tops"][0] = len(free_full)
        if has_swa:
            a["tops"][1] = len(free_swa)


def _step(a: dict[str, Array], num_rows: int, page_size: int, has_swa: bool) -> None:
    free_full = a["full_stack"][: a["tops"][0]].tolist()
    free_swa = a["swa_stack"][: a["tops"][1]].tolist()
    for row in a["rows"][:num_rows].tolist():
        allocated = int(a["row_state"][ALLOCATED, row])
        new = int(a["row_state"][COMPUTED, row]) + 1
        if new > allocated:
            held, needed = math.ceil(allocated / page_size), math.ceil(new / page_size)
            if needed > held:
                full_page = free_full.pop()
                a["page_table"][row, needed - 1] = full_page
                if has_swa:
                    a["swa_map"][full_page] = free_swa.pop()
            a["row_state"][ALLOCATED, row] = new
    a["tops"][:] = len(free_full), len(free_swa)


def _advance(a: dict[str, Array], num_rows: int) -> None:
    for i, row in enumerate(a["rows"][:num_rows].tolist()):
        new = a["lens"][i] if "lens" in a else a["row_state"][ALLOCATED, row]
        a["row_state"][COMPUTED, row] = new


def _slide(a: dict[str, Array], num_rows: int, page_size: int, keep: int, bigram: bool) -> None:
    pushed: list[int] = []
    for row in a["rows"][:num_rows].tolist():
        computed, _, owned, old = a["row_state"][:, row].tolist()
        units = max(0, computed - 1) if bigram else computed
        # the key may come again without its last unit
        end = math.floor(max(0, units - 1) / page_size) * page_size
        new = max(old, math.floor(max(0, end - keep) / page_size) * page_size)
        for page in range(math.ceil(computed / page_size)):
            first, last = page * page_size, (page + 1) * page_size - 1
            if first >= owned and first >= old and last < new:
                full_page = a["page_table"][row, page]
                pushed.append(int(a["swa_map"][full_page]))
                a["swa_map"][full_page] = 0
        a["row_state"][FRONTIER, row] = new
    top = int(a["tops"][1])
    a["swa_stack"][top : top + len(pushed)] = pushed
    a["tops"][1] = top + len(pushed)


def _apply(
    a: dict[str, Array], start: int, num: int, max_pages: int, full_top: int, swa_top: int
) -> None:
    columns = a["desc"].T.tolist()
    for op, n, row, page, slot, full_pos, swa_pos in columns[start : start + num]:
        if op == SET_ROW:
            a["row_state"][:, row] = n, page, slot, full_pos
            continue
        cells = a["page_table"][row, page : page + n]
        entries = a["slab"][slot : slot + n]
        if op == BIND:
            cells[:] = entries
        elif op == STORE:
            entries[:] = cells
        elif op == ADOPT:
            for i, (old, new) in enumerate(zip(cells, entries, strict=True)):
                a["swa_map"][new], a["swa_map"][old] = a["swa_map"][old], 0
                a["full_stack"][full_pos + i] = old
        else:
            leaving = cells if op in (FREE_ROW, DROP_ROW) else entries
            if op in (FREE_ROW, FREE_SLOT):
                a["full_stack"][full_pos : full_pos + n] = leaving
            if swa_pos >= 0:
                a["swa_stack"][swa_pos : swa_pos + n] = a["swa_map"][leaving]
                a["swa_map"][leaving] = 0
    if num:
        a["tops"][:] = full_top, swa_top


def _translate(a: dict[str, Array], page_size: int) -> None:
    swa_map = a["swa_map"]

    def one(slot: int) -> int:
        page, offset = divmod(slot, page_size)
        has_swa = page > 0 and swa_map[page] > 0
        return int(swa_map[page]) * page_size + offset if has_swa else 0

    out: Any = a["out"]
    for index in np.ndindex(out.shape):
        out[index] = one(int(a["slots"][index]))
