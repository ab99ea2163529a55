"""Random inputs for every kernel, and one way to run them: each buffer on a canvas of garbage.

The pools are small next to the batch, so that page 0, the last page and every sentinel come up, and all
that an operation must not read (stack entries at or above the top, unused descriptor columns) is garbage.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvcache.kernels.layout import (
    ADOPT,
    ALLOCATED,
    APPLY_FIELDS,
    BIND,
    COMPUTED,
    DROP_ROW,
    DROP_SLOT,
    EXTEND_FIELDS,
    FREE_ROW,
    FREE_SLOT,
    FRONTIER,
    OWNED,
    ROW_FIELDS,
    SET_ROW,
    STORE,
)

GARBAGE = -(2**30)
BORDER = 64  # int32 entries on either side of a buffer: it stays 16-byte aligned

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Case:
    """One call of one operation: arrays in the order of its parameters, then its keyword arguments."""

    op: str
    arrays: dict[str, Array | None]
    scalars: dict[str, Any]


def run(case: Case, device: str = "cpu") -> dict[str, Array]:
    """Call the operation with each array on a canvas of garbage of its own; return the arrays after it.

    Raises AssertionError if anything outside an array was written.
    """
    canvases = {}
    views = {}
    for name, array in case.arrays.items():
        if array is None:
            continue
        dtype = torch.from_numpy(array).dtype
        garbage = max(GARBAGE, torch.iinfo(dtype).min)
        canvas = torch.full((array.size + 2 * BORDER,), garbage, dtype=dtype, device=device)
        view = canvas[BORDER : BORDER + array.size].view(array.shape)
        view.copy_(torch.from_numpy(array))
        canvases[name], views[name] = canvas, view
    function = getattr(importlib.import_module(f"kvcache.kernels.{case.op}"), case.op)
    by_position = [views.get(name) for name in case.arrays if name != "out"]
    by_name = {name: view for name, view in views.items() if name == "out"}
    function(*by_position, **by_name, **case.scalars)
    for name, canvas in canvases.items():
        border = torch.cat([canvas[:BORDER], canvas[canvas.numel() - BORDER :]])
        assert (border == GARBAGE).all(), f"{case.op} wrote outside {name}"
    return {name: view.cpu().numpy().copy() for name, view in views.items()}


def num_launches(case: Case) -> int:
    """Launches that one call of the operation takes: one, or none if there is nothing to do."""
    sizes = [case.scalars[name] for name in ("num_rows", "num") if name in case.scalars]
    slots = case.arrays.get("slots")
    return int(all(size > 0 for size in sizes) and (slots is None or slots.size > 0))


def assert_same(got: dict[str, Array], want: dict[str, Array]) -> None:
    """Compare all arrays of two runs bit for bit."""
    assert got.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name, strict=True)


def _stack(rng: np.random.Generator, pages: Array, size: int) -> Array:
    """Return a stack of `size` entries that holds `pages` in random order; garbage above them."""
    stack = np.full(size, GARBAGE, np.int32)
    stack[: pages.size] = rng.permutation(pages)
    return stack


def _row_state(rng: np.random.Generator, max_rows: int) -> Array:
    return rng.integers(0, 100, (ROW_FIELDS, max_rows), dtype=np.int32)


def extend_case(seed: int, *, num_rows: int, max_pages: int, has_swa: bool = True) -> Case:
    """Rows that get 0 to `max_pages` pages each, at least one of them `max_pages`."""
    rng = np.random.default_rng(seed)
    max_rows = num_rows + 3
    num_pages = rng.integers(0, max_pages + 1, num_rows)
    if num_rows:
        num_pages[rng.integers(num_rows)] = max_pages
    total = int(num_pages.sum())
    full_top = total + int(rng.integers(0, 3))
    swa_top = total + int(rng.integers(0, 3)) if has_swa else 0
    full_pages, swa_pages = full_top + 5, (swa_top + 4 if has_swa else 0)
    desc = np.full((EXTEND_FIELDS, num_rows + 2), GARBAGE, np.int32)
    desc[0, :num_rows] = rng.permutation(max_rows)[:num_rows]
    desc[1, :num_rows] = rng.integers(0, 4, num_rows)
    desc[2, :num_rows] = num_pages
    desc[3, :num_rows] = np.cumsum(num_pages) - num_pages
    desc[4, :num_rows] = rng.integers(0, 10**6, num_rows)
    free_full = rng.permutation(full_pages)[:full_top] + 1
    free_swa = rng.permutation(swa_pages)[:swa_top] + 1
    swa_map = rng.integers(1, 100, full_pages + 1, dtype=np.int32)
    swa_map[free_full] = 0
    arrays: dict[str, Array | None] = {
        "desc": desc,
        "page_table": np.full((max_rows, max_pages + 4), GARBAGE, np.int32),
        "full_stack": _stack(rng, free_full, full_pages),
        "swa_stack": _stack(rng, free_swa, swa_pages),
        "swa_map": swa_map if has_swa else np.zeros(0, np.int32),
        "row_state": _row_state(rng, max_rows),
        "tops": np.full(2, GARBAGE, np.int32),
    }
    scalars = {
        "num_rows": num_rows,
        "full_top": full_top,
        "swa_top": swa_top,
        "total": total,
        "max_pages": max_pages,
        "has_swa": has_swa,
    }
    return Case("extend", arrays, scalars)


def step_case(seed: int, *, num_rows: int, page_size: int, has_swa: bool = True) -> Case:
    """Rows of which a third begin a page, a third grow or not within one, a third need nothing."""
    rng = np.random.default_rng(seed)
    max_rows = num_rows + 3
    rows = rng.permutation(max_rows)[:num_rows].astype(np.int32)
    kind = rng.integers(0, 3, num_rows)
    computed = rng.integers(0, 6 * page_size + 1, num_rows)
    computed = np.where(kind == 0, computed // page_size * page_size, computed)
    spare = rng.integers(1, page_size + 2, num_rows)
    allocated = np.where(kind == 2, computed + spare, computed)
    state = _row_state(rng, max_rows)
    state[COMPUTED, rows] = computed
    state[ALLOCATED, rows] = allocated
    full_top = num_rows + int(rng.integers(0, 3))
    swa_top = num_rows + int(rng.integers(0, 3)) if has_swa else 0
    full_pages, swa_pages = full_top + 5, (swa_top + 4 if has_swa else 0)
    free_full = rng.permutation(full_pages)[:full_top] + 1
    free_swa = rng.permutation(swa_pages)[:swa_top] + 1
    swa_map = rng.integers(1, 100, full_pages + 1, dtype=np.int32)
    swa_map[free_full] = 0
    arrays: dict[str, Array | None] = {
        "rows": np.concatenate([rows, np.full(2, GARBAGE, np.int32)]),
        "page_table": np.full((max_rows, 8), GARBAGE, np.int32),
        "full_stack": _stack(rng, free_full, full_pages),
        "swa_stack": _stack(rng, free_swa, swa_pages),
        "swa_map": swa_map if has_swa else np.zeros(0, np.int32),
        "row_state": state,
        "tops": np.array([full_top, swa_top], np.int32),
    }
    scalars = {"num_rows": num_rows, "page_size": page_size, "has_swa": has_swa}
    return Case("step", arrays, scalars)


def advance_case(seed: int, *, num_rows: int, has_lens: bool) -> Case:
    """Rows whose computed length becomes the allocated one, or a random one."""
    rng = np.random.default_rng(seed)
    max_rows = num_rows + 3
    rows = rng.permutation(max_rows)[:num_rows].astype(np.int32)
    lens = rng.integers(0, 10**6, num_rows, dtype=np.int32)
    arrays: dict[str, Array | None] = {
        "rows": np.concatenate([rows, np.full(2, GARBAGE, np.int32)]),
        "lens": np.concatenate([lens, np.full(1, GARBAGE, np.int32)]) if has_lens else None,
        "row_state": _row_state(rng, max_rows),
    }
    return Case("advance", arrays, {"num_rows": num_rows})


def slide_case(
    seed: int, *, num_rows: int, page_size: int, max_pages: int, keep: int, bigram: bool = False
) -> Case:
    """Rows of up to `max_pages` pages whose old frontier lies anywhere, ahead of the new one too."""
    rng = np.random.default_rng(seed)
    max_rows = num_rows + 3
    rows = rng.permutation(max_rows)[:num_rows].astype(np.int32)
    computed = rng.integers(0, max_pages * page_size + 1, num_rows)
    if num_rows:
        computed[rng.integers(num_rows)] = max_pages * page_size
    computed_pages = computed // page_size
    owned_pages = rng.integers(0, computed_pages + 1) * (rng.random(num_rows) < 0.5)
    old_pages = rng.integers(0, computed_pages + 1) * (rng.random(num_rows) < 0.5)
    state = _row_state(rng, max_rows)
    state[COMPUTED, rows] = computed
    state[OWNED, rows] = owned_pages * page_size
    state[FRONTIER, rows] = old_pages * page_size
    full_pages = max_rows * max_pages + 3
    swa_pages = full_pages + 4
    page_table = rng.permutation(full_pages)[: max_rows * max_pages].astype(np.int32) + 1
    # every page but 0 has an SWA page of its own; what is pushed although it must not be is seen
    swa_map = np.zeros(full_pages + 1, np.int32)
    swa_map[1:] = rng.permutation(swa_pages)[:full_pages] + 1
    swa_top = int(rng.integers(0, 5))
    arrays: dict[str, Array | None] = {
        "rows": np.concatenate([rows, np.full(2, GARBAGE, np.int32)]),
        "page_table": page_table.reshape(max_rows, max_pages),
        "swa_map": swa_map,
        "swa_stack": _stack(rng, np.arange(1, swa_top + 1), swa_pages),
        "row_state": state,
        "tops": np.array([7, swa_top], np.int32),
    }
    scalars = {"num_rows": num_rows, "page_size": page_size, "keep": keep, "bigram": bigram}
    return Case("slide", arrays, scalars)


_OPS = (BIND, STORE, ADOPT, FREE_ROW, FREE_SLOT, DROP_ROW, DROP_SLOT, SET_ROW)
_OPS_WITHOUT_SWA = (BIND, STORE, FREE_ROW, FREE_SLOT, SET_ROW)


def apply_case(
    seed: int, *, num: int, max_pages: int, has_swa: bool = True, ops: tuple[int, ...] | None = None
) -> Case:
    """Independent page ranges of all ops, each in a row and in slots of its own."""
    rng = np.random.default_rng(seed)
    max_rows, pages_per_row = num + 2, max_pages + 4
    slab_slots = num * (max_pages + 1) + 3
    full_pages = max_rows * pages_per_row + slab_slots
    ids = rng.permutation(full_pages).astype(np.int32) + 1
    page_table = ids[: max_rows * pages_per_row].reshape(max_rows, pages_per_row)
    slab = ids[max_rows * pages_per_row :]
    swa_map = np.zeros(full_pages + 1, np.int32)
    swa_map[1:] = rng.permutation(full_pages) + 1
    desc = np.full((APPLY_FIELDS, num + 4), GARBAGE, np.int32)
    rows = rng.permutation(max_rows)
    full_base, swa_base = (int(x) for x in rng.integers(0, 4, 2))
    full_top, swa_top = full_base, swa_base if has_swa else 0
    slot = 1
    largest = 0
    for i in range(num):
        op = int(rng.choice(ops or (_OPS if has_swa else _OPS_WITHOUT_SWA)))
        n = max_pages if i == num // 2 else int(rng.integers(0, max_pages + 1))
        row, page = int(rows[i]), int(rng.integers(0, 4))
        if op == SET_ROW:
            lens = rng.integers(0, 10**6, 4)
            desc[:, 2 + i] = (op, lens[0], row, lens[1], lens[2], lens[3], GARBAGE)
            continue
        largest = max(largest, n)
        pushes_full = op in (ADOPT, FREE_ROW, FREE_SLOT)
        pushes_swa = op in (DROP_ROW, DROP_SLOT) or (
            op in (FREE_ROW, FREE_SLOT) and has_swa and rng.random() < 0.6
        )
        full_pos, swa_pos = full_top if pushes_full else GARBAGE, swa_top if pushes_swa else -1
        desc[:, 2 + i] = (op, n, row, page, slot, full_pos, swa_pos)
        if op == ADOPT:
            swa_map[slab[slot : slot + n]] = 0
        full_top += n * pushes_full
        swa_top += n * pushes_swa
        slot += n + int(rng.integers(0, 2))
    arrays: dict[str, Array | None] = {
        "desc": desc,
        "page_table": page_table,
        "slab": slab,
        "swa_map": swa_map if has_swa else np.zeros(0, np.int32),
        "full_stack": _stack(rng, np.arange(1, full_base + 1), full_top + 3),
        "swa_stack": _stack(rng, np.arange(1, swa_base + 1), swa_top + 3)
        if has_swa
        else np.zeros(0, np.int32),
        "row_state": _row_state(rng, max_rows),
        "tops": np.full(2, GARBAGE, np.int32),
    }
    scalars = {
        "start": 2,
        "num": num,
        "max_pages": largest,
        "full_top": full_top,
        "swa_top": swa_top,
    }
    return Case("apply", arrays, scalars)


def translate_case(
    seed: int, *, shape: tuple[int, ...], page_size: int, dtype: npt.DTypeLike = np.int64
) -> Case:
    """Slots of a pool of 16 pages, a quarter of them sentinels; a third of the pages has no SWA page."""
    rng = np.random.default_rng(seed)
    full_pages = 16
    swa_map = rng.permutation(full_pages + 1).astype(np.int32)
    swa_map[rng.random(full_pages + 1) < 0.3] = 0
    swa_map[rng.random(full_pages + 1) < 0.1] = -1
    swa_map[0] = 5  # page 0 reads 0 whatever its entry says
    end = (full_pages + 1) * page_size
    slots = rng.integers(0, end, shape)
    sentinels = rng.choice([GARBAGE, -page_size, -1, 0, page_size - 1, page_size, end - 1], shape)
    slots = np.where(rng.random(shape) < 0.25, sentinels, slots).astype(dtype)
    arrays: dict[str, Array | None] = {
        "slots": slots,
        "swa_map": swa_map,
        "out": np.full(shape, GARBAGE, dtype),
    }
    return Case("translate", arrays, {"page_size": page_size})
