"""`apply`: page ranges of a plan, as `admit` binds a cached prefix and as `finish` frees what a row holds."""

from __future__ import annotations

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
    int32,
    pages_of_tokens,
    pools,
    rng_of,
    sorted_free,
)
from kvcache.kernels.apply import apply
from kvcache.kernels.layout import (
    APPLY_FIELDS,
    APPLY_FULL_POS,
    APPLY_N,
    APPLY_OP,
    APPLY_PAGE,
    APPLY_ROW,
    APPLY_SLOT,
    APPLY_SWA_POS,
    BIND,
    FREE_ROW,
    FULL,
    SWA,
)

_NAMES = (
    "desc",
    "page_table",
    "slab",
    "swa_map",
    "full_stack",
    "swa_stack",
    "row_state",
    "tops",
)
_BOUND = ("page_table", "tops")
_FREED = ("swa_map", "full_stack", "swa_stack", "tops")


def min_bytes_bind(num_ranges: int, bound_pages: int, distinct_pages: int) -> int:
    """Bytes that any implementation must move.

    A range: its 7 fields read. A page: read from the slab once, however many rows it is bound to, and written
    to each. Both tops written.
    """
    return 28 * num_ranges + 4 * bound_pages + 4 * distinct_pages + 8


def min_bytes_free(num_ranges: int, num_pages: int, num_live: int) -> int:
    """Bytes that any implementation must move.

    A range: its 7 fields read. A page: read, pushed. One with SWA: its map entry read and cleared, its SWA
    page pushed. Both tops written.
    """
    return 28 * num_ranges + 8 * num_pages + 12 * num_live + 8


def _ours(s: State) -> None:
    call(
        apply,
        s,
        _NAMES,
        start=0,
        num=s["desc"].shape[1],
        max_pages=s["max_pages"],
        full_top=s["full_top"],
        swa_top=s["swa_top"],
    )


