"""`fill_indices`: lists of pages (CSR, FlashInfer) and of token slots (page size 1) of a decode batch."""

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
from kvcache.kernels.fill_indices import fill_indices
from kvcache.kernels.layout import ALLOCATED, COMPUTED

_NAMES = (
    "rows",
    "num_rows",
    "no_lens",
    "page_table",
    "swa_map",
    "row_state",
    "indptr",
    "indices",
    "last_page_len",
    "window_start",
)
_CHANGED = ("indptr", "indices", "last_page_len", "window_start")


def min_bytes(num_rows: int, num_pages: int, num_entries: int, window: int) -> int:
    """Bytes that any implementation must move, entries of 4 bytes.

    A row: its id and length read, end of its list, last page and start written; with a window the computed
    length as well. A page: read from the page table, and its map entry with a window. An entry: written.
    """
    per_row, per_page = (24, 8) if window else (20, 4)
    return per_row * num_rows + per_page * num_pages + 4 * num_entries + 4


def _ours(s: State) -> None:
    call(
        fill_indices,
        s,
        _NAMES,
        num_lanes=s["rows"].shape[0],
        max_entries=s["most"],
        page_size=s["page_size"],
        unit=s["unit"],
        window=s["window"],
    )


def _torch(s: State) -> None:
    """Counts, their sums, the rows spread out to entries; the host knows how many, so nothing waits."""
    rows, size, unit, window = s["rows"].long(), s["page_size"], s["unit"], s["window"]
    state, total = s["row_state"], s["indices"].shape[0]
    lens = state[ALLOCATED, rows]
    first = (state[COMPUTED, rows] + 1 - window).clamp(min=0) // unit if window else lens * 0
    last = (lens + unit - 1) // unit
    counts = last - first
    ends = torch.cumsum(counts, 0)
    s["indptr"][0] = 0
    s["indptr"][1:] = ends
    lane = torch.arange(rows.shape[0], device=rows.device)
    lanes = torch.repeat_interleave(lane, counts, output_size=total)
    before = (ends - counts)[lanes]
    entry = first[lanes] + torch.arange(total, device=rows.device) - before
    per_page = size // unit
    page = s["page_table"][rows[lanes], entry // per_page].long()
    if window:
        page = s["swa_map"][page].long()
    s["indices"].copy_(page * per_page + entry % per_page)
    s["last_page_len"].copy_(torch.where(counts > 0, lens - (last - 1) * unit, 0))
    s["window_start"].copy_(first * unit)


def _sglang(s: State) -> None:
    """Lengths, their sums, a copy of the sums, a gather in place of its kernel, a launch for the map."""
    window, total = s["window"], s["indices"].shape[0]
    lens = s["seq_lens"]
    counts = lens.clamp(max=window) if window else lens
    start = lens - counts
    s["kv_indptr"][1:] = torch.cumsum(counts, 0)
    indptr = s["kv_indptr"]
    lane = torch.arange(lens.shape[0], device=lens.device)
    lanes = torch.repeat_interleave(lane, counts, output_size=total)
    token = torch.arange(total, device=lens.device) - indptr[lanes] + start[lanes]
    slots = s["req_to_token"][s["rows"].long()[lanes], token]
    s["kv_indices"] = s["full_to_swa"][slots.long()].int() if window else slots


def _sglang_read(s: State) -> Outcome:
    return {"indptr": s["kv_indptr"], "indices": s["kv_indices"]}


def make(size: Size, kind: str, slots: bool) -> Case:
    """A decode batch; lists of exactly what the rows hold. SGLang only lists token slots."""
    window, unit = WINDOWS[kind], 1 if slots else size.page_size
    s, lens = decoding(size)
    first = first_tokens(lens, window, unit)
    counts = -(-lens // unit) - first // unit
    total = int(counts.sum())
    device = size.device
    for name, entries in (
        ("indptr", size.batch + 1),
        ("indices", total),
        ("last_page_len", size.batch),
        ("window_start", size.batch),
        ("kv_indptr", size.batch + 1),
        ("kv_indices", total),
    ):
        s[name] = torch.full((entries,), -1, dtype=torch.int32, device=device)
    s["kv_indptr"][0] = 0
    s.update(window=window, unit=unit, most=int(counts.max()))
    versions: tuple[Version, ...] = (
        Version(OURS, _ours, outputs(*_CHANGED), _CHANGED, captured=True),
        Version(TORCH, _torch, outputs(*_CHANGED), _CHANGED, captured=True),
    )
    if slots:
        versions += (Version(SGLANG, _sglang, _sglang_read, ("kv_indptr",), captured=True),)
    num_pages = int((-(-lens // size.page_size) - first // size.page_size).sum())
    return Case(s, versions, min_bytes(size.batch, num_pages, total, window))


BENCHES = tuple(
    Bench(
        "fill_indices",
        f"{what}_{kind}",
        f"{words} of a decode batch{', in the window' if kind == 'swa' else ''}",
        functools.partial(make, kind=kind, slots=what == "slots"),
    )
    for what, words in (("csr", "list of pages (CSR)"), ("slots", "list of token slots"))
    for kind in WINDOWS
)
