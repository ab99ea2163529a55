"""Give pages to a ragged batch of rows: pop Full and SWA pages in step, pair them, name them.

Source: SGLang v0.5.20, alloc_extend_kernel: one program a request, each summing the needs of all
earlier requests in one block, so that a variant is compiled for each power of two of the batch.
Here the host, which knows every count, sends the prefix sums, and one variant serves all sizes.
Reference: extend_twin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvcache.compiled import compiled
from kvcache.kernels import launch
from kvcache.kernels.layout import (
    ALLOCATED,
    EXTEND_FIELDS,
    EXTEND_FIRST_PAGE,
    EXTEND_NEW_ALLOCATED,
    EXTEND_NUM_PAGES,
    EXTEND_OFFSET,
    EXTEND_ROW,
    FULL,
    NUM_POOLS,
    ROW_FIELDS,
    SWA,
)

if TYPE_CHECKING:
    import triton.language as tl

# a chunk of 8192 tokens at 64 tokens a page is 128 pages: one block, four pages a lane of one warp
_BLOCK = 128


@launch.kernel(
    do_not_specialize=(
        "desc_ptr",
        "capacity",
        "pages_per_row",
        "max_rows",
        "full_top",
        "swa_top",
        "total",
    )
)
def _extend_kernel(
    desc_ptr,  # [5, capacity] int32, in; columns [0, num_programs(0)) are used
    page_table_ptr,  # [max_rows, pages_per_row] int32, out
    full_stack_ptr,  # [full_pages] int32, in
    swa_stack_ptr,  # [swa_pages] int32, in; not read unless HAS_SWA
    swa_map_ptr,  # [full_pages + 1] int32, out; not written unless HAS_SWA
    row_state_ptr,  # [4, max_rows] int32, out
    tops_ptr,  # [2] int32, out
    capacity,
    pages_per_row,
    max_rows,
    full_top,
    swa_top,
    total,
    HAS_SWA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (num_rows, programs). Program (i, k) does blocks k, k + programs, ... of column i."""
    column = tl.program_id(0)
    capacity = tl.cast(capacity, tl.int64)
    row = tl.load(desc_ptr + capacity * EXTEND_ROW + column)
    first_page = tl.load(desc_ptr + capacity * EXTEND_FIRST_PAGE + column)
    num_pages = tl.load(desc_ptr + capacity * EXTEND_NUM_PAGES + column)
    offset = tl.load(desc_ptr + capacity * EXTEND_OFFSET + column)
    cells_ptr = page_table_ptr + row.to(tl.int64) * pages_per_row + first_page
    done = tl.program_id(1) * BLOCK
    while done < num_pages:
        j = done + tl.arange(0, BLOCK)
        in_range = j < num_pages
        full_page = tl.load(full_stack_ptr + (full_top - 1 - offset - j), mask=in_range, other=0)
        tl.store(cells_ptr + j, full_page, mask=in_range)
        if HAS_SWA:
            swa_page = tl.load(swa_stack_ptr + (swa_top - 1 - offset - j), mask=in_range, other=0)
            tl.store(swa_map_ptr + full_page, swa_page, mask=in_range)
        done += tl.num_programs(1) * BLOCK
    if tl.program_id(1) == 0:
        new_allocated = tl.load(desc_ptr + capacity * EXTEND_NEW_ALLOCATED + column)
        tl.store(row_state_ptr + tl.cast(max_rows, tl.int64) * ALLOCATED + row, new_allocated)
        if column == 0:
            tl.store(tops_ptr + FULL, full_top - total)
            if HAS_SWA:
                tl.store(tops_ptr + SWA, swa_top - total)


@compiled
def extend_twin(
    desc: Any,
    page_table: Any,
    full_stack: Any,
    swa_stack: Any,
    swa_map: Any,
    row_state: Any,
    tops: Any,
    num_rows: int,
    full_top: int,
    swa_top: int,
    total: int,
    max_pages: int,
    has_swa: bool,
) -> None:
    """CPU twin of `extend` on int32 arrays; the specification. `max_pages` has no use here."""
    for i in range(num_rows):
        row = desc[EXTEND_ROW, i]
        first_page = desc[EXTEND_FIRST_PAGE, i]
        n = desc[EXTEND_NUM_PAGES, i]
        first_pop = desc[EXTEND_OFFSET, i]
        cells = page_table[row, first_page : first_page + n]
        # pop number g takes entry top - 1 - g
        popped = full_stack[full_top - first_pop - n : full_top - first_pop]
        for j in range(n):
            cells[j] = popped[n - 1 - j]
        if has_swa:
            popped = swa_stack[swa_top - first_pop - n : swa_top - first_pop]
            for j in range(n):
                swa_map[cells[j]] = popped[n - 1 - j]
        row_state[ALLOCATED, row] = desc[EXTEND_NEW_ALLOCATED, i]
    if num_rows > 0:
        tops[FULL] = full_top - total
        if has_swa:
            tops[SWA] = swa_top - total


