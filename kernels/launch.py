"""What every operation shares: lazy Triton, the choice of kernel or twin, cheap argument checks.

A kernel is decorated when it is first launched, so importing kvcache never imports triton. Triton
launches on the current device: on a machine with several GPUs the caller makes the tensors' device
the current one.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from kvcache.checks import check_tensor
from kvcache.errors import InvalidInputError

# programs per descriptor at most: a longer page range is walked in strides, so the grid stays small
MAX_PROGRAMS_PER_RANGE = 8


class Kernel:
    """A Triton kernel that becomes a `triton.jit` function at its first launch.

    The defining module needs `from __future__ import annotations`. The body may use `tl`, and every
    module constant it names that is a plain int (op codes, field numbers): Triton sees a copy of
    the module's globals in which these are `tl.constexpr`, while the module itself, and its numba
    twin, keep the ints.
    """

    def __init__(self, function: Callable[..., Any], do_not_specialize: tuple[str, ...]) -> None:
        self.function = function
        self.do_not_specialize = do_not_specialize
        self._jit: Any = None

    @property
    def jit(self) -> Any:
        """The `triton.JITFunction` (or, under TRITON_INTERPRET=1, the interpreted function)."""
        if self._jit is None:
            self._jit = self.decorate()
        return self._jit

    def decorate(self) -> Any:
        """Return a fresh `triton.jit` function, for callers that compile for several targets."""
        import triton
        import triton.language as tl

        source = self.function
        namespace = {**source.__globals__, "tl": tl}
        for name in source.__code__.co_names:
            value = namespace.get(name)
            if type(value) is int:
                namespace[name] = tl.constexpr(value)
        function = types.FunctionType(source.__code__, namespace, source.__name__)
        function.__annotations__ = dict(source.__annotations__)
        function.__doc__ = source.__doc__
        function.__module__ = source.__module__
        function.__qualname__ = source.__qualname__
        return triton.jit(function, do_not_specialize=list(self.do_not_specialize))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.jit[grid]


def kernel(*, do_not_specialize: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Kernel]:
    """Decorator: keep a Triton kernel as plain Python until its first launch."""

    def wrap(function: Callable[..., Any]) -> Kernel:
        return Kernel(function, do_not_specialize)

    return wrap


def takes_kernel(tensor: torch.Tensor) -> bool:
    """Whether an operation on `tensor` launches its kernel (True) or runs its CPU twin (False)."""
    return not tensor.is_cpu


def register_limit(most: int) -> dict[str, int]:
    """Launch options that keep a kernel at `most` registers a thread; AMD has none, and needs none."""
    return {} if torch.version.hip else {"maxnreg": most}


def warps(num_threads: int) -> int:
    """Return the warps of `num_threads` threads, so that a block gives each thread 16 bytes on any GPU."""
    return num_threads // (64 if torch.version.hip else 32)


def check_operands(*operands: tuple[str, torch.Tensor, int]) -> None:
    """Raise InvalidInputError unless all are contiguous int32 tensors on the first one's device.

    Args:
        operands: (name, tensor, rank) of each. Only attributes are read, never values.
    """
    device = operands[0][1].device
    for name, x, ndim in operands:
        if (
            x.dtype is not torch.int32
            or x.ndim != ndim
            or x.device != device
            or not x.is_contiguous()
        ):
            check_tensor(name, x, ndim=ndim, dtype=torch.int32, device=device)


def check_range(name: str, value: int, low: int, high: int) -> None:
    """Raise InvalidInputError unless low <= value <= high."""
    if not low <= value <= high:
        raise InvalidInputError(f"{name} must be in [{low}, {high}], got {value}")


def check_length(name: str, actual: int, expected: int) -> None:
    """Raise InvalidInputError unless a dimension has the expected length."""
    if actual != expected:
        raise InvalidInputError(f"{name} must be {expected}, got {actual}")


def check_page_size(page_size: int) -> None:
    """Raise InvalidInputError unless page_size >= 1."""
    if page_size < 1:
        raise InvalidInputError(f"page_size must be >= 1, got {page_size}")


def check_window(window: int, swa_map: torch.Tensor) -> None:
    """Raise InvalidInputError if window < 0, or > 0 where there is no SWA pool (an empty swa_map)."""
    if window < 0:
        raise InvalidInputError(f"window must be >= 0, got {window}")
    if window > 0 and swa_map.shape[0] == 0:
        raise InvalidInputError("swa_map must have an entry per Full page, got length 0")


def range_programs(max_pages: int, block: int) -> int:
    """Return the grid's second dimension for page ranges of at most `max_pages` pages."""
    return max(1, min(MAX_PROGRAMS_PER_RANGE, -(-max_pages // block)))
