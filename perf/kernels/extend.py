"""`extend`: pages for the next prefill chunk of every row."""

from __future__ import annotations

import numpy as np
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
from kvcache.bench.scene import add_token_pools, aligned, int32, pages_of_tokens, pools, rng_of
from kvcache.kernels.extend import extend
from kvcache.kernels.layout import (
    ALLOCATED,
    EXTEND_FIRST_PAGE,
    EXTEND_NEW_ALLOCATED,
    EXTEND_NUM_PAGES,
    EXTEND_OFFSET,
    EXTEND_ROW,
    FULL,
    SWA,
)

_NAMES = (
    "desc",
    "page_table",
    "full_stack",
    "swa_stack",
    "swa_map",
    "row_state",
    "tops",
)
_CHANGED = ("page_table", "swa_map", "row_state", "tops")
# tokens: a chunk of prefill is up to this much of the longest request
_CHUNK_SHARE = 4


def min_bytes(num_rows: int, num_pages: int) -> int:
    """Bytes that any implementation must move.

    A row: the five fields of its descriptor read, its length written. A page: read from both stacks, written
    to the page table and the map. Both tops written.
    """
    return 24 * num_rows + 16 * num_pages + 8


def _ours(s: State) -> None:
    call(
        extend,
        s,
        _NAMES,
        num_rows=s["desc"].shape[1],
        full_top=s["total"],
        swa_top=s["total"],
        total=s["total"],
        max_pages=s["max_pages"],
        has_swa=True,
    )


def _torch(s: State) -> None:
    """The columns spread out to pages; the host knows how many, so nothing waits."""
    desc, total = s["desc"].long(), s["total"]
    device = desc.device
    column = torch.arange(desc.shape[1], device=device)
    of_page = torch.repeat_interleave(column, desc[EXTEND_NUM_PAGES], output_size=total)
    pop = torch.arange(total, device=device)
    cell = desc[EXTEND_FIRST_PAGE, of_page] + pop - desc[EXTEND_OFFSET, of_page]
    full = s["full_stack"][total - 1 - pop]
    s["page_table"][desc[EXTEND_ROW, of_page], cell] = full
    s["swa_map"][full.long()] = s["swa_stack"][total - 1 - pop]
    s["row_state"][ALLOCATED, desc[EXTEND_ROW]] = desc[EXTEND_NEW_ALLOCATED].int()
    s["tops"][FULL] -= total
    s["tops"][SWA] -= total


def _sglang(s: State) -> None:
    """Request by request: slices of the free lists, pages to slots, the map, the row of the table."""
    size = s["page_size"]
    offset = torch.arange(size, device=s["req_to_token"].device)
    for row, first, num in s["chunks"]:
        slots = []
        for name in ("full_free", "swa_free"):
            pages = s[name][:num]
            s[name] = s[name][num:]
            slots.append((pages[:, None] * size + offset).reshape(-1))
        s["full_to_swa"][slots[0]] = slots[1]
        s["req_to_token"][row, first * size : (first + num) * size] = slots[0].int()


def _sglang_read(s: State) -> Outcome:
    size = s["page_size"]
    return {
        "page_table": pages_of_tokens(s["req_to_token"], size),
        "swa_map": pages_of_tokens(s["full_to_swa"], size),
    }


def make(size: Size) -> Case:
    """Rows that hold some pages and get more: up to a quarter of the longest request."""
    rng = rng_of(size)
    most = max(1, size.pages // _CHUNK_SHARE)
    held = aligned(rng, size, 0, size.pages - most)
    num_pages = rng.integers(1, most + 1, size.batch)
    total = int(num_pages.sum())
    s = pools(size, rng, computed=held, allocated=held, spare=total)
    add_token_pools(s, size.page_size)
    rows = np.array(s["req_rows"])
    first = held[rows] // size.page_size
    new_allocated = (first + num_pages) * size.page_size
    offset = np.cumsum(num_pages) - num_pages
    s["desc"] = int32(np.stack([rows, first, num_pages, offset, new_allocated]), size.device)
    s.update(page_size=size.page_size, total=total, max_pages=int(num_pages.max()))
    s["chunks"] = list(zip(rows.tolist(), first.tolist(), num_pages.tolist(), strict=True))
    versions = (
        Version(OURS, _ours, outputs(*_CHANGED), _CHANGED, captured=True),
        Version(TORCH, _torch, outputs(*_CHANGED), _CHANGED, captured=True),
        Version(SGLANG, _sglang, _sglang_read, ("req_to_token", "full_to_swa")),
    )
    return Case(s, versions, min_bytes(size.batch, total))


BENCHES = (
    Bench("extend", "", "pages for a chunk of every row, up to a quarter of its tokens", make),
)