def extend(
    desc: torch.Tensor,
    page_table: torch.Tensor,
    full_stack: torch.Tensor,
    swa_stack: torch.Tensor,
    swa_map: torch.Tensor,
    row_state: torch.Tensor,
    tops: torch.Tensor,
    *,
    num_rows: int,
    full_top: int,
    swa_top: int,
    total: int,
    max_pages: int,
    has_swa: bool,
) -> None:
    """Pop pages for a ragged batch of rows and pair every Full page with an SWA page. One launch.

    Column i of `desc` says: row ROW gets NUM_PAGES pages at [FIRST_PAGE, FIRST_PAGE + NUM_PAGES) of
    its page table, and holds NEW_ALLOCATED tokens after that. Pop g of the call (g = OFFSET + j for
    page j of column i) takes full_stack[full_top - 1 - g] and swa_stack[swa_top - 1 - g]. Does not
    synchronize with the host: the values in `desc` are the plan's and are not range-checked.
    num_rows 0 does nothing.

    Args:
        desc: [5, capacity] int32, fields as in layout.EXTEND_*; the first `num_rows` columns, rows
            distinct.
        page_table: [max_rows, pages_per_row] int32, Full page ids; written.
        full_stack: [full_pages] int32; entries [0, full_top) are the free Full pages.
        swa_stack: [swa_pages] int32; entries [0, swa_top) are the free SWA pages.
        swa_map: [full_pages + 1] int32, SWA page under each Full page, 0 = none; written. Length 0
            without SWA.
        row_state: [4, max_rows] int32; field ALLOCATED is written.
        tops: [2] int32, free entries of the stacks; written, never read.
        num_rows: columns of `desc` in use.
        full_top: free Full pages before the call.
        swa_top: free SWA pages before the call; ignored without SWA.
        total: pages popped from each stack: the sum of NUM_PAGES.
        max_pages: the largest NUM_PAGES; sizes the grid only.
        has_swa: whether there is an SWA pool. If not, swa_stack, swa_map and tops[SWA] are not
            touched.

    Raises:
        InvalidInputError: A tensor has a wrong rank, dtype, device, layout or length, or a count
            does not fit (num_rows in [0, capacity], total in [0, full_top] and [0, swa_top]).
    """
    launch.check_operands(
        ("desc", desc, 2),
        ("page_table", page_table, 2),
        ("full_stack", full_stack, 1),
        ("swa_stack", swa_stack, 1),
        ("swa_map", swa_map, 1),
        ("row_state", row_state, 2),
        ("tops", tops, 1),
    )
    fields, capacity = desc.shape
    max_rows, pages_per_row = page_table.shape
    launch.check_length("desc.shape[0]", fields, EXTEND_FIELDS)
    launch.check_length("row_state.numel()", row_state.numel(), ROW_FIELDS * max_rows)
    launch.check_length("tops.shape[0]", tops.shape[0], NUM_POOLS)
    launch.check_range("num_rows", num_rows, 0, capacity)
    launch.check_range("full_top", full_top, 0, full_stack.shape[0])
    launch.check_range("total", total, 0, full_top)
    if has_swa:
        launch.check_length("swa_map.shape[0]", swa_map.shape[0], full_stack.shape[0] + 1)
        launch.check_range("swa_top", swa_top, total, swa_stack.shape[0])
    if num_rows == 0:
        return
    if launch.takes_kernel(page_table):
        grid = (int(num_rows), launch.range_programs(max_pages, _BLOCK))
        _extend_kernel[grid](
            desc,
            page_table,
            full_stack,
            swa_stack,
            swa_map,
            row_state,
            tops,
            int(capacity),
            int(pages_per_row),
            int(max_rows),
            int(full_top),
            int(swa_top),
            int(total),
            HAS_SWA=bool(has_swa),
            BLOCK=_BLOCK,
            num_warps=1,
        )
    else:
        extend_twin(
            desc.numpy(),
            page_table.numpy(),
            full_stack.numpy(),
            swa_stack.numpy(),
            swa_map.numpy(),
            row_state.numpy(),
            tops.numpy(),
            num_rows,
            full_top,
            swa_top,
            total,
            max_pages,
            has_swa,
        )
