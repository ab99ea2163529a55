"""Token slots of the Full pool -> token slots of the SWA pool, through the map of pages.

Source: SGLang v0.5.20, mem_cache/allocator/swa.py, translate_loc_from_full_to_swa (its map is per
token).
Reference: translate_twin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvcache.checks import check_tensor
from kvcache.compiled import compiled
from kvcache.errors import InvalidInputError
from kvcache.kernels import launch

if TYPE_CHECKING:
    import triton.language as tl

# 1024 int64 slots: two 16-byte loads a thread of 4 warps, and few programs for a long table
_BLOCK = 1024


@launch.kernel(do_not_specialize=("num_slots",))
def _translate_kernel(
    slots_ptr,  # [num_slots] int32 or int64, in; <= 0: padding
    swa_map_ptr,  # [full_pages + 1] int32, in; 0: no SWA page
    out_ptr,  # [num_slots] of the dtype of slots, out; 0: no SWA slot
    num_slots,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (cdiv(num_slots, BLOCK),). Each program writes one BLOCK of `out`."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offs = start + tl.arange(0, BLOCK)
    # a whole block goes without masks: under a mask whose bound is not known to be a multiple of 16
    # Triton loads and stores one slot at a time
    if start + BLOCK <= num_slots:
        slot = tl.load(slots_ptr + offs)
        # padding, negative slots too, has a page <= 0 however the division rounds
        page = slot // P
        swa_page = tl.load(swa_map_ptr + page, mask=page > 0, other=0).to(slot.dtype)
        tl.store(out_ptr + offs, tl.where(swa_page > 0, swa_page * P + slot % P, 0))
    else:
        in_range = offs < num_slots
        slot = tl.load(slots_ptr + offs, mask=in_range, other=0)
        page = slot // P
        swa_page = tl.load(swa_map_ptr + page, mask=page > 0, other=0).to(slot.dtype)
        tl.store(out_ptr + offs, tl.where(swa_page > 0, swa_page * P + slot % P, 0), mask=in_range)


@compiled
def translate_twin(slots: Any, swa_map: Any, page_size: int, out: Any) -> None:
    """CPU twin of `translate` on flat arrays; the specification."""
    for i in range(slots.shape[0]):
        # padding, negative slots too, has a page <= 0
        page = slots[i] // page_size
        if page > 0 and swa_map[page] > 0:
            out[i] = swa_map[page] * page_size + slots[i] % page_size
        else:
            out[i] = 0


def translate(
    slots: torch.Tensor,
    swa_map: torch.Tensor,
    *,
    page_size: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Look up the SWA slot of every Full slot: swa_map[slot // P] * P + slot % P.

    0 where there is none: for a slot <= 0, a slot of page 0 (padding), a page without SWA. Does not
    synchronize with the host: a slot beyond the pool is the caller's fault and is not found out
    here.

    Args:
        slots: int32 or int64 of any shape, contiguous, token slots of the Full pool; <= 0 is
            padding.
        swa_map: [full_pages + 1] int32, SWA page under each Full page, 0 = none.
        page_size: tokens per page, >= 1.
        out: optional tensor like `slots` to write into; may be `slots` itself. Default: a new
            tensor.

    Returns:
        Token slots of the SWA pool, with the shape and dtype of `slots`; `out` if it was given.

    Raises:
        InvalidInputError: A tensor has a wrong shape, dtype, device or layout, page_size < 1, or
            there is no SWA pool (an empty swa_map).

    Example:
        >>> swa_map = torch.tensor([0, 0, 0, 5], dtype=torch.int32)
        >>> translate(torch.tensor([12, 15, 4, 2, -1]), swa_map, page_size=4)
        tensor([20, 23,  0,  0,  0])
    """
    launch.check_operands(("swa_map", swa_map, 1))
    if slots.dtype is not torch.int32 and slots.dtype is not torch.int64:
        raise InvalidInputError(f"slots must be torch.int32 or torch.int64, got {slots.dtype}")
    check_tensor("slots", slots, ndim=slots.ndim, dtype=slots.dtype, device=swa_map.device)
    launch.check_page_size(page_size)
    if swa_map.shape[0] == 0:
        raise InvalidInputError("swa_map must have an entry per Full page, got length 0")
    if out is None:
        out = torch.empty_like(slots)
    else:
        check_tensor("out", out, ndim=slots.ndim, dtype=slots.dtype, device=swa_map.device)
        if out.shape != slots.shape:
            raise InvalidInputError(f"out must be {tuple(slots.shape)}, got {tuple(out.shape)}")
    num_slots = slots.numel()
    if num_slots == 0:
        return out
    if launch.takes_kernel(slots):
        _translate_kernel[(-(-num_slots // _BLOCK),)](
            slots, swa_map, out, num_slots, P=int(page_size), BLOCK=_BLOCK, num_warps=4
        )
    else:
        translate_twin(
            slots.numpy().reshape(-1), swa_map.numpy(), page_size, out.numpy().reshape(-1)
        )
    return out
