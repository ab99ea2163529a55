"""`step`: one more token for every row, and here every row begins a page, which is the most there can be."""

from __future__ import annotations

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
from kvcache.bench.scene import add_token_pools, aligned, pages_of_tokens, pools, rng_of
from kvcache.kernels.layout import ALLOCATED, COMPUTED, FULL, SWA
from kvcache.kernels.step import step

_NAMES = (
    "rows",
    "page_table",
    "full_stack",
    "swa_stack",
    "swa_map",
    "row_state",
    "tops",
)
_CHANGED = ("page_table", "swa_map", "row_state", "tops")


def min_bytes(num_rows: int, num_new_pages: int) -> int:
    """Bytes that any implementation must move.

    A row: its id and two lengths read, one length written. A new page: read from both stacks, written to
    the page table and the map. Both tops: read and written.
    """
    return 16 * num_rows + 16 * num_new_pages + 16


def _ours(s: State) -> None:
    call(
        step,
        s,
        _NAMES,
        num_rows=s["rows"].shape[0],
        page_size=s["page_size"],
        has_swa=True,
    )


def torch_step(s: State) -> None:
    """Vectorised over the batch; nothing waits. Rows that need no page write what is there already."""
    rows, state, tops, size = s["rows"].long(), s["row_state"], s["tops"], s["page_size"]
    computed, allocated = state[COMPUTED, rows], state[ALLOCATED, rows]
    page = computed // size
    needs = (computed + 1 > allocated) & (page * size >= allocated)
    count = needs.int()
    pop = torch.cumsum(count, 0) - count
    full = s["full_stack"][torch.clamp(tops[FULL] - 1 - pop, min=0).long()]
    swa = s["swa_stack"][torch.clamp(tops[SWA] - 1 - pop, min=0).long()]
    cells = s["page_table"][rows, page.long()]
    s["page_table"][rows, page.long()] = torch.where(needs, full, cells)
    # entry 0 of the map is 0 and stays so
    s["swa_map"][torch.where(needs, full, 0).long()] = torch.where(needs, swa, 0)
    state[ALLOCATED, rows] = torch.maximum(allocated, computed + 1)
    tops -= count.sum(dtype=torch.int32)


def sglang_step(s: State) -> None:
    """Lengths up by one; new pages counted on the host; a slice of each free list; map; table."""
    size, rows = s["page_size"], s["rows"].long()
    s["seq_lens"] = s["seq_lens"] + 1
    s["host_lens"] = [n + 1 for n in s["host_lens"]]
    count = sum(1 for n in s["host_lens"] if (n - 1) % size == 0)
    seq_lens = s["seq_lens"]
    begins = (seq_lens - 1) % size == 0
    nth = torch.cumsum(begins, 0) - 1
    last = s["req_to_token"][rows, (seq_lens - 2).clamp(min=0)].long()
    locs = []
    for name in ("full_free", "swa_free"):
        pages = s[name][:count]
        s[name] = s[name][count:]
        locs.append(pages[nth.clamp(min=0)] * size)
    full = torch.where(begins, locs[0], last + 1)
    swa = torch.where(begins, locs[1], s["full_to_swa"][last] + 1)
    s["full_to_swa"][full] = swa
    s["req_to_token"][rows, seq_lens - 1] = full.int()


def _sglang_read(s: State) -> Outcome:
    size = s["page_size"]
    return {
        "page_table": pages_of_tokens(s["req_to_token"], size),
        "swa_map": pages_of_tokens(s["full_to_swa"], size),
    }


def make(size: Size) -> Case:
    """Rows of random lengths that all end with a page."""
    rng = rng_of(size)
    lens = aligned(rng, size, 1, size.pages)
    s = pools(size, rng, computed=lens, allocated=lens, spare=size.batch + 8)
    add_token_pools(s, size.page_size)
    s["page_size"] = size.page_size
    s["seq_lens"] = s["row_state"][COMPUTED, s["rows"].long()].long()
    s["host_lens"] = s["seq_lens"].tolist()
    versions = (
        Version(OURS, _ours, outputs(*_CHANGED), _CHANGED, captured=True),
        Version(TORCH, torch_step, outputs(*_CHANGED), _CHANGED, captured=True),
        Version(SGLANG, sglang_step, _sglang_read, ("req_to_token", "full_to_swa")),
    )
    return Case(s, versions, min_bytes(size.batch, size.batch))


BENCHES = (Bench("step", "", "one more token for every row, each begins a page", make),)
