"""Bind the reusable pages that a match on the device found into rows, without their places on the host.

Source: none; SGLang v0.5.20 concatenates the indices of a path's nodes and copies them, request by request.
Reference: bind_match_twin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvcache.compiled import compiled
from kvcache.kernels import launch
from kvcache.kernels.layout import (
    MATCH_FIELDS,
    MATCH_REUSE,
    MATCH_REUSE_NODE,
    RECORD_DEPTH,
    RECORD_FIELDS,
    RECORD_PARENT,
    RECORD_START,
)

if TYPE_CHECKING:
    import triton.language as tl

# as in apply.py: an edge of 8192 tokens at 64 a page is 128 pages
_BLOCK = 128


@launch.kernel(
    do_not_specialize=(
        "results_ptr",
        "index_ptr",
        "rows_ptr",
        "batch",
        "pages_per_row",
    )
)
def _bind_match_kernel(
    results_ptr,  # [8, batch] int32, in
    index_ptr,  # [num] int32, in; requests of the match
    rows_ptr,  # [num] int32, in; distinct
    records_ptr,  # [num_records, 8] int32, in
    slab_ptr,  # [slab_slots] int32, in
    page_table_ptr,  # [max_rows, pages_per_row] int32, out
    batch,
    pages_per_row,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (num, programs). Program (i, k) climbs path i and does blocks k, k + programs, ..."""
    i = tl.program_id(0)
    request_ptr = results_ptr + tl.load(index_ptr + i)
    stride = tl.cast(batch, tl.int64)
    end = tl.load(request_ptr + stride * MATCH_REUSE) // P
    node = tl.load(request_ptr + stride * MATCH_REUSE_NODE)
    cells_ptr = page_table_ptr + tl.load(rows_ptr + i).to(tl.int64) * pages_per_row
    while end > 0:
        record_ptr = records_ptr + node.to(tl.int64) * RECORD_FIELDS
        depth = tl.load(record_ptr + RECORD_DEPTH)
        first_slot = tl.load(record_ptr + RECORD_START)
        # a node that was split since the match may begin at or below the end: its upper half is above
        done = depth + tl.program_id(1) * BLOCK
        while done < end:
            page = done + tl.arange(0, BLOCK)
            in_range = page < end
            full_page = tl.load(slab_ptr + first_slot + (page - depth), mask=in_range, other=0)
            tl.store(cells_ptr + page, full_page, mask=in_range)
            done += tl.num_programs(1) * BLOCK
        end = tl.minimum(end, depth)
        node = tl.load(record_ptr + RECORD_PARENT)


@compiled
def bind_match_twin(
    results: Any,
    index: Any,
    rows: Any,
    records: Any,
    slab: Any,
    page_table: Any,
    num: int,
    max_pages: int,
    page_size: int,
) -> None:
    """CPU twin of `bind_match` on int32 arrays; the specification. `max_pages` has no use here."""
    for i in range(num):
        end = results[MATCH_REUSE, index[i]] // page_size
        node = results[MATCH_REUSE_NODE, index[i]]
        while end > 0:
            depth = records[node, RECORD_DEPTH]
            for page in range(depth, end):
                page_table[rows[i], page] = slab[records[node, RECORD_START] + page - depth]
            end = min(end, depth)
            node = records[node, RECORD_PARENT]


def bind_match(
    results: torch.Tensor,
    index: torch.Tensor,
    rows: torch.Tensor,
    records: torch.Tensor,
    slab: torch.Tensor,
    page_table: torch.Tensor,
    *,
    num: int,
    max_pages: int,
    page_size: int,
) -> None:
    """Write the Full pages of each request's reusable prefix into a row of the page table. One launch.

    The prefix must still stand in the tree: then its nodes lie in the copy as at the match, or split.
    Does not synchronize with the host: nothing is range-checked. num 0 does nothing.

    Args:
        results: [8, batch] int32, of `match`.
        index: [>= num] int32, requests of the match.
        rows: [>= num] int32, distinct.
        records: [num_records, 8] int32, fields as in layout.RECORD_*.
        slab: [slab_slots] int32, Full page id of every tree slot.
        page_table: [max_rows, pages_per_row] int32, out: cells [0, reuse_len / page_size) of each row.
        num: rows to bind.
        max_pages: pages of the longest prefix; sizes the grid only.
        page_size: tokens per page, >= 1.

    Raises:
        InvalidInputError: A tensor has a wrong rank, dtype, device, layout or length, num is out of range, or
            page_size < 1.
    """
    launch.check_operands(
        ("results", results, 2),
        ("index", index, 1),
        ("rows", rows, 1),
        ("records", records, 2),
        ("slab", slab, 1),
        ("page_table", page_table, 2),
    )
    launch.check_length("results.shape[0]", results.shape[0], MATCH_FIELDS)
    launch.check_length("records.shape[1]", records.shape[1], RECORD_FIELDS)
    launch.check_range("num", num, 0, min(index.shape[0], rows.shape[0]))
    launch.check_page_size(page_size)
    if num == 0:
        return
    if launch.takes_kernel(page_table):
        grid = (int(num), launch.range_programs(max_pages, _BLOCK))
        _bind_match_kernel[grid](
            results,
            index,
            rows,
            records,
            slab,
            page_table,
            int(results.shape[1]),
            int(page_table.shape[1]),
            P=int(page_size),
            BLOCK=_BLOCK,
            num_warps=1,
        )
    else:
        bind_match_twin(
            results.numpy(),
            index.numpy(),
            rows.numpy(),
            records.numpy(),
            slab.numpy(),
            page_table.numpy(),
            num,
            max_pages,
            page_size,
        )
