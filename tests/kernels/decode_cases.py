"""Random inputs for the kernels of a captured decode step, faults included; used like kernel_cases.py."""

from __future__ import annotations

import numpy as np
from kernel_cases import GARBAGE, Array, Case, slide_case, step_case


def _on_device(case: Case, op: str, num_rows: int) -> tuple[dict[str, Array | None], Array]:
    """The arrays of a `step` or `slide` case with the number of rows in an array, and its row list."""
    arrays = dict(case.arrays)
    state = arrays["row_state"]
    assert state is not None
    rows = np.full(state.shape[1], GARBAGE, np.int32)
    given = arrays["rows"]
    assert given is not None
    rows[:num_rows] = given[:num_rows]
    head: dict[str, Array | None] = {"rows": rows, "num_rows": np.array([num_rows], np.int32)}
    return {**head, **{k: v for k, v in arrays.items() if k != "rows"}}, rows


def decode_step_case(
    seed: int,
    *,
    num_rows: int,
    page_size: int,
    has_swa: bool = True,
    missing: int = 0,
    full_row: int | None = None,
    error: int = 0,
) -> Case:
    """As step_case, but `missing` pages too few, a row whose page table ends, or an error from before."""
    case = step_case(seed, num_rows=num_rows, page_size=page_size, has_swa=has_swa)
    arrays, rows = _on_device(case, "decode_step", num_rows)
    state, tops = arrays["row_state"], arrays["tops"]
    assert state is not None
    assert tops is not None
    used = rows[:num_rows]
    needed = int(np.sum((state[0, used] % page_size == 0) & (state[0, used] >= state[1, used])))
    if missing:
        rng = np.random.default_rng(seed)
        pool = int(rng.integers(0, 2)) if has_swa else 0
        tops[pool] = max(needed - missing, 0)
    if full_row is not None:
        table = arrays["page_table"]
        assert table is not None
        row = used[full_row]
        state[0, row] = state[1, row] = table.shape[1] * page_size
    arrays["error"] = np.array([error, 5 if error else 0], np.int32)
    return Case("decode_step", arrays, {"page_size": page_size, "has_swa": has_swa})


def decode_slide_case(
    seed: int,
    *,
    num_rows: int,
    page_size: int,
    max_pages: int,
    keep: int,
    bigram: bool = False,
    has_swa: bool = True,
    room: int | None = None,
    error: int = 0,
) -> Case:
    """As slide_case, with computed lengths that are to come, or a stack with room for `room` pages."""
    case = slide_case(
        seed,
        num_rows=num_rows,
        page_size=page_size,
        max_pages=max_pages,
        keep=keep,
        bigram=bigram,
    )
    arrays, rows = _on_device(case, "decode_slide", num_rows)
    state, stack, tops = arrays["row_state"], arrays["swa_stack"], arrays["tops"]
    assert state is not None
    assert stack is not None
    assert tops is not None
    used = rows[:num_rows]
    state[1, used] = state[0, used]
    state[0, used] = GARBAGE
    if room is not None:
        arrays["swa_stack"] = stack[: int(tops[1]) + room].copy()
    if not has_swa:
        arrays["swa_map"] = arrays["swa_stack"] = np.zeros(0, np.int32)
    arrays["error"] = np.array([error, 5 if error else 0], np.int32)
    scalars = {"page_size": page_size, "keep": keep, "bigram": bigram, "has_swa": has_swa}
    return Case("decode_slide", arrays, scalars)
