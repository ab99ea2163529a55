"""One more token for every running row, a page pair only where a page begins. One launch.

Source: SGLang v0.5.20, alloc_decode_kernel: one program a request, each summing the needs of all
earlier ones. Here one program walks the rows in blocks and carries the count, so that any number of
rows is one launch of one variant, and the page a row gets depends on the order of the list alone.
Reference: step_twin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvcache.compiled import compiled
from kvcache.kernels import launch
from kvcache.kernels.layout import ALLOCATED, COMPUTED, FULL, NUM_POOLS, ROW_FIELDS, SWA

if TYPE_CHECKING:
    import triton.language as tl

# one row a thread of 8 warps; a usual running batch is one block
_BLOCK = 256


@launch.kernel(do_not_specialize=("rows_ptr", "num_rows", "pages_per_row", "max_rows"))
def _step_kernel(
    rows_ptr,  # [num_rows] int32, in; distinct
    page_table_ptr,  # [max_rows, pages_per_row] int32, out
    full_stack_ptr,  # [full_pages] int32, in
    swa_stack_ptr,  # [swa_pages] int32, in; not read unless HAS_SWA
    swa_map_ptr,  # [full_pages + 1] int32, out; not written unless HAS_SWA
    row_state_ptr,  # [4, max_rows] int32, in and out
    tops_ptr,  # [2] int32, in and out
    num_rows,
    pages_per_row,
    max_rows,
    P: tl.constexpr,
    HAS_SWA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (1,). The program walks the rows in blocks of BLOCK and carries the number of pops."""
    full_top = tl.load(tops_ptr + FULL)
    swa_top = tl.load(tops_ptr + SWA)
    state_stride = tl.cast(max_rows, tl.int64)
    num_pops = num_rows * 0
    start = num_rows * 0
    while start < num_rows:
        offs = start + tl.arange(0, BLOCK)
        in_range = offs < num_rows
        row = tl.load(rows_ptr + offs, mask=in_range, other=0)
        computed = tl.load(row_state_ptr + state_stride * COMPUTED + row, mask=in_range, other=0)
        allocated = tl.load(row_state_ptr + state_stride * ALLOCATED + row, mask=in_range, other=0)
        new_len = computed + 1
        grows = in_range & (new_len > allocated)
        # ceil(new_len / P) - 1: the page that holds the new token
        page = computed // P
        needs_page = grows & (page * P >= allocated)
        count = needs_page.to(tl.int32)
        pop = num_pops + tl.cumsum(count, axis=0) - count
        full_page = tl.load(full_stack_ptr + (full_top - 1 - pop), mask=needs_page, other=0)
        cell_ptr = page_table_ptr + row.to(tl.int64) * pages_per_row + page
        tl.store(cell_ptr, full_page, mask=needs_page)
        if HAS_SWA:
            swa_page = tl.load(swa_stack_ptr + (swa_top - 1 - pop), mask=needs_page, other=0)
            tl.store(swa_map_ptr + full_page, swa_page, mask=needs_page)
        tl.store(row_state_ptr + state_stride * ALLOCATED + row, new_len, mask=grows)
        num_pops += tl.sum(count, axis=0)
        start += BLOCK
    # every warp has read the tops before one of them writes
    tl.debug_barrier()
    tl.store(tops_ptr + FULL, full_top - num_pops)
    if HAS_SWA:
        tl.store(tops_ptr + SWA, swa_top - num_pops)


