"""Execute one phase of a plan in one launch: page ranges bound, stored, adopted, freed, dropped.

Source: none; SGLang v0.5.20 moves the same pages with an indexing, concatenation or free call per
request and node. Here the host plans ranges whose order does not matter and says where each push
goes, so that a phase is one launch whatever the batch.
Reference: apply_twin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvcache.compiled import compiled
from kvcache.kernels import launch
from kvcache.kernels.layout import (
    ADOPT,
    ALLOCATED,
    APPLY_FIELDS,
    APPLY_FULL_POS,
    APPLY_N,
    APPLY_OP,
    APPLY_PAGE,
    APPLY_ROW,
    APPLY_SLOT,
    APPLY_SWA_POS,
    BIND,
    COMPUTED,
    DROP_ROW,
    DROP_SLOT,
    FREE_ROW,
    FREE_SLOT,
    FRONTIER,
    FULL,
    NUM_POOLS,
    OWNED,
    ROW_FIELDS,
    SET_ROW,
    STORE,
    SWA,
)

if TYPE_CHECKING:
    import triton.language as tl

# most ranges are a few pages, a chunk of 8192 tokens at 64 a page is 128: one warp, four pages a
# lane
_BLOCK = 128


@launch.kernel(
    do_not_specialize=(
        "desc_ptr",
        "capacity",
        "start",
        "pages_per_row",
        "max_rows",
        "full_top",
        "swa_top",
    )
)
def _apply_kernel(
    desc_ptr,  # [7, capacity] int32, in; columns [start, start + num_programs(0)) are used
    page_table_ptr,  # [max_rows, pages_per_row] int32, in and out
    slab_ptr,  # [slab_slots] int32, in and out
    swa_map_ptr,  # [full_pages + 1] int32, in and out; not touched without SWA pages
    full_stack_ptr,  # [full_pages] int32, out
    swa_stack_ptr,  # [swa_pages] int32, out
    row_state_ptr,  # [4, max_rows] int32, out
    tops_ptr,  # [2] int32, out
    capacity,
    start,
    pages_per_row,
    max_rows,
    full_top,  # free entries after the phase
    swa_top,
    BLOCK: tl.constexpr,
):
    """Grid: (num, programs). Program (i, k) does blocks k, k + programs, ... of one column."""
    column_ptr = desc_ptr + start + tl.program_id(0)
    capacity = tl.cast(capacity, tl.int64)
    op = tl.load(column_ptr + capacity * APPLY_OP)
    n = tl.load(column_ptr + capacity * APPLY_N)
    row = tl.load(column_ptr + capacity * APPLY_ROW)
    page = tl.load(column_ptr + capacity * APPLY_PAGE)
    slot = tl.load(column_ptr + capacity * APPLY_SLOT)
    full_pos = tl.load(column_ptr + capacity * APPLY_FULL_POS)
    swa_pos = tl.load(column_ptr + capacity * APPLY_SWA_POS)

    # what the op does, as ends of page ranges: i < end is then the mask of a load or store
    num_pages = tl.where(op == SET_ROW, 0, n)
    frees = (op == FREE_ROW) | (op == FREE_SLOT)
    drops = (op == DROP_ROW) | (op == DROP_SLOT)
    pushes_swa = (frees | drops) & (swa_pos >= 0)
    reads_row = (op == STORE) | (op == ADOPT) | (op == FREE_ROW) | (op == DROP_ROW)
    reads_slot = (op == BIND) | (op == ADOPT) | (op == FREE_SLOT) | (op == DROP_SLOT)
    row_end = tl.where(reads_row, num_pages, 0)
    slot_end = tl.where(reads_slot, num_pages, 0)
    bind_end = tl.where(op == BIND, num_pages, 0)
    store_end = tl.where(op == STORE, num_pages, 0)
    adopt_end = tl.where(op == ADOPT, num_pages, 0)
    swa_push_end = tl.where(pushes_swa, num_pages, 0)
    full_push_end = tl.where(frees, num_pages, adopt_end)
    clear_end = tl.maximum(swa_push_end, adopt_end)

    cells_ptr = page_table_ptr + row.to(tl.int64) * pages_per_row + page
    done = tl.program_id(1) * BLOCK
    while done < num_pages:
        i = done + tl.arange(0, BLOCK)
        row_page = tl.load(cells_ptr + i, mask=i < row_end, other=0)
        slot_page = tl.load(slab_ptr + slot + i, mask=i < slot_end, other=0)
        tl.store(cells_ptr + i, slot_page, mask=i < bind_end)
        tl.store(slab_ptr + slot + i, row_page, mask=i < store_end)
        leaving = tl.where(i < row_end, row_page, slot_page)
        swa_page = tl.load(swa_map_ptr + leaving, mask=i < clear_end, other=0)
        # the thread that clears an entry need not be the one that read it
        tl.debug_barrier()
        tl.store(swa_map_ptr + slot_page, swa_page, mask=i < adopt_end)
        tl.store(swa_map_ptr + leaving, tl.zeros_like(swa_page), mask=i < clear_end)
        tl.store(swa_stack_ptr + swa_pos + i, swa_page, mask=i < swa_push_end)
        tl.store(full_stack_ptr + full_pos + i, leaving, mask=i < full_push_end)
        done += tl.num_programs(1) * BLOCK

    if tl.program_id(1) == 0:
        if op == SET_ROW:
            state_ptr = row_state_ptr + row
            state_stride = tl.cast(max_rows, tl.int64)
            tl.store(state_ptr + state_stride * COMPUTED, n)
            tl.store(state_ptr + state_stride * ALLOCATED, page)
            tl.store(state_ptr + state_stride * OWNED, slot)
            tl.store(state_ptr + state_stride * FRONTIER, full_pos)
        if tl.program_id(0) == 0:
            tl.store(tops_ptr + FULL, full_top)
            tl.store(tops_ptr + SWA, swa_top)


@compiled
def apply_twin(
    desc: Any,
    page_table: Any,
    slab: Any,
    swa_map: Any,
    full_stack: Any,
    swa_stack: Any,
    row_state: Any,
    tops: Any,
    start: int,
    num: int,
    max_pages: int,
    full_top: int,
    swa_top: int,
) -> None:
    """CPU twin of `apply` on int32 arrays; the specification. `max_pages` has no use here."""
    for column in range(start, start + num):
        op = desc[APPLY_OP, column]
        n = desc[APPLY_N, column]
        row = desc[APPLY_ROW, column]
        page = desc[APPLY_PAGE, column]
        slot = desc[APPLY_SLOT, column]
        full_pos = desc[APPLY_FULL_POS, column]
        swa_pos = desc[APPLY_SWA_POS, column]
        if op == SET_ROW:
            row_state[COMPUTED, row] = n
            row_state[ALLOCATED, row] = page
            row_state[OWNED, row] = slot
            row_state[FRONTIER, row] = full_pos
        else:
            cells = page_table[row, page : page + n]
            entries = slab[slot : slot + n]
            if op == BIND:
                for i in range(n):
                    cells[i] = entries[i]
            elif op == STORE:
                for i in range(n):
                    entries[i] = cells[i]
            elif op == ADOPT:
                pushed = full_stack[full_pos : full_pos + n]
                for i in range(n):
                    pushed[i] = cells[i]
                    swa_map[entries[i]] = swa_map[cells[i]]
                    swa_map[cells[i]] = 0
            else:
                leaving = cells if op in (FREE_ROW, DROP_ROW) else entries
                if op in (FREE_ROW, FREE_SLOT):
                    pushed = full_stack[full_pos : full_pos + n]
                    for i in range(n):
                        pushed[i] = leaving[i]
                if swa_pos >= 0:
                    pushed = swa_stack[swa_pos : swa_pos + n]
                    for i in range(n):
                        pushed[i] = swa_map[leaving[i]]
                        swa_map[leaving[i]] = 0
    if num > 0:
        tops[FULL] = full_top
        tops[SWA] = swa_top


def apply(
    desc: torch.Tensor,
    page_table: torch.Tensor,
    slab: torch.Tensor,
    swa_map: torch.Tensor,
    full_stack: torch.Tensor,
    swa_stack: torch.Tensor,
    row_state: torch.Tensor,
    tops: torch.Tensor,
    *,
    start: int,
    num: int,
    max_pages: int,
    full_top: int,
    swa_top: int,
) -> None:
    """Execute columns [start, start + num) of a plan, in any order, in one launch.

    A column is (OP, N, ROW, PAGE, SLOT, FULL_POS, SWA_POS). For i in [0, N), with cell =
    page_table[ROW, PAGE + i], entry = slab[SLOT + i]:

        BIND       cell = entry
        STORE      entry = cell
        ADOPT      the SWA page under Full page `cell` moves under `entry`; `cell` is freed
        FREE_ROW   Full page `cell` is freed, and its SWA page if SWA_POS >= 0
        FREE_SLOT  Full page `entry` is freed, and its SWA page if SWA_POS >= 0
        DROP_ROW   only the SWA page under `cell` is freed
        DROP_SLOT  only the SWA page under `entry` is freed
        SET_ROW    no pages: the row's (computed, allocated, owned, frontier) become
                   (N, PAGE, SLOT, FULL_POS)

    Freeing writes full_stack[FULL_POS + i] and swa_stack[SWA_POS + i] and clears the map entry; a
    SWA_POS below 0 says that no page of the range has SWA. No two columns of a call may touch the
    same thing with one of them writing. Does not synchronize with the host: the plan's values are
    not range-checked. num 0 does nothing.

    Args:
        desc: [7, capacity] int32, fields as in layout.APPLY_*.
        page_table: [max_rows, pages_per_row] int32, Full page ids of each row.
        slab: [slab_slots] int32, Full page id of every tree slot.
        swa_map: [full_pages + 1] int32, SWA page under each Full page, 0 = none. Length 0 without
            SWA.
        full_stack: [full_pages] int32, free Full pages; pushed to.
        swa_stack: [swa_pages] int32, free SWA pages; pushed to.
        row_state: [4, max_rows] int32; written by SET_ROW.
        tops: [2] int32, free entries of the stacks; written, never read.
        start: first column.
        num: number of columns.
        max_pages: the largest N of these columns (SET_ROW aside); sizes the grid only.
        full_top: free Full pages after the call.
        swa_top: free SWA pages after the call.

    Raises:
        InvalidInputError: A tensor has a wrong rank, dtype, device, layout or length, or the
            columns or the tops do not fit (start + num in [0, capacity], a top in [0, length of its
            stack]).
    """
    launch.check_operands(
        ("desc", desc, 2),
        ("page_table", page_table, 2),
        ("slab", slab, 1),
        ("swa_map", swa_map, 1),
        ("full_stack", full_stack, 1),
        ("swa_stack", swa_stack, 1),
        ("row_state", row_state, 2),
        ("tops", tops, 1),
    )
    fields, capacity = desc.shape
    max_rows, pages_per_row = page_table.shape
    launch.check_length("desc.shape[0]", fields, APPLY_FIELDS)
    launch.check_length("row_state.numel()", row_state.numel(), ROW_FIELDS * max_rows)
    launch.check_length("tops.shape[0]", tops.shape[0], NUM_POOLS)
    launch.check_range("start", start, 0, capacity)
    launch.check_range("num", num, 0, capacity - start)
    launch.check_range("full_top", full_top, 0, full_stack.shape[0])
    launch.check_range("swa_top", swa_top, 0, swa_stack.shape[0])
    if num == 0:
        return
    if launch.takes_kernel(page_table):
        grid = (int(num), launch.range_programs(max_pages, _BLOCK))
        _apply_kernel[grid](
            desc,
            page_table,
            slab,
            swa_map,
            full_stack,
            swa_stack,
            row_state,
            tops,
            int(capacity),
            int(start),
            int(pages_per_row),
            int(max_rows),
            int(full_top),
            int(swa_top),
            BLOCK=_BLOCK,
            num_warps=1,
        )
    else:
        apply_twin(
            desc.numpy(),
            page_table.numpy(),
            slab.numpy(),
            swa_map.numpy(),
            full_stack.numpy(),
            swa_stack.numpy(),
            row_state.numpy(),
            tops.numpy(),
            start,
            num,
            max_pages,
            full_top,
            swa_top,
        )
