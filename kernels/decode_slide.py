"""`advance`, then `slide`, for a captured graph, in one launch: the number of rows is on the device.

Source: none; SGLang v0.5.20 frees out-of-window slots outside of its graph (see slide.py).
Reference: decode_slide_twin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvcache.compiled import compiled
from kvcache.errors import InvalidInputError
from kvcache.kernels import launch
from kvcache.kernels.layout import (
    ALLOCATED,
    COMPUTED,
    ERROR_CODE,
    ERROR_FIELDS,
    ERROR_ROW,
    FRONTIER,
    NO_ERROR,
    NUM_POOLS,
    OWNED,
    ROW_FIELDS,
    STACK_FULL,
    SWA,
)

if TYPE_CHECKING:
    import triton.language as tl

# as in slide.py: a decode batch is one block of rows, and a decoding row frees 0 or 1 page
_BLOCK_ROWS = 256
_BLOCK_PAGES = 4


@launch.kernel(
    do_not_specialize=(
        "rows_ptr",
        "num_rows_ptr",
        "error_ptr",
        "pages_per_row",
        "max_rows",
        "stack_size",
        "keep",
    )
)
def _decode_slide_kernel(
    rows_ptr,  # [max_rows] int32, in; the first num_rows are used, distinct
    num_rows_ptr,  # [1] int32, in
    page_table_ptr,  # [max_rows, pages_per_row] int32, in
    swa_map_ptr,  # [full_pages + 1] int32, in and out; not touched unless HAS_SWA
    swa_stack_ptr,  # [stack_size] int32, out; not touched unless HAS_SWA
    row_state_ptr,  # [4, max_rows] int32, in and out
    tops_ptr,  # [2] int32, in and out; not touched unless HAS_SWA
    error_ptr,  # [2] int32, in and out
    pages_per_row,
    max_rows,
    stack_size,
    keep,  # tokens kept before the end of the key
    P: tl.constexpr,
    BIGRAM: tl.constexpr,  # 1 with bigram keys, else 0: tokens that are no key unit yet
    HAS_SWA: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_PAGES: tl.constexpr,
):
    """Grid: (1,). Blocks of rows; in each, [rows, pages] tiles until the longest range is done."""
    num_rows = tl.load(num_rows_ptr)
    end = tl.where(tl.load(error_ptr + ERROR_CODE) == NO_ERROR, num_rows, 0)
    swa_top = end * 0
    if HAS_SWA:
        swa_top = tl.load(tops_ptr + SWA)
    is_fault = end != end
    fault_row = end * 0
    state_stride = tl.cast(max_rows, tl.int64)
    start = end * 0
    while start < end:
        offs = start + tl.arange(0, BLOCK_ROWS)
        in_range = offs < end
        row = tl.load(rows_ptr + offs, mask=in_range, other=0)
        computed = tl.load(row_state_ptr + state_stride * ALLOCATED + row, mask=in_range, other=0)
        if HAS_SWA:
            owned = tl.load(row_state_ptr + state_stride * OWNED + row, mask=in_range, other=0)
            frontier_ptr = row_state_ptr + state_stride * FRONTIER + row
            old = tl.load(frontier_ptr, mask=in_range, other=0)
            last_end = tl.maximum(computed - 1 - BIGRAM, 0) // P * P
            new = tl.maximum(old, tl.maximum(last_end - keep, 0) // P * P)
            first_page = tl.maximum(old, owned) // P
            num_pages = tl.maximum(new, owned) // P - first_page
            last_push = swa_top + tl.cumsum(num_pages, axis=0)
            # rows are served in order: what is before the first fault is as if it had not been
            overflows = last_push > stack_size
            fault = tl.min(tl.where(overflows, offs, end), axis=0)
            in_range = in_range & (offs < fault)
            fault_row += tl.sum(tl.where(overflows & (offs == fault), row, 0), axis=0)
            is_fault = fault < end
            num_pages = tl.where(in_range, num_pages, 0)
            first_push = last_push - num_pages
            cells_ptr = page_table_ptr + row.to(tl.int64) * pages_per_row + first_page
            most_pages = tl.max(num_pages, axis=0)
            done = end * 0
            while done < most_pages:
                j = done + tl.arange(0, BLOCK_PAGES)
                leaves = j[None, :] < num_pages[:, None]
                full_page = tl.load(cells_ptr[:, None] + j[None, :], mask=leaves, other=0)
                swa_page = tl.load(swa_map_ptr + full_page, mask=leaves, other=0)
                tl.store(swa_stack_ptr + (first_push[:, None] + j[None, :]), swa_page, mask=leaves)
                tl.store(swa_map_ptr + full_page, tl.zeros_like(swa_page), mask=leaves)
                done += BLOCK_PAGES
            tl.store(frontier_ptr, new, mask=in_range)
            swa_top += tl.sum(num_pages, axis=0)
            end = tl.where(is_fault, 0, end)
        tl.store(row_state_ptr + state_stride * COMPUTED + row, computed, mask=in_range)
        start += BLOCK_ROWS
    if HAS_SWA:
        # every warp has read the top and the error before one of them writes
        tl.debug_barrier()
        tl.store(tops_ptr + SWA, swa_top)
        if is_fault:
            tl.store(error_ptr + ERROR_CODE, STACK_FULL)
            tl.store(error_ptr + ERROR_ROW, fault_row)


@compiled
def decode_slide_twin(
    rows: Any,
    num_rows: Any,
    page_table: Any,
    swa_map: Any,
    swa_stack: Any,
    row_state: Any,
    tops: Any,
    error: Any,
    page_size: int,
    keep: int,
    bigram: bool,
    has_swa: bool,
) -> None:
    """CPU twin of `decode_slide` on int32 arrays; the specification."""
    for i in range(num_rows[0]):
        if error[ERROR_CODE] != NO_ERROR:
            break
        row = rows[i]
        computed = row_state[ALLOCATED, row]
        if has_swa:
            units = computed - 1 if bigram else computed
            last_end = max(0, units - 1) // page_size * page_size
            old = row_state[FRONTIER, row]
            new = max(old, max(0, last_end - keep) // page_size * page_size)
            # pages below owned belong to the tree, which keeps their SWA
            first_page = max(old, row_state[OWNED, row]) // page_size
            num_pages = max(0, new // page_size - first_page)
            if tops[SWA] + num_pages > swa_stack.shape[0]:
                error[ERROR_CODE] = STACK_FULL
                error[ERROR_ROW] = row
                continue
            for page in range(first_page, first_page + num_pages):
                full_page = page_table[row, page]
                swa_stack[tops[SWA]] = swa_map[full_page]
                tops[SWA] += 1
                swa_map[full_page] = 0
            row_state[FRONTIER, row] = new
        row_state[COMPUTED, row] = computed


def decode_slide(
    rows: torch.Tensor,
    num_rows: torch.Tensor,
    page_table: torch.Tensor,
    swa_map: torch.Tensor,
    swa_stack: torch.Tensor,
    row_state: torch.Tensor,
    tops: torch.Tensor,
    error: torch.Tensor,
    *,
    page_size: int,
    keep: int,
    bigram: bool,
    has_swa: bool,
) -> None:
    """Set computed = allocated for every row, then slide (see slide.py). One launch.

    Nothing that changes from step to step comes from the host, so the launch can be captured in a graph.
    Where more SWA pages come back than the stack has room for, `error` becomes (STACK_FULL, row), and that
    row and all after it in the list stay as they are. While `error` is set, nothing is done at all.

    Args:
        rows: [max_rows] int32, row ids; the first `num_rows` are used and are distinct.
        num_rows: [1] int32, rows in use.
        page_table: [max_rows, pages_per_row] int32, Full page ids.
        swa_map: [full_pages + 1] int32, SWA page under each Full page, 0 = none; freed entries become 0.
        swa_stack: [swa_pages] int32, free SWA pages; pushed to.
        row_state: [4, max_rows] int32; ALLOCATED and OWNED are read, COMPUTED written, FRONTIER read and
            written.
        tops: [2] int32, free entries of the stacks; SWA is read and written.
        error: [2] int32, (code, row) as in layout.py; read, written at the first fault.
        page_size: tokens per page, >= 1.
        keep: tokens before the page-floored end of the key whose SWA stays, >= 0.
        bigram: whether keys are bigrams, so that the last token is no key unit yet.
        has_swa: whether there is an SWA pool. If not, only COMPUTED is written.

    Raises:
        InvalidInputError: A tensor has a wrong rank, dtype, device, layout or length, page_size < 1, or
            keep < 0.
    """
    launch.check_operands(
        ("rows", rows, 1),
        ("num_rows", num_rows, 1),
        ("page_table", page_table, 2),
        ("swa_map", swa_map, 1),
        ("swa_stack", swa_stack, 1),
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
    if keep < 0:
        raise InvalidInputError(f"keep must be >= 0, got {keep}")
    if has_swa and swa_map.shape[0] == 0:
        raise InvalidInputError("swa_map must have an entry per Full page, got length 0")
    if launch.takes_kernel(page_table):
        _decode_slide_kernel[(1,)](
            rows,
            num_rows,
            page_table,
            swa_map,
            swa_stack,
            row_state,
            tops,
            error,
            int(pages_per_row),
            int(max_rows),
            int(swa_stack.shape[0]),
            int(keep),
            P=int(page_size),
            BIGRAM=int(bigram),
            HAS_SWA=bool(has_swa),
            BLOCK_ROWS=_BLOCK_ROWS,
            BLOCK_PAGES=_BLOCK_PAGES,
            num_warps=8,
        )
    else:
        decode_slide_twin(
            rows.numpy(),
            num_rows.numpy(),
            page_table.numpy(),
            swa_map.numpy(),
            swa_stack.numpy(),
            row_state.numpy(),
            tops.numpy(),
            error.numpy(),
            page_size,
            keep,
            bigram,
            has_swa,
        )
