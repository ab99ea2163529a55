"""`decode`: a decode step's whole cache maintenance, with both page tables (kvcache.device.decode_step).

Every row begins a page, and a page of every row falls out of the window: the most that a step can have to do.
"""

from __future__ import annotations

import torch

from kvcache.bench import decode_slide, decode_step, fill_table
from kvcache.bench import slide as slide_bench
from kvcache.bench import step as step_bench
from kvcache.bench.case import OURS, SGLANG, TORCH, Bench, Case, Outcome, Size, State, Version
from kvcache.bench.scene import pages_of_tokens, pools, rng_of
from kvcache.bench.view_scene import WINDOWS, first_tokens
from kvcache.kernels.fill_table import ALIGN
from kvcache.kernels.layout import ERROR_FIELDS

_TABLE = ("table", "cache_seqlens", "window_start")
_VIEWS = tuple(f"{kind}_{name}" for kind in WINDOWS for name in _TABLE)
_CHANGED = ("page_table", "swa_map", "swa_stack", "row_state", "tops", *_VIEWS)


def min_bytes(num_rows: int, full_pages: int, swa_pages: int, num_entries: int) -> int:
    """Bytes that any implementation must move, one that fuses all of it too.

    A row: its id and four lengths read; three lengths, and two for each of the tables, written. Its new page:
    read from both stacks, written to page table and map. Its freed page: the map entry read and cleared, and
    pushed. A page of a table: read from the page table once, and its map entry. An entry: written. Tops read
    and written, the number of rows and the error word read.
    """
    return 76 * num_rows + 4 * full_pages + 4 * swa_pages + 4 * num_entries + 24


def _view(s: State, kind: str) -> State:
    """The state as fill_table's versions take it."""
    return {**s, **{name: s[f"{kind}_{name}"] for name in _TABLE}, "window": WINDOWS[kind]}


def _ours(s: State) -> None:
    decode_step.run_ours(s)
    for kind in WINDOWS:
        fill_table.run_ours(_view(s, kind))
    decode_slide.run_ours(s)


def _torch(s: State) -> None:
    step_bench.torch_step(s)
    for kind in WINDOWS:
        fill_table.run_torch(_view(s, kind))
    decode_slide.run_torch(s)


def _sglang(s: State) -> None:
    step_bench.sglang_step(s)
    for kind in WINDOWS:
        fill_table.run_sglang(_view(s, kind))
    slide_bench.sglang_slide(s)


def _read(s: State) -> Outcome:
    found = {name: s[name] for name in ("page_table", *_VIEWS)}
    return {**slide_bench.outcome(s), **found}


def _sglang_read(s: State) -> Outcome:
    return {
        **slide_bench.sglang_outcome(s),
        "page_table": pages_of_tokens(s["req_to_token"], s["page_size"]),
    }


def make(size: Size) -> Case:
    """Rows of random lengths that end with a page; one token more, and a page leaves their window."""
    rng = rng_of(size)
    after, frontier = slide_bench.sliding_rows(size, rng)
    lens = after - 1
    spare = size.batch + 8
    s = pools(size, rng, computed=lens, allocated=lens, frontier=frontier, spare=spare)
    slide_bench.add_host_side(s, size, lens, frontier)
    s["error"] = torch.zeros(ERROR_FIELDS, dtype=torch.int32, device=size.device)
    s["seq_lens"] = torch.tensor(s["host_lens"], device=size.device)
    s["longest"] = int(lens.max()) + 1
    num_pages = {}
    num_entries = 0
    for kind, window in WINDOWS.items():
        first = first_tokens(lens + 1, window, size.page_size) // size.page_size
        pages = -(-(lens + 1) // size.page_size) - first
        width = -(-int(pages.max()) // ALIGN) * ALIGN
        shapes: tuple[tuple[int, ...], ...] = ((size.batch, width), (size.batch,), (size.batch,))
        for name, shape in zip(_TABLE, shapes, strict=True):
            s[f"{kind}_{name}"] = torch.full(shape, -1, dtype=torch.int32, device=size.device)
        num_pages[kind] = int(pages.sum())
        num_entries += size.batch * width
    versions = (
        Version(OURS, _ours, _read, (*_CHANGED, "error"), captured=True),
        Version(TORCH, _torch, _read, _CHANGED),
        Version(SGLANG, _sglang, _sglang_read, ("req_to_token", "full_to_swa")),
    )
    least = min_bytes(size.batch, num_pages["full"], num_pages["swa"], num_entries)
    return Case(s, versions, least, launches=2 + len(WINDOWS))


BENCHES = (Bench("decode", "", "a decode step's maintenance with two page tables", make),)
