"""`kernel[grid](cpu_tensors)` through Triton's real JIT, executed natively on the CPU."""

from __future__ import annotations

from typing import Any

from instruments.cpu_lowering import CpuKernel
from instruments.recording import RecordingDriver


class CpuDriver(RecordingDriver):
    """Records launches and runs them, with `threads` threads over the grid's first dimension."""

    def __init__(self, threads: int = 1) -> None:
        super().__init__()
        self.threads = threads
        self.kernels: dict[str, CpuKernel] = {}

    def execute(self, source: Any, metadata: Any, grid: tuple[int, int, int], args: Any) -> None:
        kernel = self.kernels.get(metadata.hash)
        if kernel is None:
            kernel = CpuKernel(source, source.fn.__name__, self.threads)
            self.kernels[metadata.hash] = kernel
        types = source.signature.values()
        kernel(grid, *[x for t, x in zip(types, args, strict=True) if t != "constexpr"])
