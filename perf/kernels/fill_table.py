"""`fill_table`: the padded page table of a decode batch, Full and SWA."""

from __future__ import annotations

import functools

import torch

from kvcache.bench.case import (
    OURS,
    SGLANG,
    TORCH,
    Bench,
    Case,
    Outcome,
    Size,
    State,
    Version,
    call,
    outputs,
)
from kvcache.bench.view_scene import WINDOWS, decoding, first_tokens
from kvcache.kernels.fill_table import ALIGN, fill_table
from kvcache.kernels.layout import ALLOCATED, COMPUTED

_NAMES = (
    "rows",
    "num_rows",
    "no_lens",
    "page_table",
    "swa_map",
    "row_state",
    "table",
    "cache_seqlens",
    "window_start",
)
_CHANGED = ("table", "cache_seqlens", "window_start")


def min_bytes(num_rows: int, num_pages: int, num_entries: int, window: int) -> int:
    """Bytes that any implementation must move.

    A row: its id and length read, the length and start of its table written; with a window, the computed
    length read as well. A page: read from the page table, and its map entry with a window. An entry of the
    padded table: written.
    """
    per_row, per_page = (20, 8) if window else (16, 4)
    return per_row * num_rows + per_page * num_pages + 4 * num_entries


def run_ours(s: State) -> None:
    call(
        fill_table,
        s,
        _NAMES,
        num_lanes=s["rows"].shape[0],
        width=s["table"].shape[1],
        page_size=s["page_size"],
        window=s["window"],
    )


def run_torch(s: State) -> None:
    """One padded gather for the batch, masked; through the map with a window. Nothing waits."""
    rows, size, window = s["rows"].long(), s["page_size"], s["window"]
    state, width = s["row_state"], s["table"].shape[1]
    lens = state[ALLOCATED, rows]
    first = (state[COMPUTED, rows] + 1 - window).clamp(min=0) // size if window else lens * 0
    num_pages = (lens + size - 1) // size - first
    j = torch.arange(width, device=rows.device)
    held = j < num_pages[:, None]
    column = torch.where(held, first[:, None] + j, 0)
    page = torch.where(held, s["page_table"][rows[:, None], column.long()], 0)
    s["table"].copy_(s["swa_map"][page.long()] if window else page)
    s["cache_seqlens"].copy_(lens - first * size)
    s["window_start"].copy_(first * size)


def run_sglang(s: State) -> None:
    """Its table is of token slots: a strided gather, for SWA the map over the whole length, pages."""
    size = s["page_size"]
    slots = s["req_to_token"][s["rows"].long()][:, : s["longest"] : size]
    if s["window"]:
        slots = s["full_to_swa"][slots.long()]
    s["whole_table"] = (slots // size).int()
    s["cache_seqlens"] = s["seq_lens"].int()


def _sglang_read(s: State) -> Outcome:
    """The pages of the window out of its whole table."""
    table = torch.zeros_like(s["table"])
    whole = s["whole_table"]
    for i, (first, end) in enumerate(s["page_ranges"]):
        table[i, : end - first] = whole[i, first:end]
    return {"table": table}


def make(size: Size, kind: str) -> Case:
    """A decode batch; the table as wide as the longest row, or as a window, rounded up to 16."""
    window = WINDOWS[kind]
    s, lens = decoding(size)
    first = first_tokens(lens, window, size.page_size) // size.page_size
    end = -(-lens // size.page_size)
    width = -(-int((end - first).max()) // ALIGN) * ALIGN
    s["table"] = torch.full((size.batch, width), -1, dtype=torch.int32, device=size.device)
    s["cache_seqlens"], s["window_start"] = torch.full(
        (2, size.batch), -1, dtype=torch.int32, device=size.device
    ).unbind()
    s["window"], s["longest"] = window, int(lens.max())
    s["page_ranges"] = list(zip(first.tolist(), end.tolist(), strict=True))
    s["whole_table"] = torch.zeros(
        (size.batch, int(end.max())), dtype=torch.int32, device=size.device
    )
    versions = (
        Version(OURS, run_ours, outputs(*_CHANGED), _CHANGED, captured=True),
        Version(TORCH, run_torch, outputs(*_CHANGED), _CHANGED, captured=True),
        Version(SGLANG, run_sglang, _sglang_read, (), captured=True),
    )
    num_pages = int((end - first).sum())
    return Case(s, versions, min_bytes(size.batch, num_pages, size.batch * width, window))


BENCHES = (
    Bench(
        "fill_table",
        "full",
        "padded page table of a decode batch",
        functools.partial(make, kind="full"),
    ),
    Bench(
        "fill_table",
        "swa",
        "padded page table of the windows of a decode batch",
        functools.partial(make, kind="swa"),
    ),
)
