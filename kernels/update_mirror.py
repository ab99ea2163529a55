"""Bring the tree's copy on the device up to date with what changed: one launch for all of it.

Source: none; SGLang v0.5.20 keeps its tree on the host.
Reference: update_mirror_twin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvcache.compiled import compiled
from kvcache.errors import InvalidInputError
from kvcache.kernels import launch
from kvcache.kernels.layout import ENTRY_FIELDS, RECORD_FIELDS

if TYPE_CHECKING:
    import triton.language as tl

# words a program moves: one 16-byte load a thread of 4 warps
_BLOCK = 512


@launch.kernel(
    do_not_specialize=(
        "node_ids_ptr",
        "slot_ids_ptr",
        "page_ids_ptr",
        "num_nodes",
        "num_slots",
        "num_pages",
    )
)
def _update_mirror_kernel(
    node_ids_ptr,  # [num_nodes] int32, in; distinct
    node_rows_ptr,  # [num_nodes, 8] int32, in
    slot_ids_ptr,  # [num_slots] int32, in; distinct
    slot_rows_ptr,  # [num_slots, 2] int32, in
    page_ids_ptr,  # [num_pages] int32, in; slab slots, distinct
    page_rows_ptr,  # [num_pages, P] int32, in
    records_ptr,  # [num_records, 8] int32, out
    table_ptr,  # [slots, 2] int32, out
    tokens_ptr,  # [slab_slots * P] int32, out
    num_nodes,
    num_slots,
    num_pages,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: blocks of the records, then of the entries, then of the tokens."""
    block = tl.program_id(0)
    node_blocks = tl.cdiv(num_nodes * RECORD_FIELDS, BLOCK)
    slot_blocks = tl.cdiv(num_slots * ENTRY_FIELDS, BLOCK)
    if block < node_blocks:
        i = block * BLOCK + tl.arange(0, BLOCK)
        in_range = i // RECORD_FIELDS < num_nodes
        node = tl.load(node_ids_ptr + i // RECORD_FIELDS, mask=in_range, other=0)
        word = tl.load(node_rows_ptr + i, mask=in_range, other=0)
        place = node.to(tl.int64) * RECORD_FIELDS + i % RECORD_FIELDS
        tl.store(records_ptr + place, word, mask=in_range)
    elif block < node_blocks + slot_blocks:
        i = (block - node_blocks) * BLOCK + tl.arange(0, BLOCK)
        in_range = i // ENTRY_FIELDS < num_slots
        slot = tl.load(slot_ids_ptr + i // ENTRY_FIELDS, mask=in_range, other=0)
        word = tl.load(slot_rows_ptr + i, mask=in_range, other=0)
        place = slot.to(tl.int64) * ENTRY_FIELDS + i % ENTRY_FIELDS
        tl.store(table_ptr + place, word, mask=in_range)
    else:
        i = (block - node_blocks - slot_blocks) * BLOCK + tl.arange(0, BLOCK)
        in_range = i // P < num_pages
        slot = tl.load(page_ids_ptr + i // P, mask=in_range, other=0)
        word = tl.load(page_rows_ptr + i, mask=in_range, other=0)
        tl.store(tokens_ptr + (slot.to(tl.int64) * P + i % P), word, mask=in_range)


@compiled
def update_mirror_twin(
    node_ids: Any,
    node_rows: Any,
    slot_ids: Any,
    slot_rows: Any,
    page_ids: Any,
    page_rows: Any,
    records: Any,
    table: Any,
    tokens: Any,
    num_nodes: int,
    num_slots: int,
    num_pages: int,
    page_size: int,
) -> None:
    """CPU twin of `update_mirror` on int32 arrays; the specification."""
    for i in range(num_nodes):
        for j in range(RECORD_FIELDS):
            records[node_ids[i], j] = node_rows[i, j]
    for i in range(num_slots):
        for j in range(ENTRY_FIELDS):
            table[slot_ids[i], j] = slot_rows[i, j]
    for i in range(num_pages):
        for j in range(page_size):
            tokens[page_ids[i] * page_size + j] = page_rows[i, j]


def update_mirror(
    node_ids: torch.Tensor,
    node_rows: torch.Tensor,
    slot_ids: torch.Tensor,
    slot_rows: torch.Tensor,
    page_ids: torch.Tensor,
    page_rows: torch.Tensor,
    records: torch.Tensor,
    table: torch.Tensor,
    tokens: torch.Tensor,
    *,
    num_nodes: int,
    num_slots: int,
    num_pages: int,
    page_size: int,
) -> None:
    """Write new records, child-table entries and pages of tokens to their places. One launch.

    Does not synchronize with the host: places are not range-checked. With nothing to write, nothing is
    launched.

    Args:
        node_ids: [>= num_nodes] int32, records to write; distinct.
        node_rows: [>= num_nodes, 8] int32, fields as in layout.RECORD_*.
        slot_ids: [>= num_slots] int32, slots of the child table; distinct.
        slot_rows: [>= num_slots, 2] int32, (TAG, NODE).
        page_ids: [>= num_pages] int32, slots of the slab; distinct.
        page_rows: [>= num_pages, page_size] int32, tokens.
        records: [num_records, 8] int32, out.
        table: [slots, 2] int32, out.
        tokens: [slab_slots * page_size] int32, out.
        num_nodes: how many records.
        num_slots: how many entries.
        num_pages: how many pages of tokens; num_pages * page_size < 2^31.
        page_size: tokens per page, >= 1.

    Raises:
        InvalidInputError: A tensor has a wrong rank, dtype, device, layout or length, or a number is out of
            range.
    """
    launch.check_operands(
        ("node_ids", node_ids, 1),
        ("node_rows", node_rows, 2),
        ("slot_ids", slot_ids, 1),
        ("slot_rows", slot_rows, 2),
        ("page_ids", page_ids, 1),
        ("page_rows", page_rows, 2),
        ("records", records, 2),
        ("table", table, 2),
        ("tokens", tokens, 1),
    )
    launch.check_page_size(page_size)
    for name, rows, width in (
        ("node_rows", node_rows, RECORD_FIELDS),
        ("records", records, RECORD_FIELDS),
        ("slot_rows", slot_rows, ENTRY_FIELDS),
        ("table", table, ENTRY_FIELDS),
        ("page_rows", page_rows, page_size),
    ):
        launch.check_length(f"{name}.shape[1]", rows.shape[1], width)
    launch.check_range("num_nodes", num_nodes, 0, min(node_ids.shape[0], node_rows.shape[0]))
    launch.check_range("num_slots", num_slots, 0, min(slot_ids.shape[0], slot_rows.shape[0]))
    launch.check_range("num_pages", num_pages, 0, min(page_ids.shape[0], page_rows.shape[0]))
    if num_pages * page_size >= 2**31 - _BLOCK:
        raise InvalidInputError(
            f"num_pages * page_size must be < 2^31, got {num_pages * page_size}"
        )
    sizes = (num_nodes * RECORD_FIELDS, num_slots * ENTRY_FIELDS, num_pages * page_size)
    num_blocks = sum(-(-size // _BLOCK) for size in sizes)
    if num_blocks == 0:
        return
    if launch.takes_kernel(records):
        _update_mirror_kernel[(num_blocks,)](
            node_ids,
            node_rows,
            slot_ids,
            slot_rows,
            page_ids,
            page_rows,
            records,
            table,
            tokens,
            int(num_nodes),
            int(num_slots),
            int(num_pages),
            P=int(page_size),
            BLOCK=_BLOCK,
            num_warps=launch.warps(128),
        )
    else:
        update_mirror_twin(
            node_ids.numpy(),
            node_rows.numpy(),
            slot_ids.numpy(),
            slot_rows.numpy(),
            page_ids.numpy(),
            page_rows.numpy(),
            records.numpy(),
            table.numpy(),
            tokens.numpy(),
            num_nodes,
            num_slots,
            num_pages,
            page_size,
        )
