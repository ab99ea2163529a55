"""`slide`, the out-of-window pass: here every row has one page that fell out of its window."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvcache.bench.case import (
    OURS,
    SGLANG,
    TORCH,
    WINDOW,
    Bench,
    Case,
    Outcome,
    Size,
    State,
    Version,
    call,
)
from kvcache.bench.scene import (
    Ints,
    add_token_pools,
    aligned,
    pages_of_tokens,
    pools,
    rng_of,
    sorted_free,
)
from kvcache.kernels.layout import COMPUTED, FRONTIER, OWNED, SWA
from kvcache.kernels.slide import slide

_NAMES = (
    "rows",
    "page_table",
    "swa_map",
    "swa_stack",
    "row_state",
    "tops",
)
_CHANGED = ("swa_map", "swa_stack", "row_state", "tops")
SGLANG_CHANGED = ("full_to_swa",)


def min_bytes(num_rows: int, num_pages: int) -> int:
    """Bytes that any implementation must move.

    A row: its id and three lengths read, the frontier written. A page: read from the page table, its map
    entry read and cleared, pushed. The top read and written.
    """
    return 20 * num_rows + 16 * num_pages + 8


def _ours(s: State) -> None:
    call(
        slide,
        s,
        _NAMES,
        num_rows=s["rows"].shape[0],
        page_size=s["page_size"],
        keep=WINDOW,
        bigram=False,
    )


def torch_slide(s: State) -> None:
    """Vectorised over the pages of the batch, whose number the device tells the host."""
    rows, state, size = s["rows"].long(), s["row_state"], s["page_size"]
    computed, owned, old = state[COMPUTED, rows], state[OWNED, rows], state[FRONTIER, rows]
    last_end = (computed - 1).clamp(min=0) // size * size
    new = torch.maximum(old, (last_end - WINDOW).clamp(min=0) // size * size)
    first = torch.maximum(old, owned) // size
    num_pages = torch.maximum(new, owned) // size - first
    of_page = torch.repeat_interleave(torch.arange(rows.shape[0], device=rows.device), num_pages)
    push = torch.arange(of_page.shape[0], device=rows.device)
    before = torch.cumsum(num_pages, 0) - num_pages
    full = s["page_table"][rows[of_page], first[of_page] + push - before[of_page]].long()
    s["swa_stack"][s["tops"][SWA] + push] = s["swa_map"][full]
    s["swa_map"][full] = 0
    state[FRONTIER, rows] = new
    s["tops"][SWA] += of_page.shape[0]


def sglang_slide(s: State) -> None:
    """Request by request: frontier on the host, slice, map, mask, pages, free list, map cleared."""
    size = s["page_size"]
    lens, frontiers = s["host_lens"], list(s["host_frontiers"])
    for i, row in enumerate(s["req_rows"]):
        new = max(frontiers[i], max(0, (lens[i] - 1) // size * size - WINDOW) // size * size)
        if new > frontiers[i]:
            slots = s["req_to_token"][row, frontiers[i] : new].long()
            swa_slots = s["full_to_swa"][slots]
            swa_slots = swa_slots[swa_slots > 0]
            pages = torch.unique(swa_slots // size)
            s["swa_free"] = torch.cat((s["swa_free"], pages))
            s["full_to_swa"][slots] = 0
            frontiers[i] = new
    s["host_frontiers"] = frontiers


def sglang_outcome(s: State) -> Outcome:
    return {
        "swa_map": pages_of_tokens(s["full_to_swa"], s["page_size"]),
        "swa_free": s["swa_free"].sort().values,
    }


def outcome(s: State) -> Outcome:
    """All that changes: the stack up to its top in order, and for SGLang's sequence without."""
    top = s["tops"][SWA]
    return {
        "swa_map": s["swa_map"],
        "row_state": s["row_state"],
        "tops": s["tops"],
        "swa_stack": s["swa_stack"][: int(top)],
        "swa_free": sorted_free(s["swa_stack"], top),
    }


def sliding_rows(size: Size, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Return (computed, frontier) [batch] of rows of which one page has just left the window.

    Their last page has one token: the window kept is that of the key without its last token.
    """
    page_size = size.page_size
    least = -(-WINDOW // page_size) + 2
    last_end = aligned(rng, size, least, max(size.pages, least)) - page_size
    frontier = (last_end - WINDOW) // page_size * page_size - page_size
    return last_end + 1, frontier


def add_host_side(s: State, size: Size, computed: Ints, frontier: Ints) -> None:
    """Add what the host of SGLang's scheduler holds."""
    add_token_pools(s, size.page_size)
    rows: Any = s["req_rows"]
    s["page_size"] = size.page_size
    s["host_lens"] = computed[rows].tolist()
    s["host_frontiers"] = frontier[rows].tolist()


def make(size: Size) -> Case:
    """Rows of random lengths, each with one page to free."""
    rng = rng_of(size)
    computed, frontier = sliding_rows(size, rng)
    s = pools(size, rng, computed=computed, allocated=computed, frontier=frontier, spare=64)
    add_host_side(s, size, computed, frontier)
    versions = (
        Version(OURS, _ours, outcome, _CHANGED, captured=True),
        Version(TORCH, torch_slide, outcome, _CHANGED),
        Version(SGLANG, sglang_slide, sglang_outcome, SGLANG_CHANGED),
    )
    return Case(s, versions, min_bytes(size.batch, size.batch))


BENCHES = (Bench("slide", "", "one page of every row fell out of the window", make),)