@compiled
def step_twin(
    rows: Any,
    page_table: Any,
    full_stack: Any,
    swa_stack: Any,
    swa_map: Any,
    row_state: Any,
    tops: Any,
    num_rows: int,
    page_size: int,
    has_swa: bool,
) -> None:
    """CPU twin of `step` on int32 arrays; the specification."""
    for i in range(num_rows):
        row = rows[i]
        allocated = row_state[ALLOCATED, row]
        new_len = row_state[COMPUTED, row] + 1
        if new_len <= allocated:
            continue
        num_pages = (new_len + page_size - 1) // page_size
        if num_pages > (allocated + page_size - 1) // page_size:
            tops[FULL] -= 1
            full_page = full_stack[tops[FULL]]
            page_table[row, num_pages - 1] = full_page
            if has_swa:
                tops[SWA] -= 1
                swa_map[full_page] = swa_stack[tops[SWA]]
        row_state[ALLOCATED, row] = new_len


def step(
    rows: torch.Tensor,
    page_table: torch.Tensor,
    full_stack: torch.Tensor,
    swa_stack: torch.Tensor,
    swa_map: torch.Tensor,
    row_state: torch.Tensor,
    tops: torch.Tensor,
    *,
    num_rows: int,
    page_size: int,
    has_swa: bool,
) -> None:
    """Make room for one more token than each row has computed. One launch for any number of rows.

    Row by row in the order of `rows`: new = computed + 1; if new > allocated, allocated = new, and
    if that token begins a page, one Full page and one SWA page are popped and paired, and the Full
    page enters the row's page table. Does not synchronize with the host: rows are not
    range-checked, and the caller has made sure that the stacks hold enough pages. num_rows 0 does
    nothing.

    With P = 4:  computed 7, allocated 7 -> allocated 8, no page (page 1 is held)
                 computed 8, allocated 8 -> allocated 9, page 2 popped
                 computed 6, allocated 8 -> nothing

    Args:
        rows: [capacity] int32, row ids; the first `num_rows` are used and are distinct.
        page_table: [max_rows, pages_per_row] int32, Full page ids; written.
        full_stack: [full_pages] int32, free Full pages.
        swa_stack: [swa_pages] int32, free SWA pages.
        swa_map: [full_pages + 1] int32, SWA page under each Full page, 0 = none; written. Length 0
            without SWA.
        row_state: [4, max_rows] int32; COMPUTED is read, ALLOCATED read and written.
        tops: [2] int32, free entries of the stacks; read and written.
        num_rows: rows in use.
        page_size: tokens per page, >= 1.
        has_swa: whether there is an SWA pool. If not, swa_stack, swa_map and tops[SWA] are not
            touched.

    Raises:
        InvalidInputError: A tensor has a wrong rank, dtype, device, layout or length, num_rows is
            not in [0, capacity], or page_size < 1.
    """
    launch.check_operands(
        ("rows", rows, 1),
        ("page_table", page_table, 2),
        ("full_stack", full_stack, 1),
        ("swa_stack", swa_stack, 1),
        ("swa_map", swa_map, 1),
        ("row_state", row_state, 2),
        ("tops", tops, 1),
    )
    max_rows, pages_per_row = page_table.shape
    launch.check_length("row_state.numel()", row_state.numel(), ROW_FIELDS * max_rows)
    launch.check_length("tops.shape[0]", tops.shape[0], NUM_POOLS)
    launch.check_range("num_rows", num_rows, 0, rows.shape[0])
    launch.check_page_size(page_size)
    if has_swa:
        launch.check_length("swa_map.shape[0]", swa_map.shape[0], full_stack.shape[0] + 1)
    if num_rows == 0:
        return
    if launch.takes_kernel(page_table):
        _step_kernel[(1,)](
            rows,
            page_table,
            full_stack,
            swa_stack,
            swa_map,
            row_state,
            tops,
            int(num_rows),
            int(pages_per_row),
            int(max_rows),
            P=int(page_size),
            HAS_SWA=bool(has_swa),
            BLOCK=_BLOCK,
            num_warps=8,
        )
    else:
        step_twin(
            rows.numpy(),
            page_table.numpy(),
            full_stack.numpy(),
            swa_stack.numpy(),
            swa_map.numpy(),
            row_state.numpy(),
            tops.numpy(),
            num_rows,
            page_size,
            has_swa,
        )