def _spread(desc: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (column of each page, index of the page in its range)."""
    counts = desc[APPLY_N]
    column = torch.arange(desc.shape[1], device=desc.device)
    of_page = torch.repeat_interleave(column, counts, output_size=total)
    before = torch.cumsum(counts, 0) - counts
    return of_page, torch.arange(total, device=desc.device) - before[of_page]


def _torch_bind(s: State) -> None:
    """The ranges spread out to pages; one gather, one scatter."""
    desc = s["desc"].long()
    of_page, i = _spread(desc, s["total"])
    cells = desc[APPLY_ROW, of_page], desc[APPLY_PAGE, of_page] + i
    s["page_table"][cells] = s["slab"][desc[APPLY_SLOT, of_page] + i]
    s["tops"][FULL], s["tops"][SWA] = s["full_top"], s["swa_top"]


def _torch_free(s: State) -> None:
    """The ranges spread out to pages; the host knows that each row's live range is its second column."""
    desc = s["desc"].long()
    of_page, i = _spread(desc, s["total"])
    full = s["page_table"][desc[APPLY_ROW, of_page], desc[APPLY_PAGE, of_page] + i].long()
    s["full_stack"][desc[APPLY_FULL_POS, of_page] + i] = full.int()
    live = desc[APPLY_SWA_POS, of_page] >= 0
    full, push = full[live], (desc[APPLY_SWA_POS, of_page] + i)[live]
    s["swa_stack"][push] = s["swa_map"][full]
    s["swa_map"][full] = 0
    s["tops"][FULL], s["tops"][SWA] = s["full_top"], s["swa_top"]


def _sglang_bind(s: State) -> None:
    """Request by request: the values of a path's nodes concatenated, then written into the row."""
    for row, nodes in zip(s["req_rows"], s["paths"], strict=True):
        indices = torch.cat([s["values"][first:end] for first, end in nodes])
        s["req_to_token"][row, : indices.shape[0]] = indices.int()


def _sglang_free(s: State) -> None:
    """Request by request: slice of the row, pages, map, mask, map cleared; each free list joined once."""
    size = s["page_size"]
    freed: dict[str, list[torch.Tensor]] = {
        "full_free": [s["full_free"]],
        "swa_free": [s["swa_free"]],
    }
    for row, length in zip(s["req_rows"], s["host_lens"], strict=True):
        slots = s["req_to_token"][row, :length].long()
        freed["full_free"].append(torch.unique(slots // size))
        swa_slots = s["full_to_swa"][slots]
        swa_slots = swa_slots[swa_slots > 0]
        freed["swa_free"].append(torch.unique(swa_slots // size))
        s["full_to_swa"][slots] = 0
    for name, parts in freed.items():
        s[name] = torch.cat(parts)


def _read_bind(s: State) -> Outcome:
    return {"page_table": s["page_table"], "tops": s["tops"]}


def _sglang_read_bind(s: State) -> Outcome:
    return {"page_table": pages_of_tokens(s["req_to_token"], s["page_size"])}


def _read_free(s: State) -> Outcome:
    full_top, swa_top = s["tops"][FULL], s["tops"][SWA]
    return {
        "swa_map": s["swa_map"],
        "full_stack": s["full_stack"][: int(full_top)],
        "swa_stack": s["swa_stack"][: int(swa_top)],
        "full_free": sorted_free(s["full_stack"], full_top),
        "swa_free": sorted_free(s["swa_stack"], swa_top),
    }


def _sglang_read_free(s: State) -> Outcome:
    return {
        "swa_map": pages_of_tokens(s["full_to_swa"], s["page_size"]),
        "full_free": s["full_free"].sort().values,
        "swa_free": s["swa_free"].sort().values,
    }


def _desc(size: Size, columns: dict[int, Ints]) -> torch.Tensor:
    """Descriptors from the fields that an op uses; the others are 0, and SWA_POS -1."""
    num = columns[APPLY_N].shape[0]
    desc = np.zeros((APPLY_FIELDS, num), np.int64)
    desc[APPLY_SWA_POS] = -1
    for field, values in columns.items():
        desc[field] = values
    return int32(desc, size.device)


def make_bind(size: Size) -> Case:
    """Each row gets a prefix of two nodes, the first of which all share, as long as the longest request."""
    rng = rng_of(size)
    empty = np.zeros(size.batch, np.int64)
    s = pools(size, rng, computed=empty, allocated=empty)
    shared = (size.pages + 1) // 2
    own = size.pages - shared
    slots = shared + size.batch * own
    s["slab"] = int32(rng.permutation(slots) + 1, size.device)
    add_token_pools(s, size.page_size)
    rows = np.array(s["req_rows"])
    first = shared + np.arange(size.batch) * own
    columns = {
        APPLY_OP: np.full(2 * size.batch, BIND),
        APPLY_N: np.repeat([shared, own], size.batch),
        APPLY_ROW: np.tile(rows, 2),
        APPLY_PAGE: np.repeat([0, shared], size.batch),
        APPLY_SLOT: np.concatenate([empty, first]),
    }
    s["desc"] = _desc(size, columns)
    total = size.pages * size.batch
    s.update(page_size=size.page_size, total=total, max_pages=shared, full_top=0, swa_top=0)
    # another count than before the call, or a call that writes no tops would pass
    s["tops"].fill_(1)
    offset = torch.arange(size.page_size, device=s["slab"].device)
    s["values"] = (s["slab"].long()[:, None] * size.page_size + offset).reshape(-1)
    ends = [(0, shared * size.page_size)]
    s["paths"] = [[*ends, (n * size.page_size, (n + own) * size.page_size)] for n in first.tolist()]
    versions = (
        Version(OURS, _ours, _read_bind, _BOUND, captured=True),
        Version(TORCH, _torch_bind, _read_bind, _BOUND, captured=True),
        Version(SGLANG, _sglang_bind, _sglang_read_bind, ("req_to_token",)),
    )
    return Case(s, versions, min_bytes_bind(2 * size.batch, total, slots))


def make_free(size: Size) -> Case:
    """Each row frees all its pages: tombstones, then those of its window."""
    rng = rng_of(size)
    lens = aligned(rng, size, 1, size.pages)
    frontier = np.maximum(lens - WINDOW, 0) // size.page_size * size.page_size
    spare = 8
    s = pools(size, rng, computed=lens, allocated=lens, frontier=frontier, spare=spare)
    add_token_pools(s, size.page_size)
    rows = np.array(s["req_rows"])
    pages, dead = lens[rows] // size.page_size, frontier[rows] // size.page_size
    counts = np.stack([dead, pages - dead], axis=1).reshape(-1)
    live = np.stack([np.zeros_like(dead), pages - dead], axis=1).reshape(-1)
    swa_pos = spare + np.cumsum(live) - live
    columns = {
        APPLY_OP: np.full(2 * size.batch, FREE_ROW),
        APPLY_N: counts,
        APPLY_ROW: np.repeat(rows, 2),
        APPLY_PAGE: np.stack([np.zeros_like(dead), dead], axis=1).reshape(-1),
        APPLY_FULL_POS: spare + np.cumsum(counts) - counts,
        APPLY_SWA_POS: np.where(live > 0, swa_pos, -1),
    }
    s["desc"] = _desc(size, columns)
    s["slab"] = torch.zeros(1, dtype=torch.int32, device=size.device)
    total, total_live = int(counts.sum()), int(live.sum())
    s.update(page_size=size.page_size, total=total, max_pages=int(counts.max()))
    s.update(full_top=spare + total, swa_top=spare + total_live, host_lens=lens[rows].tolist())
    versions = (
        Version(OURS, _ours, _read_free, _FREED, captured=True),
        Version(TORCH, _torch_free, _read_free, _FREED),
        Version(SGLANG, _sglang_free, _sglang_read_free, ("full_to_swa",)),
    )
    return Case(s, versions, min_bytes_free(2 * size.batch, total, total_live))


BENCHES = (
    Bench("apply", "bind", "a cached prefix of two nodes bound into every row", make_bind),
    Bench("apply", "free", "all pages of every row freed, those of its window with SWA", make_free),
)
