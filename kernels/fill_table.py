"""Padded page table of a batch for paged attention kernels: Full, or SWA cut to the window. One launch.

Source: none; SGLang v0.5.20 gathers its table of token slots by row, divides it by the page size and
sends it through the Full -> SWA map, over the whole length, with a launch for each of these.
Reference: fill_table_twin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvcache.compiled import compiled
from kvcache.errors import InvalidInputError
from kvcache.kernels import launch
from kvcache.kernels.layout import ALLOCATED, COMPUTED, ROW_FIELDS

if TYPE_CHECKING:
    import triton.language as tl

# one 16-byte store a thread of 4 warps; a row of 128k tokens at 64 a page is 4 blocks
_BLOCK = 512
# entries: lengths and strides that are multiples of it let Triton load and store 16 bytes at a time
ALIGN = 16


@launch.kernel(
    do_not_specialize=(
        "rows_ptr",
        "num_rows_ptr",
        "lens_ptr",
        "cache_seqlens_ptr",
        "window_start_ptr",
        "pages_per_row",
        "max_rows",
        "stride",
        "width",
        "window",
    )
)
def _fill_table_kernel(
    rows_ptr,  # [num_lanes] int32, in; row of each lane
    num_rows_ptr,  # [1] int32, in; lanes in use, the others are padding
    lens_ptr,  # [num_lanes] int32, in, tokens; not read unless HAS_LENS
    page_table_ptr,  # [max_rows, pages_per_row] int32, in
    swa_map_ptr,  # [full_pages + 1] int32, in; not read unless SWA
    row_state_ptr,  # [4, max_rows] int32, in
    table_ptr,  # [num_lanes, stride] int32, out; columns [0, width)
    cache_seqlens_ptr,  # [num_lanes] int32, out, tokens
    window_start_ptr,  # [num_lanes] int32, out, tokens
    pages_per_row,
    max_rows,
    stride,  # a multiple of ALIGN
    width,  # a multiple of ALIGN
    window,  # tokens; not used unless SWA
    P: tl.constexpr,
    SWA: tl.constexpr,
    HAS_LENS: tl.constexpr,
    ALIGNED: tl.constexpr,  # pages_per_row is a multiple of ALIGN
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (num_lanes, programs). Program (i, k) does blocks k, k + programs, ... of lane i."""
    lane = tl.program_id(0)
    row = lane * 0
    kv_len = lane * 0
    first_page = lane * 0
    if lane < tl.load(num_rows_ptr):
        row = tl.load(rows_ptr + lane)
        state_ptr = row_state_ptr + row
        state_stride = tl.cast(max_rows, tl.int64)
        if HAS_LENS:
            kv_len = tl.load(lens_ptr + lane)
        else:
            kv_len = tl.load(state_ptr + state_stride * ALLOCATED)
        if SWA:
            computed = tl.load(state_ptr + state_stride * COMPUTED)
            first_page = tl.maximum(computed + 1 - window, 0) // P
    num_pages = (kv_len + (P - 1)) // P - first_page

    # a product with ALIGN is how Triton knows that a length or a stride is a multiple of it
    row_stride = tl.cast(pages_per_row, tl.int64)
    num_read = num_pages
    if ALIGNED:
        row_stride = row_stride // ALIGN * ALIGN
        if not SWA:
            num_read = (num_pages + (ALIGN - 1)) // ALIGN * ALIGN
    num_written = tl.cast(width, tl.int32) // ALIGN * ALIGN
    cells_ptr = page_table_ptr + row.to(tl.int64) * row_stride + first_page
    out_ptr = table_ptr + lane.to(tl.int64) * (tl.cast(stride, tl.int64) // ALIGN * ALIGN)
    block = tl.program_id(1)
    while block * BLOCK < width:
        j = block * BLOCK + tl.arange(0, BLOCK)
        page = tl.load(cells_ptr + j, mask=j < num_read, other=0)
        page = tl.where(j < num_pages, page, 0)
        if SWA:
            page = tl.load(swa_map_ptr + page, mask=page > 0, other=0)
        tl.store(out_ptr + j, page, mask=j < num_written)
        block += tl.num_programs(1)

    if tl.program_id(1) == 0:
        tl.store(cache_seqlens_ptr + lane, kv_len - first_page * P)
        tl.store(window_start_ptr + lane, first_page * P)


@compiled
def fill_table_twin(
    rows: Any,
    num_rows: Any,
    lens: Any,
    page_table: Any,
    swa_map: Any,
    row_state: Any,
    table: Any,
    cache_seqlens: Any,
    window_start: Any,
    num_lanes: int,
    width: int,
    page_size: int,
    window: int,
) -> None:
    """CPU twin of `fill_table` on int32 arrays (`lens` an array or None); the specification."""
    for lane in range(num_lanes):
        row = 0
        kv_len = 0
        first_page = 0
        if lane < num_rows[0]:
            row = rows[lane]
            kv_len = row_state[ALLOCATED, row] if lens is None else lens[lane]
            if window > 0:
                first_page = max(row_state[COMPUTED, row] + 1 - window, 0) // page_size
        end_page = (kv_len + page_size - 1) // page_size
        for j in range(width):
            page = page_table[row, first_page + j] if first_page + j < end_page else 0
            table[lane, j] = swa_map[page] if window > 0 and page > 0 else page
        cache_seqlens[lane] = kv_len - first_page * page_size
        window_start[lane] = first_page * page_size


def fill_table(
    rows: torch.Tensor,
    num_rows: torch.Tensor,
    lens: torch.Tensor | None,
    page_table: torch.Tensor,
    swa_map: torch.Tensor,
    row_state: torch.Tensor,
    table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    window_start: torch.Tensor,
    *,
    num_lanes: int,
    width: int,
    page_size: int,
    window: int,
) -> None:
    """Write the pages that the next forward of each row may read. One launch.

    The next forward has queries at [computed, kv_len), kv_len the allocated length or `lens`. A query at
    q reads tokens (q - W, q] of an SWA layer, so the first one reads from computed + 1 - W on: the SWA
    table begins with the page of that token, and counts lengths from there.

        page_size 4, window 6, computed 13, allocated 17         Full: pages 0 .. 4, cache_seqlens 17

        tokens  0    4    8    12   16
                |    |    |    |q q |q    the query at 13 reads 8 .. 13, the one at 16 reads 11 .. 16
                          ^window_start = page_floor(13 + 1 - 6) = 8; pages 2, 3, 4; cache_seqlens 9

    Does not synchronize with the host: rows and lengths are not range-checked. num_lanes 0 does nothing.

    Args:
        rows: [>= num_lanes] int32, row of each lane; the first `num_rows` are used.
        num_rows: [1] int32, lanes in use; the lanes from there on are padding.
        lens: [>= num_lanes] int32, tokens, computed <= lens <= allocated, or None: allocated.
        page_table: [max_rows, pages_per_row] int32, Full page ids. Copies are twice as wide where
            pages_per_row is a multiple of 16.
        swa_map: [full_pages + 1] int32, SWA page under each Full page, 0 = none. Not read if window is 0.
        row_state: [4, max_rows] int32; COMPUTED and ALLOCATED are read.
        table: [>= num_lanes, any multiple of 16] int32, out: page ids. 0 where a row has no page, for
            pages without SWA, and in padding lanes. Columns from `width` on are not written.
        cache_seqlens: [>= num_lanes] int32, out: tokens that the table covers; 0 in padding lanes.
        window_start: [>= num_lanes] int32, out: position of the table's first token; 0 without window.
        num_lanes: lanes to write.
        width: columns to write, a multiple of 16; a row with more pages is cut off.
        page_size: tokens per page, >= 1.
        window: W, tokens that a query reads, itself included; 0: the Full table.

    Raises:
        InvalidInputError: A tensor has a wrong rank, dtype, device, layout or length, or a number is out
            of range.
    """
    launch.check_operands(
        ("rows", rows, 1),
        ("num_rows", num_rows, 1),
        ("page_table", page_table, 2),
        ("swa_map", swa_map, 1),
        ("row_state", row_state, 2),
        ("table", table, 2),
        ("cache_seqlens", cache_seqlens, 1),
        ("window_start", window_start, 1),
    )
    max_rows, pages_per_row = page_table.shape
    stride = table.shape[1]
    launch.check_length("row_state.numel()", row_state.numel(), ROW_FIELDS * max_rows)
    launch.check_length("num_rows.shape[0]", num_rows.shape[0], 1)
    most_lanes = min(rows.shape[0], table.shape[0], cache_seqlens.shape[0], window_start.shape[0])
    launch.check_range("num_lanes", num_lanes, 0, most_lanes)
    launch.check_range("width", width, 0, stride)
    if width % ALIGN or stride % ALIGN:
        raise InvalidInputError(
            f"width and table.shape[1] must be multiples of {ALIGN}, got {width} and {stride}"
        )
    if lens is not None:
        launch.check_operands(("rows", rows, 1), ("lens", lens, 1))
        launch.check_range("num_lanes", num_lanes, 0, lens.shape[0])
    launch.check_page_size(page_size)
    launch.check_window(window, swa_map)
    if num_lanes == 0:
        return
    if launch.takes_kernel(page_table):
        grid = (int(num_lanes), launch.range_programs(width, _BLOCK))
        _fill_table_kernel[grid](
            rows,
            num_rows,
            rows if lens is None else lens,
            page_table,
            swa_map,
            row_state,
            table,
            cache_seqlens,
            window_start,
            int(pages_per_row),
            int(max_rows),
            int(stride),
            int(width),
            int(window),
            P=int(page_size),
            SWA=window > 0,
            HAS_LENS=lens is not None,
            ALIGNED=pages_per_row % ALIGN == 0,
            ALIGN=ALIGN,
            BLOCK=_BLOCK,
            num_warps=launch.warps(128),
        )
    else:
        fill_table_twin(
            rows.numpy(),
            num_rows.numpy(),
            None if lens is None else lens.numpy(),
            page_table.numpy(),
            swa_map.numpy(),
            row_state.numpy(),
            table.numpy(),
            cache_seqlens.numpy(),
            window_start.numpy(),
            num_lanes,
            width,
            page_size,
            window,
        )
