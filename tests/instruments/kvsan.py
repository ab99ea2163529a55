"""A sanitizer on Triton's interpreter: it sees what a CPU run of a kernel normally hides.

    bounds   loads and stores outside the tensors of the launch (each gets red zones of 1 MiB)
    races    an address that one program writes and another touches
    lanes    two lanes of one store that write different values to one address
    read back  a load of what the same program stored, without tl.debug_barrier() between
    poison   masked lanes of a load without other= hold garbage instead of zero
    debug    int32 overflow, tl.device_assert, tl.assume

Programs normally run in order, one after the other. `order=seed` shuffles them; `interleave=seed` switches
between them at every memory access. A result that depends on either is a bug of ours.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton.runtime.interpreter as interpreter
from triton.runtime.interpreter import TensorHandle, interpreter_builder

from instruments.interleave import Interleaver

RED_ZONE = 1 << 20  # bytes
READ, WRITE, ATOMIC = 0, 1, 2

_Addresses = npt.NDArray[np.uint64]


class KernelFault(AssertionError):
    """A kernel did something that is only right by luck."""


class _Launch:
    """The buffers and memory accesses of one launch."""

    def __init__(self) -> None:
        self.buffers: list[tuple[int, int, str]] = []  # first byte, end, parameter name
        self.accesses: list[tuple[_Addresses, int, int]] = []  # addresses, program, kind
        self.stored: dict[int, list[_Addresses]] = {}  # by program, since its last barrier

    def add_buffer(self, name: str, x: torch.Tensor) -> None:
        size = 0
        if x.numel():
            last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
            size = (last + 1) * x.element_size()
        self.buffers.append((x.data_ptr(), x.data_ptr() + size, name))

    def check_bounds(self, what: str, addresses: _Addresses, size: int) -> None:
        inside = np.zeros(addresses.shape, bool)
        for low, high, _ in self.buffers:
            inside |= (addresses >= low) & (addresses + np.uint64(size) <= high)
        if not inside.all():
            bad = int(addresses[~inside][0])
            low, high, name = min(self.buffers, key=lambda b: min(abs(bad - b[0]), abs(bad - b[1])))
            raise KernelFault(
                f"{what} out of bounds of `{name}`: element {(bad - low) // size} of "
                f"{(high - low) // size} ({int((~inside).sum())} lanes)"
            )

    def check_read_back(self, what: str, addresses: _Addresses, program: int) -> None:
        stored = self.stored.get(program)
        if stored and np.isin(addresses, np.concatenate(stored)).any():
            raise KernelFault(f"{what} reads back what this program stored, without a barrier")

    def check_races(self) -> None:
        if not self.accesses:
            return
        addresses = np.concatenate([a for a, _, _ in self.accesses])
        program = np.concatenate([np.full(a.shape, p) for a, p, _ in self.accesses])
        kind = np.concatenate([np.full(a.shape, k) for a, _, k in self.accesses])
        order = np.argsort(addresses, kind="stable")
        addresses, program, kind = addresses[order], program[order], kind[order]
        first = np.flatnonzero(np.r_[True, addresses[1:] != addresses[:-1]])

        def programs(of: npt.NDArray[np.bool_]) -> tuple[Any, Any]:
            """Smallest and largest program with such an access, for each address."""
            low = np.minimum.reduceat(np.where(of, program, 1 << 60), first)
            return low, np.maximum.reduceat(np.where(of, program, -1), first)

        low, high = programs(np.ones(kind.shape, bool))
        _, last_writer = programs(kind == WRITE)
        _, last_atomic = programs(kind == ATOMIC)
        _, last_plain = programs(kind != ATOMIC)
        mixed = (last_atomic >= 0) & (last_plain >= 0)
        bad = (low != high) & ((last_writer >= 0) | mixed)
        if bad.any():
            address = int(addresses[first[np.flatnonzero(bad)[0]]])
            at = addresses == address
            who = sorted({(int(p), "RWA"[k]) for p, k in zip(program[at], kind[at], strict=True)})
            low_end, name = next((b[0], b[2]) for b in self.buffers if b[0] <= address < b[1])
            raise KernelFault(
                f"race on `{name}` byte {address - low_end}: (program, access) {who[:6]}; "
                f"{int(bad.sum())} addresses shared"
            )


class _Arena:
    """Copies of the tensors of one launch between wide red zones: no stray index reaches a neighbour."""

    def __init__(self, launch: _Launch) -> None:
        self.launch = launch
        self.storages: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def move(self, name: str, x: Any) -> Any:
        if isinstance(x, tuple):
            moved = [self.move(name, y) for y in x]
            return type(x)(*moved) if hasattr(x, "_fields") else tuple(moved)
        if not isinstance(x, torch.Tensor):
            return x
        storage = x.untyped_storage()
        key = storage.data_ptr()
        if key not in self.storages:
            raw = torch.empty(0, dtype=torch.uint8).set_(storage)
            wide = torch.full((raw.numel() + 2 * RED_ZONE,), 0xA5, dtype=torch.uint8)
            wide[RED_ZONE : RED_ZONE + raw.numel()] = raw
            self.storages[key] = raw, wide
        offset = RED_ZONE // x.element_size() + x.storage_offset()
        moved_storage = self.storages[key][1].untyped_storage()
        y = torch.empty(0, dtype=x.dtype).set_(moved_storage, offset, x.size(), x.stride())
        self.launch.add_buffer(name, y)
        return y

    def copy_back(self) -> None:
        for raw, wide in self.storages.values():
            raw.copy_(wide[RED_ZONE : RED_ZONE + raw.numel()])


class _Sanitizer:
    def __init__(self, order: int | None, interleave: int | None) -> None:
        self.order = order
        self.interleaver = None if interleave is None else Interleaver(interleave)
        self.launch: _Launch | None = None
        self.saved: list[tuple[Any, str, Any]] = []
        self.programs: list[int] = []  # shuffled program numbers of the current launch

    def patch(self, owner: Any, name: str, value: Any) -> None:
        self.saved.append((owner, name, owner.__dict__.get(name)))
        setattr(owner, name, value)

    def restore(self) -> None:
        for owner, name, value in reversed(self.saved):
            if value is None:
                delattr(owner, name)
            else:
                setattr(owner, name, value)

    def access(self, what: str, pointers: Any, mask: Any, kind: int) -> None:
        """Note one access of the running program, after letting another one run."""
        if self.interleaver is not None:
            self.interleaver.switch()
        if self.launch is None:
            return
        data = pointers.data
        active = np.broadcast_to(True if mask is None else np.asarray(mask.data, bool), data.shape)
        addresses = data[active].ravel().astype(np.uint64)
        if not addresses.size:
            return
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        index, grid = interpreter_builder.grid_idx, interpreter_builder.grid_dim
        program = (index[0] * grid[1] + index[1]) * grid[2] + index[2]
        what = f"program {tuple(index)}: {what}"
        self.launch.check_bounds(what, addresses, size)
        self.launch.accesses.append((np.unique(addresses), program, kind))
        if kind == WRITE:
            self.launch.stored.setdefault(program, []).append(addresses)
        elif kind == READ:
            self.launch.check_read_back(what, addresses, program)

    def barrier(self) -> None:
        if self.launch is not None:
            index, grid = interpreter_builder.grid_idx, interpreter_builder.grid_dim
            self.launch.stored.pop((index[0] * grid[1] + index[1]) * grid[2] + index[2], None)

    def patch_memory(self) -> None:
        builder = type(interpreter_builder)
        load, store = builder.create_masked_load, builder.create_masked_store
        rmw, cas, barrier = (
            builder.create_atomic_rmw,
            builder.create_atomic_cas,
            builder.create_barrier,
        )

        def sane_load(b: Any, pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
            self.access("load", pointers, mask, READ)
            if other is None:
                other = _poison(pointers)
            return load(b, pointers, mask, other, *rest)

        def sane_store(b: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self.access("store", pointers, mask, WRITE)
            _check_lanes(pointers, value, mask)
            return store(b, pointers, value, mask, *rest)

        def sane_rmw(b: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self.access("atomic", pointers, mask, ATOMIC)
            return rmw(b, op, pointers, value, mask, *rest)

        def sane_cas(b: Any, pointers: Any, *rest: Any) -> Any:
            self.access("atomic_cas", pointers, None, ATOMIC)
            return cas(b, pointers, *rest)

        def sane_barrier(b: Any, *rest: Any) -> Any:
            self.barrier()
            return barrier(b, *rest)

        self.patch(builder, "create_masked_load", sane_load)
        self.patch(builder, "create_masked_store", sane_store)
        self.patch(builder, "create_atomic_rmw", sane_rmw)
        self.patch(builder, "create_atomic_cas", sane_cas)
        self.patch(builder, "create_barrier", sane_barrier)
        options = interpreter.InterpreterOptions(debug=True)
        self.patch(interpreter_builder, "options", options)

    def patch_order(self, seed: int) -> None:
        set_grid_idx = type(interpreter_builder).set_grid_idx

        def set_shuffled(b: Any, x: int, y: int, z: int) -> None:
            nx, ny, nz = b.grid_dim
            if (x, y, z) == (0, 0, 0):
                self.programs = list(range(nx * ny * nz))
                random.Random(seed).shuffle(self.programs)
            i = self.programs[(x * ny + y) * nz + z]
            set_grid_idx(b, i // (ny * nz), i // nz % ny, i % nz)

        self.patch(type(interpreter_builder), "set_grid_idx", set_shuffled)

    def patch_launch(self) -> None:
        executor = interpreter.GridExecutor
        init, run = executor.__init__, executor.__call__

        def sane_init(ex: Any, function: Any, arg_names: Any, grid: Any, *rest: Any) -> None:
            if self.interleaver is not None:
                function = self.interleaver.collector(function, arg_names)
            init(ex, function, arg_names, grid, *rest)
            ex.kvsan_names = arg_names

        def sane_run(ex: Any, *args: Any, **kwargs: Any) -> None:
            self.launch = _Launch()
            arena = _Arena(self.launch)
            args = tuple(arena.move(n, x) for n, x in zip(ex.kvsan_names, args, strict=False))
            kwargs = {n: arena.move(n, x) for n, x in kwargs.items()}
            try:
                run(ex, *args, **kwargs)
                arena.copy_back()
                self.launch.check_races()
            except Exception as error:
                root: BaseException = error
                while root.__cause__ is not None:
                    root = root.__cause__
                if isinstance(root, KernelFault):
                    raise root from None
                raise
            finally:
                self.launch = None

        self.patch(executor, "__init__", sane_init)
        self.patch(executor, "__call__", sane_run)


def _poison(pointers: Any) -> TensorHandle:
    """A value for masked lanes that no kernel can take for a real one."""
    dtype = interpreter._get_np_dtype(pointers.get_element_ty())
    value: Any = int.from_bytes(b"\x5a" * dtype.itemsize, "little")
    if dtype.kind == "f":
        value = np.nan
    elif dtype.kind == "b":
        value = True
    return TensorHandle(np.full(pointers.data.shape, value, dtype), pointers.get_element_ty())


def _check_lanes(pointers: Any, value: Any, mask: Any) -> None:
    shape = pointers.data.shape
    active = np.broadcast_to(True if mask is None else np.asarray(mask.data, bool), shape).ravel()
    addresses = pointers.data.ravel()[active]
    values = np.broadcast_to(value.data, shape).ravel()[active]
    order = np.argsort(addresses, kind="stable")
    addresses, values = addresses[order], values[order]
    if ((addresses[1:] == addresses[:-1]) & (values[1:] != values[:-1])).any():
        raise KernelFault("lanes of one store write different values to one address")


@contextlib.contextmanager
def sanitize(*, order: int | None = None, interleave: int | None = None) -> Iterator[None]:
    """Check every interpreted launch in the context; raise KernelFault at the first thing wrong.

    Args:
        order: seed of a shuffled order of programs, or None: ascending.
        interleave: seed of a schedule that switches programs at each memory access, or None: one program
            runs to its end before the next. Takes precedence over `order`.
    """
    sanitizer = _Sanitizer(order, interleave)
    sanitizer.patch_memory()
    sanitizer.patch_launch()
    if order is not None and interleave is None:
        sanitizer.patch_order(order)
    try:
        yield
    finally:
        sanitizer.restore()
