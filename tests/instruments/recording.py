"""A Triton driver for a GPU that is not there: it compiles for a target and records launches.

Everything before the launch is the real path: argument binding, specialisation, cache, compiler.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver as active_driver

SM90 = GPUTarget("cuda", 90, 32)


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel's name, its grid, what it was compiled to, what it was given."""

    name: str
    grid: tuple[int, int, int]
    num_warps: int
    binary_hash: str
    args: tuple[Any, ...]  # constexprs included, tensors as they are


class _Utils:
    """The part of a driver that loads binaries; nothing is loaded."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": 232448,
            "max_num_regs": 65536,
            "multiprocessor_count": 132,
            "warpSize": 32,
            "sm_clock_rate": 1980000,
            "mem_clock_rate": 3201000,
            "mem_bus_width": 6144,
        }

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        """Return (module, function, registers, spills, most threads).

        There is no module: Triton would unload it through whatever driver is active at that time.
        """
        return None, name, 0, 0, 1024

    def unload_module(self, module: Any) -> None: ...

    def set_printf_fifo_size(self, size: int) -> None: ...


class RecordingDriver:
    """Compiles for `target`; `launches` lists what would have run."""

    def __init__(self, target: GPUTarget = SM90) -> None:
        self.target = target
        self.utils = _Utils()
        self.launches: list[Launch] = []
        self.launcher_cls = self._launcher()

    def execute(self, source: Any, metadata: Any, grid: tuple[int, int, int], args: Any) -> None:
        """Hook for drivers that do run the kernel."""

    def _launcher(self) -> type:
        owner = self

        class Launcher:
            def __init__(self, source: Any, metadata: Any) -> None:
                self.source, self.metadata = source, metadata

            def __call__(
                self,
                x: int,
                y: int,
                z: int,
                stream: int,
                function: str,
                packed: Any,
                launch_metadata: Any,
                enter: Callable[[Any], None] | None,
                leave: Callable[[Any], None] | None,
                *args: Any,
            ) -> None:
                if enter is not None:
                    enter(launch_metadata)
                meta = self.metadata
                launch = Launch(function, (x, y, z), meta.num_warps, meta.hash, args)
                owner.launches.append(launch)
                owner.execute(self.source, meta, (x, y, z), args)
                if leave is not None:
                    leave(launch_metadata)

        return Launcher

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None: ...

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def map_python_to_cpp_type(self, name: str) -> str:
        return name


@contextlib.contextmanager
def driven_by(driver: RecordingDriver) -> Iterator[None]:
    """Make `driver` Triton's active driver within the context."""
    before = active_driver._active
    active_driver.set_active(driver)
    try:
        yield
    finally:
        active_driver._active = before
