"""`step` for a captured graph: the number of rows is on the device, and lack of pages is an error word.

Source: none; SGLang v0.5.20 allocates a decode step's tokens outside of its graph.
Reference: decode_step_twin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvcache.compiled import compiled
from kvcache.kernels import launch
from kvcache.kernels.layout import (
    ALLOCATED,
    COMPUTED,
    ERROR_CODE,
    ERROR_FIELDS,
    ERROR_ROW,
    FULL,
    NO_ERROR,
    NO_PAGE,
    NUM_POOLS,
    ROW_FIELDS,
    ROW_FULL,
    SWA,
)

if TYPE_CHECKING:
    import triton.language as tl

# one row a thread of 8 warps; a usual running batch is one block
_BLOCK = 256


@launch.kernel(
    do_not_specialize=("rows_ptr", "num_rows_ptr", "error_ptr", "pages_per_row", "max_rows")
)
def _decode_step_kernel(
    rows_ptr,  # [max_rows] int32, in; the first num_rows are used, distinct
    num_rows_ptr,  # [1] int32, in
    page_table_ptr,  # [max_rows, pages_per_row] int32, out
    full_stack_ptr,  # [full_pages] int32, in
    swa_stack_ptr,  # [swa_pages] int32, in; not read unless HAS_SWA
    swa_map_ptr,  # [full_pages + 1] int32, out; not written unless HAS_SWA
    row_state_ptr,  # [4, max_rows] int32, in and out
    tops_ptr,  # [2] int32, in and out
    error_ptr,  # [2] int32, in and out
    pages_per_row,
    max_rows,
    P: tl.constexpr,
    HAS_SWA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (1,). The program walks the rows in blocks, carries the pops, and ends at the first fault."""
    full_top = tl.load(tops_ptr + FULL)
    swa_top = tl.load(tops_ptr + SWA)
    num_free = full_top
    if HAS_SWA:
        num_free = tl.minimum(full_top, swa_top)
    num_rows = tl.load(num_rows_ptr)
    end = tl.where(tl.load(error_ptr + ERROR_CODE) == NO_ERROR, num_rows, 0)
    code = end * 0
    fault_row = end * 0
    state_stride = tl.cast(max_rows, tl.int64)
    num_pops = end * 0
    start = end * 0
    while start < end:
        offs = start + tl.arange(0, BLOCK)
        in_range = offs < end
        row = tl.load(rows_ptr + offs, mask=in_range, other=0)
        computed = tl.load(row_state_ptr + state_stride * COMPUTED + row, mask=in_range, other=0)
        allocated = tl.load(row_state_ptr + state_stride * ALLOCATED + row, mask=in_range, other=0)
        new_len = computed + 1
        grows = in_range & (new_len > allocated)
        page = computed // P
        needs_page = grows & (page * P >= allocated)
        count = needs_page.to(tl.int32)
        pop = num_pops + tl.cumsum(count, axis=0) - count
        is_full = needs_page & (page >= pages_per_row)
        is_fault = is_full | (needs_page & (pop >= num_free))
        # rows are served in order: what is before the first fault is as if it had not been
        fault = tl.min(tl.where(is_fault, offs, end), axis=0)
        served = offs < fault
        takes_page = needs_page & served
        full_page = tl.load(full_stack_ptr + (full_top - 1 - pop), mask=takes_page, other=0)
        cell_ptr = page_table_ptr + row.to(tl.int64) * pages_per_row + page
        tl.store(cell_ptr, full_page, mask=takes_page)
        if HAS_SWA:
            swa_page = tl.load(swa_stack_ptr + (swa_top - 1 - pop), mask=takes_page, other=0)
            tl.store(swa_map_ptr + full_page, swa_page, mask=takes_page)
        tl.store(row_state_ptr + state_stride * ALLOCATED + row, new_len, mask=grows & served)
        num_pops += tl.sum(takes_page.to(tl.int32), axis=0)
        at_fault = is_fault & (offs == fault)
        reason = tl.where(is_full, ROW_FULL, NO_PAGE)
        code += tl.sum(tl.where(at_fault, reason, 0), axis=0)
        fault_row += tl.sum(tl.where(at_fault, row, 0), axis=0)
        end = tl.where(code == NO_ERROR, end, 0)
        start += BLOCK
    # every warp has read the tops and the error before one of them writes
    tl.debug_barrier()
    tl.store(tops_ptr + FULL, full_top - num_pops)
    if HAS_SWA:
        tl.store(tops_ptr + SWA, swa_top - num_pops)
    if code != NO_ERROR:
        tl.store(error_ptr + ERROR_CODE, code)
        tl.store(error_ptr + ERROR_ROW, fault_row)


