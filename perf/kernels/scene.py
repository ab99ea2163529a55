"""Rows, pages and free stacks for the cases: as our pools hold them, and token by token as SGLang does."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvcache.bench.case import Size, State

Ints = npt.NDArray[np.int64]

# entries: page tables are padded to a multiple of it, as kvcache.device.view_buffers does
_ALIGN = 16


def on_device(array: npt.NDArray[Any], device: str) -> torch.Tensor:
    """Return a copy of an array as a tensor."""
    return torch.from_numpy(np.array(array)).to(device)


def int32(values: Any, device: str) -> torch.Tensor:
    return on_device(np.asarray(values, np.int32), device)


def rng_of(size: Size) -> np.random.Generator:
    """The generator of a case: the same size gives the same inputs."""
    return np.random.default_rng([size.batch, size.page_size, size.tokens])


def pools(
    size: Size,
    rng: np.random.Generator,
    *,
    computed: Ints,
    allocated: Ints,
    frontier: Ints | None = None,
    spare: int = 0,
) -> State:
    """Rows that hold pages of a pool, in no order, and the free stacks.

    Args:
        computed, allocated, frontier: [batch] tokens of each row; owned is 0.
        spare: free pages on each stack; the stacks also have room for all that rows hold.

    Returns:
        rows [batch], num_rows [1], page_table [batch, columns], swa_map, full_stack, swa_stack, row_state
        [4, batch], tops: int32, as in kernels/layout.py.
    """
    batch, page_size = size.batch, size.page_size
    held = -(-allocated // page_size)
    columns = -(-(max(size.pages, int(held.max())) + 2) // _ALIGN) * _ALIGN
    total = int(held.sum())
    num_pages = total + spare
    ids = rng.permutation(num_pages).astype(np.int32) + 1
    page_table = np.zeros((batch, columns), np.int32)
    page_table[np.arange(columns) < held[:, None]] = ids[:total]
    frontiers = np.zeros(batch, np.int64) if frontier is None else frontier
    swa_map = np.zeros(num_pages + 1, np.int32)
    swa_ids = rng.permutation(num_pages).astype(np.int32) + 1
    swa_map[ids[:total]] = swa_ids[:total]
    tombstones = page_table[np.arange(columns) < (frontiers // page_size)[:, None]]
    swa_map[tombstones] = 0
    full_stack, swa_stack = np.zeros((2, num_pages), np.int32)
    full_stack[:spare] = ids[total:]
    swa_stack[:spare] = swa_ids[total:]
    # row i of the page table is row i; the batch lists the rows in another order
    rows = rng.permutation(batch)
    state = np.stack([computed, allocated, np.zeros(batch, np.int64), frontiers])
    arrays = {
        "rows": rows,
        "num_rows": [batch],
        "page_table": page_table,
        "swa_map": swa_map,
        "full_stack": full_stack,
        "swa_stack": swa_stack,
        "row_state": state,
        "tops": [spare, spare],
    }
    made: State = {name: int32(array, size.device) for name, array in arrays.items()}
    # lengths of views: those allocated
    return {**made, "no_lens": None}


def add_token_pools(state: State, page_size: int) -> None:
    """Add what SGLang keeps: token slots of each row, a map of tokens, free pages as lists that grow.

    req_to_token [batch, tokens] int32, full_to_swa [slots] int64, full_free and swa_free [any] int64 (pages
    are taken from their front), req_rows: the rows of the batch as a list.
    """
    offset = torch.arange(page_size, device=state["page_table"].device)
    table = state["page_table"].long()[:, :, None] * page_size
    slots = torch.where(table > 0, table + offset, 0)
    state["req_to_token"] = slots.reshape(table.shape[0], -1).int()
    pages = state["swa_map"].long()[:, None] * page_size
    state["full_to_swa"] = torch.where(pages > 0, pages + offset, 0).reshape(-1)
    full_top, swa_top = state["tops"].tolist()
    state["full_free"] = state["full_stack"][:full_top].flip(0).long()
    state["swa_free"] = state["swa_stack"][:swa_top].flip(0).long()
    state["req_rows"] = state["rows"].tolist()


def pages_of_tokens(slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return the page of every page-aligned token of a table or map of token slots."""
    return (slots[..., ::page_size] // page_size).int()


def sorted_free(stack: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """Return the free pages of one of our stacks as a sorted list."""
    return stack[: int(top)].sort().values


def aligned(rng: np.random.Generator, size: Size, low_pages: int, high_pages: int) -> Ints:
    """Return a page-aligned length for each row, of `low_pages` up to `high_pages` pages, both included."""
    high = max(high_pages, low_pages)
    return rng.integers(low_pages, high + 1, size.batch) * size.page_size
