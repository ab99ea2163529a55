"""Kernels with one planted fault each, for the sanitizer to find. The first one is sound."""

import triton
import triton.language as tl


@triton.jit
def sound(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < n, other=0), mask=offs < n)


@triton.jit
def store_without_mask(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < n, other=0) + 1)


@triton.jit
def counter_without_atomic(x_ptr, stack_ptr, top_ptr):
    top = tl.load(top_ptr)
    tl.store(stack_ptr + top, tl.load(x_ptr + tl.program_id(0)))
    tl.store(top_ptr, top + 1)


@triton.jit
def shared_page_freed_twice(page_ptr, map_ptr, stack_ptr, top_ptr):
    page = tl.load(page_ptr + tl.program_id(0))
    swa_page = tl.load(map_ptr + page)
    if swa_page > 0:
        top = tl.atomic_add(top_ptr, 1)
        tl.store(stack_ptr + top, swa_page)
        tl.store(map_ptr + page, 0)


@triton.jit
def gather_past_the_end(index_ptr, x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    index = tl.load(index_ptr + offs, mask=offs < n, other=0)
    tl.store(out_ptr + offs, tl.load(x_ptr + index, mask=offs < n, other=0), mask=offs < n)


@triton.jit
def masked_lane_summed(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + offs, mask=offs < n), axis=0))


@triton.jit
def two_lanes_one_address(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs // 2, tl.load(x_ptr + offs))


@triton.jit
def neighbour_read_in_place(x_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + offs, tl.load(x_ptr + offs + BLOCK))


@triton.jit
def index_overflow(x_ptr, out_ptr, stride):
    tl.store(out_ptr, tl.load(x_ptr) * stride)


@triton.jit
def false_assert(x_ptr):
    tl.device_assert(tl.load(x_ptr) < 0, "x must be negative")


@triton.jit
def false_assumption(x_ptr, out_ptr):
    tl.assume(tl.load(x_ptr) < 0)
    tl.store(out_ptr, 1)


@triton.jit
def ticket_order_shows(x_ptr, out_ptr, top_ptr):
    top = tl.atomic_add(top_ptr, 1)
    tl.store(out_ptr + top, tl.load(x_ptr + tl.program_id(0)))


@triton.jit
def read_back(x_ptr, out_ptr):
    tl.store(x_ptr, 7)
    tl.store(out_ptr, tl.load(x_ptr))


@triton.jit
def read_back_after_barrier(x_ptr, out_ptr):
    tl.store(x_ptr, 7)
    tl.debug_barrier()
    tl.store(out_ptr, tl.load(x_ptr))