@compiled
def decode_step_twin(
    rows: Any,
    num_rows: Any,
    page_table: Any,
    full_stack: Any,
    swa_stack: Any,
    swa_map: Any,
    row_state: Any,
    tops: Any,
    error: Any,
    page_size: int,
    has_swa: bool,
) -> None:
    """CPU twin of `decode_step` on int32 arrays; the specification."""
    for i in range(num_rows[0]):
        if error[ERROR_CODE] != NO_ERROR:
            break
        row = rows[i]
        allocated = row_state[ALLOCATED, row]
        new_len = row_state[COMPUTED, row] + 1
        if new_len <= allocated:
            continue
        page = (new_len + page_size - 1) // page_size - 1
        if page >= (allocated + page_size - 1) // page_size:
            if page >= page_table.shape[1]:
                error[ERROR_CODE] = ROW_FULL
                error[ERROR_ROW] = row
                continue
            if tops[FULL] == 0 or (has_swa and tops[SWA] == 0):
                error[ERROR_CODE] = NO_PAGE
                error[ERROR_ROW] = row
                continue
            tops[FULL] -= 1
            full_page = full_stack[tops[FULL]]
            page_table[row, page] = full_page
            if has_swa:
                tops[SWA] -= 1
                swa_map[full_page] = swa_stack[tops[SWA]]
        row_state[ALLOCATED, row] = new_len


def decode_step(
    rows: torch.Tensor,
    num_rows: torch.Tensor,
    page_table: torch.Tensor,
    full_stack: torch.Tensor,
    swa_stack: torch.Tensor,
    swa_map: torch.Tensor,
    row_state: torch.Tensor,
    tops: torch.Tensor,
    error: torch.Tensor,
    *,
    page_size: int,
    has_swa: bool,
) -> None:
    """Make room for one more token than each row has computed, as `step` does. One launch.

    Nothing that changes from step to step comes from the host, so the launch can be captured in a graph:
    which rows run, and how many, is read on the device. Where a row needs a page and a stack is empty, or
    its page table ends, `error` becomes (code, row), and that row and all after it in the list stay as they
    are. While `error` is set, nothing is done at all. The host, which counts pages exactly, makes sure that
    it never is; it may look whenever it reads something back anyway.

    Args:
        rows: [max_rows] int32, row ids; the first `num_rows` are used and are distinct.
        num_rows: [1] int32, rows in use.
        page_table: [max_rows, pages_per_row] int32, Full page ids; written.
        full_stack: [full_pages] int32, free Full pages.
        swa_stack: [swa_pages] int32, free SWA pages.
        swa_map: [full_pages + 1] int32, SWA page under each Full page, 0 = none; written. Length 0 without
            SWA.
        row_state: [4, max_rows] int32; COMPUTED is read, ALLOCATED read and written.
        tops: [2] int32, free entries of the stacks; read and written.
        error: [2] int32, (code, row) as in layout.py; read, written at the first fault.
        page_size: tokens per page, >= 1.
        has_swa: whether there is an SWA pool. If not, swa_stack, swa_map and tops[SWA] are not touched.

    Raises:
        InvalidInputError: A tensor has a wrong rank, dtype, device, layout or length, or page_size < 1.
    """
    launch.check_operands(
        ("rows", rows, 1),
        ("num_rows", num_rows, 1),
        ("page_table", page_table, 2),
        ("full_stack", full_stack, 1),
        ("swa_stack", swa_stack, 1),
        ("swa_map", swa_map, 1),
        ("row_state", row_state, 2),
        ("tops", tops, 1),
        ("error", error, 1),
    )
    max_rows, pages_per_row = page_table.shape
    launch.check_length("rows.shape[0]", rows.shape[0], max_rows)
    launch.check_length("num_rows.shape[0]", num_rows.shape[0], 1)
    launch.check_length("row_state.numel()", row_state.numel(), ROW_FIELDS * max_rows)
    launch.check_length("tops.shape[0]", tops.shape[0], NUM_POOLS)
    launch.check_length("error.shape[0]", error.shape[0], ERROR_FIELDS)
    launch.check_page_size(page_size)
    if has_swa:
        launch.check_length("swa_map.shape[0]", swa_map.shape[0], full_stack.shape[0] + 1)
    if launch.takes_kernel(page_table):
        _decode_step_kernel[(1,)](
            rows,
            num_rows,
            page_table,
            full_stack,
            swa_stack,
            swa_map,
            row_state,
            tops,
            error,
            int(pages_per_row),
            int(max_rows),
            P=int(page_size),
            HAS_SWA=bool(has_swa),
            BLOCK=_BLOCK,
            num_warps=8,
        )
    else:
        decode_step_twin(
            rows.numpy(),
            num_rows.numpy(),
            page_table.numpy(),
            full_stack.numpy(),
            swa_stack.numpy(),
            swa_map.numpy(),
            row_state.numpy(),
            tops.numpy(),
            error.numpy(),
            page_size,
            has_swa,
        )
