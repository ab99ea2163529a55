"""Random inputs for the kernels that fill attention views; used like kernel_cases.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from kernel_cases import GARBAGE, Array, Case

from kvcache.kernels.layout import ALLOCATED, COMPUTED, ROW_FIELDS


def _rows_and_pages(
    rng: np.random.Generator,
    num_rows: int,
    num_lanes: int,
    page_size: int,
    max_pages: int,
    pages_per_row: int,
    window: int,
) -> dict[str, Array | None]:
    """Rows that decode, prefill, hold nothing, or hold drafts; a fifth of the pages has no SWA.

    Page table entries that a row does not hold, and rows of padding lanes, are garbage.
    """
    max_rows = num_lanes + 3
    rows = np.full(num_lanes, GARBAGE, np.int32)
    rows[:num_rows] = rng.permutation(max_rows)[:num_rows]
    used = rows[:num_rows]
    most = max_pages * page_size
    allocated = rng.integers(0, most + 1, num_rows)
    allocated[rng.random(num_rows) < 0.15] = 0
    if num_rows:
        # the widest row is the last one of the page table: a read beyond it leaves the tensor
        widest = int(rng.integers(num_rows))
        allocated[widest] = most
        rows[:num_rows] = np.where(used == max_rows - 1, used[widest], used)
        rows[widest] = max_rows - 1
    chunk = np.where(rng.random(num_rows) < 0.6, 1, rng.integers(0, most + 1, num_rows))
    computed = np.maximum(allocated - chunk, 0)
    state = np.full((ROW_FIELDS, max_rows), GARBAGE, np.int32)
    state[COMPUTED, used] = computed
    state[ALLOCATED, used] = allocated
    full_pages = max(num_rows * max_pages // 2, 3)  # rows share pages
    page_table = np.full((max_rows, pages_per_row), GARBAGE, np.int32)
    for row, length in zip(used, allocated, strict=True):
        held = -(-int(length) // page_size)
        page_table[row, :held] = rng.integers(1, full_pages + 1, held)
    swa_map = np.zeros(0, np.int32)
    if window:
        swa_map = rng.permutation(full_pages + 1).astype(np.int32) + 1
        swa_map[rng.random(full_pages + 1) < 0.2] = 0
        swa_map[0] = 77  # padding reads 0 whatever its entry says
    return {
        "rows": rows,
        "num_rows": np.array([num_rows], np.int32),
        "lens": None,
        "page_table": page_table,
        "swa_map": swa_map,
        "row_state": state,
    }


def _some_lens(rng: np.random.Generator, arrays: dict[str, Array | None], num_rows: int) -> Array:
    """Lengths between computed and allocated, both included; garbage in padding lanes."""
    rows, state = arrays["rows"], arrays["row_state"]
    assert rows is not None
    assert state is not None
    lens = np.full(rows.shape[0], GARBAGE, np.int32)
    used = rows[:num_rows]
    lens[:num_rows] = rng.integers(state[COMPUTED, used], state[ALLOCATED, used] + 1)
    return lens


def fill_table_case(
    seed: int,
    *,
    num_rows: int,
    page_size: int,
    max_pages: int,
    window: int = 0,
    has_lens: bool = False,
    num_lanes: int | None = None,
    width: int | None = None,
    aligned: bool = True,
) -> Case:
    """A table of `num_lanes` lanes (default: two more than rows) and `width` columns (default: enough)."""
    rng = np.random.default_rng(seed)
    num_lanes = num_rows + 2 if num_lanes is None else num_lanes
    width = -(-max_pages // 16) * 16 if width is None else width
    pages_per_row = -(-max_pages // 16) * 16 + (0 if aligned else 3)
    arrays = _rows_and_pages(rng, num_rows, num_lanes, page_size, max_pages, pages_per_row, window)
    if has_lens:
        arrays["lens"] = _some_lens(rng, arrays, num_rows)
    arrays["table"] = np.full((num_lanes + 1, width + 16), GARBAGE, np.int32)
    arrays["cache_seqlens"] = np.full(num_lanes + 1, GARBAGE, np.int32)
    arrays["window_start"] = np.full(num_lanes + 2, GARBAGE, np.int32)
    scalars: dict[str, Any] = {
        "num_lanes": num_lanes,
        "width": width,
        "page_size": page_size,
        "window": window,
    }
    return Case("fill_table", arrays, scalars)


def fill_indices_case(
    seed: int,
    *,
    num_rows: int,
    page_size: int,
    max_pages: int,
    unit: int,
    window: int = 0,
    has_lens: bool = False,
    num_lanes: int | None = None,
    dtype: npt.DTypeLike = np.int32,
) -> Case:
    """Lists of pages or token slots; `indices` has room for what the rows hold and no more."""
    rng = np.random.default_rng(seed)
    num_lanes = num_rows + 2 if num_lanes is None else num_lanes
    arrays = _rows_and_pages(rng, num_rows, num_lanes, page_size, max_pages, max_pages, window)
    rows, state = arrays["rows"], arrays["row_state"]
    assert rows is not None
    assert state is not None
    lens = state[ALLOCATED, rows[:num_rows]]
    if has_lens:
        arrays["lens"] = _some_lens(rng, arrays, num_rows)
        lens = arrays["lens"][:num_rows]
    first = np.zeros_like(lens)
    if window:
        first = np.maximum(state[COMPUTED, rows[:num_rows]] + 1 - window, 0) // unit
    counts = -(-lens // unit) - first
    arrays["indptr"] = np.full(num_lanes + 2, GARBAGE, np.int32)
    arrays["indices"] = np.full(int(counts.sum()), GARBAGE, dtype)
    arrays["last_page_len"] = np.full(num_lanes + 1, GARBAGE, np.int32)
    arrays["window_start"] = np.full(num_lanes + 2, GARBAGE, np.int32)
    scalars: dict[str, Any] = {
        "num_lanes": num_lanes,
        "max_entries": int(counts.max(initial=0)),
        "page_size": page_size,
        "unit": unit,
        "window": window,
    }
    return Case("fill_indices", arrays, scalars)
