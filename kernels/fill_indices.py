"""Ragged page or token indices of a batch (CSR) for attention backends: Full, or the SWA window. One launch.

Source: SGLang v0.5.20, create_flashinfer_kv_indices_triton, after a cumsum of the lengths, a copy of the
sums and, for a window, a launch that translates what it wrote. Here every program adds up the rows before
its own, which for a running batch is one block, so that all of it is one launch and no sum comes from
the host.
Reference: fill_indices_twin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvcache.checks import check_tensor
from kvcache.compiled import compiled
from kvcache.errors import InvalidInputError
from kvcache.kernels import launch
from kvcache.kernels.layout import ALLOCATED, COMPUTED, ROW_FIELDS

if TYPE_CHECKING:
    import triton.language as tl

# a running batch of up to 256 rows is added up in one block, two rows a thread of 4 warps
_BLOCK_ROWS = 256
# one 16-byte store of int32 entries a thread of 4 warps
_BLOCK = 512
# entries; blocks of the output begin at multiples of it, so that whole ones are stored 16 bytes at a time
_ALIGN = 16
# places are int32 in the backends, and the last block may reach beyond the buffer
MOST_ENTRIES = 2**31 - 2**16


@launch.kernel(
    do_not_specialize=(
        "rows_ptr",
        "num_rows_ptr",
        "lens_ptr",
        "indptr_ptr",
        "last_page_len_ptr",
        "window_start_ptr",
        "pages_per_row",
        "max_rows",
        "window",
    )
)
def _fill_indices_kernel(
    rows_ptr,  # [num_lanes] int32, in; row of each lane
    num_rows_ptr,  # [1] int32, in; lanes in use, the others are padding
    lens_ptr,  # [num_lanes] int32, in, tokens; not read unless HAS_LENS
    page_table_ptr,  # [max_rows, pages_per_row] int32, in
    swa_map_ptr,  # [full_pages + 1] int32, in; not read unless SWA
    row_state_ptr,  # [4, max_rows] int32, in
    indptr_ptr,  # [num_lanes + 1] int32, out
    indices_ptr,  # [capacity] int32 or int64, out
    last_page_len_ptr,  # [num_lanes] int32, out, tokens
    window_start_ptr,  # [num_lanes] int32, out, tokens
    pages_per_row,
    max_rows,
    window,  # tokens; not used unless SWA
    P: tl.constexpr,
    UNIT: tl.constexpr,  # tokens of an entry: P, entries are pages, or 1, they are token slots
    SWA: tl.constexpr,
    HAS_LENS: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (num_lanes, programs). Program (i, k) does blocks k, k + programs, ... of lane i."""
    lane = tl.program_id(0)
    num_rows = tl.load(num_rows_ptr)
    state_stride = tl.cast(max_rows, tl.int64)
    num_before = tl.minimum(lane, num_rows)
    offset = lane * 0
    start = lane * 0
    while start < num_before:
        offs = start + tl.arange(0, BLOCK_ROWS)
        before = offs < num_before
        other_row = tl.load(rows_ptr + offs, mask=before, other=0)
        if HAS_LENS:
            other_len = tl.load(lens_ptr + offs, mask=before, other=0)
        else:
            allocated_ptr = row_state_ptr + state_stride * ALLOCATED + other_row
            other_len = tl.load(allocated_ptr, mask=before, other=0)
        count = (other_len + (UNIT - 1)) // UNIT
        if SWA:
            computed_ptr = row_state_ptr + state_stride * COMPUTED + other_row
            other_computed = tl.load(computed_ptr, mask=before, other=0)
            count -= tl.maximum(other_computed + 1 - window, 0) // UNIT
        offset += tl.sum(count, axis=0)
        start += BLOCK_ROWS

    row = lane * 0
    kv_len = lane * 0
    first = lane * 0
    if lane < num_rows:
        row = tl.load(rows_ptr + lane)
        if HAS_LENS:
            kv_len = tl.load(lens_ptr + lane)
        else:
            kv_len = tl.load(row_state_ptr + state_stride * ALLOCATED + row)
        if SWA:
            computed = tl.load(row_state_ptr + state_stride * COMPUTED + row)
            first = tl.maximum(computed + 1 - window, 0) // UNIT
    last = (kv_len + (UNIT - 1)) // UNIT
    end = offset + last - first

    cells_ptr = page_table_ptr + row.to(tl.int64) * pages_per_row
    dtype = indices_ptr.dtype.element_ty
    block = tl.program_id(1)
    while offset // ALIGN * ALIGN + block * BLOCK < end:
        out = offset // ALIGN * ALIGN + block * BLOCK
        offs = out + tl.arange(0, BLOCK)
        entry = first + (offs - offset)
        in_range = (offs >= offset) & (offs < end)
        page = tl.load(cells_ptr + entry // (P // UNIT), mask=in_range, other=0)
        if SWA:
            page = tl.load(swa_map_ptr + page, mask=page > 0, other=0)
        index = page.to(dtype) * (P // UNIT)
        if UNIT != P:
            index = tl.where(page > 0, index + entry % P, 0)
        # under a mask whose bounds are not known to be multiples of 16 Triton stores one entry at a time
        if (out >= offset) & (out + BLOCK <= end):
            tl.store(indices_ptr + offs, index)
        else:
            tl.store(indices_ptr + offs, index, mask=in_range)
        block += tl.num_programs(1)

    if tl.program_id(1) == 0:
        tl.store(indptr_ptr + lane + 1, end)
        last_page_len = kv_len - (last - 1) * UNIT
        tl.store(last_page_len_ptr + lane, tl.where(last > first, last_page_len, 0))
        tl.store(window_start_ptr + lane, first * UNIT)
        if lane == 0:
            tl.store(indptr_ptr, 0)


@compiled
def fill_indices_twin(
    rows: Any,
    num_rows: Any,
    lens: Any,
    page_table: Any,
    swa_map: Any,
    row_state: Any,
    indptr: Any,
    indices: Any,
    last_page_len: Any,
    window_start: Any,
    num_lanes: int,
    max_entries: int,
    page_size: int,
    unit: int,
    window: int,
) -> None:
    """CPU twin of `fill_indices` (`lens` an array or None); the specification.

    `max_entries` has no use here.
    """
    units_per_page = page_size // unit
    end = 0
    for lane in range(num_lanes):
        row = 0
        kv_len = 0
        first = 0
        if lane < num_rows[0]:
            row = rows[lane]
            kv_len = row_state[ALLOCATED, row] if lens is None else lens[lane]
            if window > 0:
                first = max(row_state[COMPUTED, row] + 1 - window, 0) // unit
        last = (kv_len + unit - 1) // unit
        if lane == 0:
            indptr[0] = 0
        for entry in range(first, last):
            page = page_table[row, entry // units_per_page]
            if window > 0:
                page = swa_map[page] if page > 0 else 0
            indices[end] = page * units_per_page + entry % units_per_page if page > 0 else 0
            end += 1
        indptr[lane + 1] = end
        last_page_len[lane] = kv_len - (last - 1) * unit if last > first else 0
        window_start[lane] = first * unit


def fill_indices(
    rows: torch.Tensor,
    num_rows: torch.Tensor,
    lens: torch.Tensor | None,
    page_table: torch.Tensor,
    swa_map: torch.Tensor,
    row_state: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    window_start: torch.Tensor,
    *,
    num_lanes: int,
    max_entries: int,
    page_size: int,
    unit: int,
    window: int,
) -> None:
    """List the pages, or the token slots, that the next forward of each row may read. One launch.

    What it may read is defined in `fill_table`. With unit = page_size the entries are pages (what
    FlashInfer takes); the list of a row begins with the page of the first token that a query reads. With
    unit = 1 they are token slots, page * page_size + offset, and the list begins with that token itself.

        page_size 4, window 6, computed 13, allocated 17

        unit 4, Full     pages of tokens 0, 4, 8, 12, 16       last_page_len 1    window_start 0
        unit 4, SWA      pages of tokens 8, 12, 16             last_page_len 1    window_start 8
        unit 1, SWA      slots of tokens 8, 9, ..., 16         last_page_len 1    window_start 8

    Does not synchronize with the host: rows and lengths are not range-checked, and the caller has made
    sure that `indices` has room. num_lanes 0 does nothing.

    Args:
        rows: [>= num_lanes] int32, row of each lane; the first `num_rows` are used.
        num_rows: [1] int32, lanes in use; the lanes from there on are padding, and empty.
        lens: [>= num_lanes] int32, tokens, computed <= lens <= allocated, or None: allocated.
        page_table: [max_rows, pages_per_row] int32, Full page ids.
        swa_map: [full_pages + 1] int32, SWA page under each Full page, 0 = none. Not read if window is 0.
        row_state: [4, max_rows] int32; COMPUTED and ALLOCATED are read.
        indptr: [>= num_lanes + 1] int32, out: entries of lane i are indices[indptr[i] : indptr[i + 1]].
        indices: [capacity] int32 or int64, out: page ids or token slots, 0 where a page has no SWA.
            Entries from indptr[num_lanes] on are not written.
        last_page_len: [>= num_lanes] int32, out: tokens in the last entry, in [1, unit]; 0 for an empty
            list.
        window_start: [>= num_lanes] int32, out: position of the first listed token; 0 without window.
        num_lanes: lanes to write.
        max_entries: entries of the longest list; sizes the grid only.
        page_size: tokens per page, >= 1.
        unit: tokens of an entry: page_size or 1.
        window: W, tokens that a query reads, itself included; 0: Full.

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
        ("indptr", indptr, 1),
        ("last_page_len", last_page_len, 1),
        ("window_start", window_start, 1),
    )
    if indices.dtype is not torch.int32 and indices.dtype is not torch.int64:
        raise InvalidInputError(f"indices must be torch.int32 or torch.int64, got {indices.dtype}")
    check_tensor("indices", indices, ndim=1, dtype=indices.dtype, device=rows.device)
    max_rows, pages_per_row = page_table.shape
    launch.check_length("row_state.numel()", row_state.numel(), ROW_FIELDS * max_rows)
    launch.check_length("num_rows.shape[0]", num_rows.shape[0], 1)
    launch.check_range("indices.shape[0]", indices.shape[0], 0, MOST_ENTRIES)
    most_lanes = min(
        rows.shape[0], indptr.shape[0] - 1, last_page_len.shape[0], window_start.shape[0]
    )
    launch.check_range("num_lanes", num_lanes, 0, most_lanes)
    if lens is not None:
        launch.check_operands(("rows", rows, 1), ("lens", lens, 1))
        launch.check_range("num_lanes", num_lanes, 0, lens.shape[0])
    launch.check_page_size(page_size)
    if unit not in (1, page_size):
        raise InvalidInputError(f"unit must be 1 or page_size ({page_size}), got {unit}")
    launch.check_window(window, swa_map)
    if num_lanes == 0:
        return
    if launch.takes_kernel(page_table):
        grid = (int(num_lanes), launch.range_programs(max_entries, _BLOCK))
        _fill_indices_kernel[grid](
            rows,
            num_rows,
            rows if lens is None else lens,
            page_table,
            swa_map,
            row_state,
            indptr,
            indices,
            last_page_len,
            window_start,
            int(pages_per_row),
            int(max_rows),
            int(window),
            P=int(page_size),
            UNIT=int(unit),
            SWA=window > 0,
            HAS_LENS=lens is not None,
            ALIGN=_ALIGN,
            BLOCK_ROWS=_BLOCK_ROWS,
            BLOCK=_BLOCK,
            num_warps=launch.warps(128),
        )
    else:
        fill_indices_twin(
            rows.numpy(),
            num_rows.numpy(),
            None if lens is None else lens.numpy(),
            page_table.numpy(),
            swa_map.numpy(),
            row_state.numpy(),
            indptr.numpy(),
            indices.numpy(),
            last_page_len.numpy(),
            window_start.numpy(),
            num_lanes,
            max_entries,
            page_size,
            unit,
            window,
        )
