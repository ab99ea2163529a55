"""Move the computed length of a batch of rows, after the forward that wrote their KV.

Source: none; SGLang v0.5.20 keeps this length on the host, so its out-of-window pass runs there.
Reference: advance_twin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvcache.compiled import compiled
from kvcache.kernels import launch
from kvcache.kernels.layout import ALLOCATED, COMPUTED, ROW_FIELDS

if TYPE_CHECKING:
    import triton.language as tl

# one row a thread of 4 warps, two for a batch of 256: too little work to spread further
_BLOCK = 128


@launch.kernel(do_not_specialize=("rows_ptr", "lens_ptr", "num_rows", "max_rows"))
def _advance_kernel(
    rows_ptr,  # [num_rows] int32, in; distinct
    lens_ptr,  # [num_rows] int32, in, tokens; not read unless HAS_LENS
    row_state_ptr,  # [4, max_rows] int32, in and out
    num_rows,
    max_rows,
    HAS_LENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (cdiv(num_rows, BLOCK),). Each program moves one BLOCK of rows."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_range = offs < num_rows
    state_stride = tl.cast(max_rows, tl.int64)
    row = tl.load(rows_ptr + offs, mask=in_range, other=0)
    if HAS_LENS:
        new_computed = tl.load(lens_ptr + offs, mask=in_range, other=0)
    else:
        allocated_ptr = row_state_ptr + state_stride * ALLOCATED + row
        new_computed = tl.load(allocated_ptr, mask=in_range, other=0)
    tl.store(row_state_ptr + state_stride * COMPUTED + row, new_computed, mask=in_range)


@compiled
def advance_twin(rows: Any, lens: Any, row_state: Any, num_rows: int) -> None:
    """CPU twin of `advance` on int32 arrays (`lens` an array or None); the specification."""
    for i in range(num_rows):
        row = rows[i]
        if lens is None:
            row_state[COMPUTED, row] = row_state[ALLOCATED, row]
        else:
            row_state[COMPUTED, row] = lens[i]


def advance(
    rows: torch.Tensor,
    lens: torch.Tensor | None,
    row_state: torch.Tensor,
    *,
    num_rows: int,
) -> None:
    """Set computed = allocated, or computed = lens, for every row. One launch.

    Does not synchronize with the host: rows and lengths are not range-checked. num_rows 0 does
    nothing.

    Args:
        rows: [capacity] int32, row ids; the first `num_rows` are used and are distinct.
        lens: [>= num_rows] int32, tokens computed by each row (fewer than allocated after rejected
            draft tokens), or None: all that is allocated.
        row_state: [4, max_rows] int32; ALLOCATED is read, COMPUTED written.
        num_rows: rows in use.

    Raises:
        InvalidInputError: A tensor has a wrong rank, dtype, device, layout or length, or num_rows
            is not in [0, capacity].
    """
    launch.check_operands(("rows", rows, 1), ("row_state", row_state, 2))
    launch.check_length("row_state.shape[0]", row_state.shape[0], ROW_FIELDS)
    launch.check_range("num_rows", num_rows, 0, rows.shape[0])
    if lens is not None:
        launch.check_operands(("rows", rows, 1), ("lens", lens, 1))
        launch.check_range("num_rows", num_rows, 0, lens.shape[0])
    if num_rows == 0:
        return
    if launch.takes_kernel(row_state):
        _advance_kernel[(-(-int(num_rows) // _BLOCK),)](
            rows,
            rows if lens is None else lens,
            row_state,
            int(num_rows),
            int(row_state.shape[1]),
            HAS_LENS=lens is not None,
            BLOCK=_BLOCK,
            num_warps=4,
        )
    else:
        advance_twin(
            rows.numpy(), None if lens is None else lens.numpy(), row_state.numpy(), num_rows
        )
