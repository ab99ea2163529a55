"""Free the SWA pages that fell out of the window, for a batch of rows, in one launch.

Source: SGLang v0.5.20, mem_cache/allocator/swa.py, free_swa: per request a slice from a frontier
that the host computes, a gather through the map, a mask, a concatenation (2,306 launches for 256
requests at 64 tokens a page). Here the device computes the frontier from the computed length, and
the place of every pushed page is a closed form (pages of earlier rows + index in the row), so that
it depends neither on tiles nor on which lane runs first.
Reference: slide_twin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvcache.compiled import compiled
from kvcache.errors import InvalidInputError
from kvcache.kernels import launch
from kvcache.kernels.layout import COMPUTED, FRONTIER, NUM_POOLS, OWNED, ROW_FIELDS, SWA

if TYPE_CHECKING:
    import triton.language as tl

# a decode batch of up to 256 rows is one block, one row a thread of 8 warps
_BLOCK_ROWS = 256
# a decoding row frees 0 or 1 page; 4 keep a prefilled chunk (128 pages) to 32 rounds and spill
# nothing
_BLOCK_PAGES = 4


@launch.kernel(do_not_specialize=("rows_ptr", "num_rows", "pages_per_row", "max_rows", "keep"))
def _slide_kernel(
    rows_ptr,  # [num_rows] int32, in; distinct
    page_table_ptr,  # [max_rows, pages_per_row] int32, in
    swa_map_ptr,  # [full_pages + 1] int32, in and out; freed pages are set to 0
    swa_stack_ptr,  # [swa_pages] int32, out
    row_state_ptr,  # [4, max_rows] int32, in and out
    tops_ptr,  # [2] int32, in and out
    num_rows,
    pages_per_row,
    max_rows,
    keep,  # tokens kept before the end of the key
    P: tl.constexpr,
    BIGRAM: tl.constexpr,  # 1 with bigram keys, else 0: tokens that are no key unit yet
    BLOCK_ROWS: tl.constexpr,
    BLOCK_PAGES: tl.constexpr,
):
    """Grid: (1,). Blocks of rows; in each, [rows, pages] tiles until the longest range is done."""
    swa_top = tl.load(tops_ptr + SWA)
    state_stride = tl.cast(max_rows, tl.int64)
    start = num_rows * 0
    while start < num_rows:
        offs = start + tl.arange(0, BLOCK_ROWS)
        in_range = offs < num_rows
        row = tl.load(rows_ptr + offs, mask=in_range, other=0)
        computed = tl.load(row_state_ptr + state_stride * COMPUTED + row, mask=in_range, other=0)
        owned = tl.load(row_state_ptr + state_stride * OWNED + row, mask=in_range, other=0)
        frontier_ptr = row_state_ptr + state_stride * FRONTIER + row
        old = tl.load(frontier_ptr, mask=in_range, other=0)
        last_end = tl.maximum(computed - 1 - BIGRAM, 0) // P * P
        new = tl.maximum(old, tl.maximum(last_end - keep, 0) // P * P)
        first_page = tl.maximum(old, owned) // P
        num_pages = tl.maximum(new, owned) // P - first_page
        first_push = swa_top + tl.cumsum(num_pages, axis=0) - num_pages
        cells_ptr = page_table_ptr + row.to(tl.int64) * pages_per_row + first_page
        most_pages = tl.max(num_pages, axis=0)
        done = num_rows * 0
        while done < most_pages:
            j = done + tl.arange(0, BLOCK_PAGES)
            leaves = j[None, :] < num_pages[:, None]
            full_page = tl.load(cells_ptr[:, None] + j[None, :], mask=leaves, other=0)
            swa_page = tl.load(swa_map_ptr + full_page, mask=leaves, other=0)
            tl.store(swa_stack_ptr + (first_push[:, None] + j[None, :]), swa_page, mask=leaves)
            # the thread that clears an entry need not be the one that read it
            tl.debug_barrier()
            tl.store(swa_map_ptr + full_page, tl.zeros_like(swa_page), mask=leaves)
            done += BLOCK_PAGES
        tl.store(frontier_ptr, new, mask=in_range)
        swa_top += tl.sum(num_pages, axis=0)
        start += BLOCK_ROWS
    # every warp has read the top before one of them writes
    tl.debug_barrier()
    tl.store(tops_ptr + SWA, swa_top)


@compiled
def slide_twin(
    rows: Any,
    page_table: Any,
    swa_map: Any,
    swa_stack: Any,
    row_state: Any,
    tops: Any,
    num_rows: int,
    page_size: int,
    keep: int,
    bigram: bool,
) -> None:
    """CPU twin of `slide` on int32 arrays; the specification."""
    for i in range(num_rows):
        row = rows[i]
        units = row_state[COMPUTED, row]
        if bigram:
            units -= 1
        # the same key may come again without its last unit, and still needs a whole window then
        last_end = max(0, units - 1) // page_size * page_size
        old = row_state[FRONTIER, row]
        new = max(old, max(0, last_end - keep) // page_size * page_size)
        # pages below owned belong to the tree, which keeps their SWA
        owned = row_state[OWNED, row]
        for page in range(max(old, owned) // page_size, new // page_size):
            full_page = page_table[row, page]
            swa_stack[tops[SWA]] = swa_map[full_page]
            tops[SWA] += 1
            swa_map[full_page] = 0
        row_state[FRONTIER, row] = new


def slide(
    rows: torch.Tensor,
    page_table: torch.Tensor,
    swa_map: torch.Tensor,
    swa_stack: torch.Tensor,
    row_state: torch.Tensor,
    tops: torch.Tensor,
    *,
    num_rows: int,
    page_size: int,
    keep: int,
    bigram: bool,
) -> None:
    """Move the SWA frontier of every row and free its own SWA pages below. One launch.

    new frontier = max(old, page_floor(max(0, page_floor(max(0, units(computed) - 1)) - keep))), where
    units(n) is n, or n - 1 with bigram keys. Row by row in the order of `rows`, pages ascending, the
    SWA page under each own page (at or after owned) in [old, new) is pushed and its map entry
    cleared. Does not synchronize with the host: rows are not range-checked. num_rows 0 does
    nothing.

        page_size 4, keep 6, computed 27, owned 8, old frontier 4

        tokens  0    4    8    12   16   20   24  27
                | tree    |  leaves | window      |.
                     ^old           ^new frontier = page_floor(page_floor(26) - 6) = 16; pages 2
                                     and 3 are freed

    Args:
        rows: [capacity] int32, row ids; the first `num_rows` are used and are distinct.
        page_table: [max_rows, pages_per_row] int32, Full page ids.
        swa_map: [full_pages + 1] int32, SWA page under each Full page, 0 = none; freed entries
            become 0.
        swa_stack: [swa_pages] int32, free SWA pages; pushed to.
        row_state: [4, max_rows] int32; COMPUTED and OWNED are read, FRONTIER read and written.
        tops: [2] int32, free entries of the stacks; SWA is read and written.
        num_rows: rows in use.
        page_size: tokens per page, >= 1.
        keep: tokens whose SWA stays before the page-floored end of the key without its last unit,
            >= 0 (the window, less its slack).
        bigram: whether keys are bigrams, so that the last token is no key unit yet.

    Raises:
        InvalidInputError: A tensor has a wrong rank, dtype, device, layout or length, num_rows is
            not in [0, capacity], page_size < 1, keep < 0, or there is no SWA pool (an empty
            swa_map).
    """
    launch.check_operands(
        ("rows", rows, 1),
        ("page_table", page_table, 2),
        ("swa_map", swa_map, 1),
        ("swa_stack", swa_stack, 1),
        ("row_state", row_state, 2),
        ("tops", tops, 1),
    )
    max_rows, pages_per_row = page_table.shape
    launch.check_length("row_state.numel()", row_state.numel(), ROW_FIELDS * max_rows)
    launch.check_length("tops.shape[0]", tops.shape[0], NUM_POOLS)
    launch.check_range("num_rows", num_rows, 0, rows.shape[0])
    launch.check_page_size(page_size)
    if keep < 0:
        raise InvalidInputError(f"keep must be >= 0, got {keep}")
    if swa_map.shape[0] == 0:
        raise InvalidInputError("swa_map must have an entry per Full page, got length 0")
    if num_rows == 0:
        return
    if launch.takes_kernel(page_table):
        _slide_kernel[(1,)](
            rows,
            page_table,
            swa_map,
            swa_stack,
            row_state,
            tops,
            int(num_rows),
            int(pages_per_row),
            int(max_rows),
            int(keep),
            P=int(page_size),
            BIGRAM=int(bigram),
            BLOCK_ROWS=_BLOCK_ROWS,
            BLOCK_PAGES=_BLOCK_PAGES,
            num_warps=8,
        )
    else:
        slide_twin(
            rows.numpy(),
            page_table.numpy(),
            swa_map.numpy(),
            swa_stack.numpy(),
            row_state.numpy(),
            tops.numpy(),
            num_rows,
            page_size,
            keep,
            bigram,
        )
