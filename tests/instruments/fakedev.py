"""`kvdev`, a fake accelerator: every wait of the host for the device is seen, and steps can be captured.

A registered torch device (PrivateUse1) whose tensors hold CPU data, so that kernels run on it, interpreted
or natively. To torch it is a device: mixing host and device raises as on a GPU, and `.item()`, copies, and
whatever else makes a GPU's host wait comes through here.

    with accelerator(), no_host_sync() as seen:
        manager.step(rows)                     # tensors on "kvdev"; raises HostSync where it would wait
    assert seen.launches == {"_step_kernel": 1}

There are several such devices ("kvdev:0", ...), each with streams; `on` makes others the current ones.

Registering the device is for the life of the process; all else ends with its context.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from instruments.transfers import CopyEvent, Streams, is_pinned, pin

NAME = "kvdev"
CAPTURE_STREAM = 0xCA97
_setup_privateuseone_for_python_backend(NAME)

_aten = torch.ops.aten
# operations whose result the host has to learn from the device
_DATA_DEPENDENT = {
    _aten._local_scalar_dense,
    _aten.is_nonzero,
    _aten.nonzero,
    _aten.masked_select,
    _aten._unique,
    _aten._unique2,
    _aten.unique_dim,
    _aten.unique_consecutive,
    _aten.unique_dim_consecutive,
    _aten.bincount,
    _aten.histc,
    _aten.equal,
    _aten.allclose,
}
_INDEX_READS = {_aten.index, _aten._unsafe_index}
_INDEXING = _INDEX_READS | {_aten.index_put, _aten.index_put_, _aten._index_put_impl_}
_COPIES = {_aten._to_copy, _aten.copy_, _aten._copy_from}


class HostSync(AssertionError):
    """A GPU's host would have waited here."""


@dataclasses.dataclass
class Seen:
    """What was done under `no_host_sync`."""

    ops: Counter[str] = dataclasses.field(default_factory=Counter)  # torch operations by name
    launches: Counter[str] = dataclasses.field(default_factory=Counter)  # kernels by name
    uploads: int = 0  # copies from host to device
    pinned: int = 0  # pinned buffers allocated, which on a GPU may wait too


@dataclasses.dataclass
class _State:
    seen: Seen | None = None  # None: the host may wait
    nodes: list[Callable[[], None]] | None = None  # what a capture records
    streams: Streams = dataclasses.field(default_factory=Streams)


_state = _State()


class DeviceTensor(torch.Tensor):
    """A tensor on a fake device; `raw` is its content on the CPU."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor, index: int) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=f"{NAME}:{index}",
        )
        made.raw = raw
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    # these do not ask the dispatcher

    def __repr__(self, **kwargs: Any) -> str:
        _waits("repr of a device tensor")
        return f"DeviceTensor({self.raw!r})"

    def __format__(self, spec: str) -> str:
        _waits("format of a device tensor")
        return format(self.raw, spec)

    def tolist(self) -> Any:
        _waits("tolist of a device tensor")
        return self.raw.tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"can't convert a {NAME} tensor to numpy: copy it to the host first")

    __array__ = numpy


def _waits(what: str) -> None:
    if _state.seen is not None:
        raise HostSync(what)


def _is_device(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def _index_of(device: Any) -> int:
    """The index of a fake device; without one it is the current device."""
    index = torch.device(device).index
    return _state.streams.device if index is None else index


def _raw(x: Any) -> Any:
    """What an operation on the CPU gets in place of `x`."""
    if isinstance(x, DeviceTensor):
        return x.raw
    if isinstance(x, torch.device) and x.type == NAME:
        return torch.device("cpu")
    return x


# -- torch operations ------------------------------------------------------------------------------------


def _copy_ends(op: Any, args: Any, kwargs: Any) -> tuple[torch.Tensor, torch.device, bool]:
    """Return (source, device of the target, non_blocking) of a copy."""
    if op is _aten._to_copy:
        to = torch.device(kwargs.get("device") or args[0].device)
        return args[0], to, kwargs.get("non_blocking", False)
    target, source = args[:2] if op is _aten.copy_ else args[1::-1]
    non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
    return source, target.device, non_blocking


def _check_copy(func: Any, source: torch.Tensor, to: torch.device, non_blocking: bool) -> None:
    from_device, to_device = isinstance(source, DeviceTensor), _is_device(to)
    if from_device and not to_device:
        _waits(f"{func}: copy from device to host")
    if to_device and not from_device:
        if not is_pinned(source):
            _waits(f"{func}: copy of pageable memory to the device")
        if not non_blocking:
            _waits(f"{func}: blocking copy to the device")
        _state.streams.transfers(_index_of(to)).begin(source)
        if _state.seen is not None:
            _state.seen.uploads += 1


def _check_operation(func: Any, op: Any, args: Any, kwargs: Any) -> None:
    """Raise for what makes a GPU's host wait, and for operands of both worlds."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    host = [x for x in tensors if not isinstance(x, DeviceTensor) and x.dim() > 0]
    if len(host) == len(tensors):
        return
    devices = {x.device for x in tensors if isinstance(x, DeviceTensor)}
    if len(devices) > 1:
        raise RuntimeError(f"{func}: expected all tensors on one device, got {devices}")
    if op in _DATA_DEPENDENT:
        _waits(f"{func}: the host needs what is on the device")
    if op is _aten.repeat_interleave and kwargs.get("output_size") is None:
        _waits(f"{func} without output_size")
    if op in _INDEXING:
        index = [x for x in args[1] if x is not None]
        if any(not isinstance(x, DeviceTensor) for x in index):
            _waits(f"{func}: index tensor on the host")
        # x[mask] = scalar is a masked fill: it needs no size
        is_mask = any(x.dtype in (torch.bool, torch.uint8) for x in index)
        if is_mask and (op in _INDEX_READS or args[2].numel() != 1):
            _waits(f"{func}: boolean mask")
    if host:
        raise RuntimeError(f"{func}: expected all tensors on one device, got {NAME} and cpu")


def _dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on the CPU contents of its tensors."""
    op = func.overloadpacket
    if _state.seen is not None:
        _state.seen.ops[str(op)] += 1
    if op in _COPIES:
        _check_copy(func, *_copy_ends(op, args, kwargs))
    else:
        _check_operation(func, op, args, kwargs)
    raw_args, raw_kwargs = tree_map(_raw, (args, kwargs))
    out = func(*raw_args, **raw_kwargs)
    if _state.nodes is not None:
        _state.nodes.append(_operation_node(func, raw_args, raw_kwargs, out))
    if op is _aten.copy_:
        return args[0]
    given = {id(x.raw): x for x in tree_leaves((args, kwargs)) if isinstance(x, DeviceTensor)}
    device = kwargs.get("device")
    if device is None:
        device = next((x.device for x in given.values()), "cpu")

    def wrapped(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not _is_device(device):
            return x
        return given[id(x)] if id(x) in given else DeviceTensor(x, _index_of(device))

    return tree_map(wrapped, out)


_library = torch.library.Library("_", "IMPL")
_library.fallback(lambda op, *args, **kwargs: _dispatch(op, args, kwargs), "PrivateUse1")


class _HostValues(TorchFunctionMode):
    """Values of the host that torch itself would put on the device, where it fails for `kvdev`.

    torch.tensor([..], device="kvdev") and x[[..]]: on a GPU they are blocking copies.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and _is_device(kwargs.get("device")):
            device = kwargs.pop("device")
            _waits(f"{func.__name__}(..., device={NAME!r}): copy of pageable memory to the device")
            return func(*args, **kwargs).to(device)
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if isinstance(args[0], DeviceTensor) and any(isinstance(i, list) for i in index):
                _waits("index list on the host")
                index = tuple(torch.tensor(i).to(NAME) if isinstance(i, list) else i for i in index)
                args = (args[0], index, *args[2:])
        return func(*args, **kwargs)


# -- pinned memory -----------------------------------------------------------------------------------------


def pinned_empty(words: int) -> torch.Tensor:
    """Return a [words] int32 host tensor that counts as pinned memory."""
    buffer = torch.empty(words, dtype=torch.int32)
    pin(buffer)
    if _state.seen is not None:
        _state.seen.pinned += 1
    return buffer


# -- contexts ----------------------------------------------------------------------------------------------


def _launched(run: Any, run_kernels: bool) -> Any:
    """Wrap `run` of a Triton function: it gets the CPU contents of device tensors."""

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        host = [x for x in tensors if not isinstance(x, DeviceTensor)]
        raw_args, raw_kwargs = tree_map(_raw, (args, kwargs))

        def node() -> Any:
            return run(self, *raw_args, grid=grid, warmup=warmup, **raw_kwargs)

        if warmup or len(host) == len(tensors):
            return node()
        if host:
            raise ValueError(f"{self.fn.__name__}: pointer argument on the host (cpu tensor?)")
        if any(x.device.index != _state.streams.device for x in tensors):
            raise ValueError(
                f"{self.fn.__name__}: pointer argument on a device that is not current"
            )
        if _state.seen is not None:
            _state.seen.launches[self.fn.__name__] += 1
        if _state.nodes is not None:
            _state.nodes.append(node)
        return node() if run_kernels else None

    return launch


def _waiting(function: Any) -> Any:
    def wait(*args: Any, **kwargs: Any) -> Any:
        _waits(f"{function.__module__}.{function.__name__}")
        return function(*args, **kwargs)

    return wait


@contextlib.contextmanager
def accelerator(*, run_kernels: bool = True, lag: int = 0) -> Iterator[None]:
    """Make managers and kernels work with device="kvdev" within the context.

    Args:
        run_kernels: False: launches are counted and nothing is computed. The host cannot tell.
        lag: see Transfers.
    """
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    before, _state.streams = _state.streams, Streams(lag)
    try:
        with pytest.MonkeyPatch.context() as patch, _HostValues():
            for kind in (InterpretedFunction, JITFunction):
                patch.setattr(kind, "run", _launched(kind.run, run_kernels))
            patch.setattr("kvcache.device.staging.pinned_empty", pinned_empty)
            patch.setattr("kvcache.device.staging.copy_event", lambda: CopyEvent(_state.streams))
            patch.setattr("kvcache.device.stream.current", lambda: _state.streams.current())
            patch.setattr("kvcache.device.stream.is_capturing", lambda: _state.nodes is not None)
            for module in (torch.cuda, torch.accelerator):
                patch.setattr(module, "synchronize", _waiting(module.synchronize))
            patch.setattr("kvcache.checks.DEVICE_KINDS", ("cpu", "cuda", NAME))
            yield
            _state.streams.land()
    finally:
        _state.streams = before


@contextlib.contextmanager
def on(device: int = 0, stream: int = 0) -> Iterator[None]:
    """Make a device, and a stream of it, the current ones, as torch.cuda.device and torch.cuda.stream do."""
    with _state.streams.on(device, stream):
        yield


@contextlib.contextmanager
def no_host_sync() -> Iterator[Seen]:
    """Raise HostSync at whatever would make the host wait for the device; yields what was done."""
    before, _state.seen = _state.seen, Seen()
    try:
        yield _state.seen
    finally:
        _state.seen = before


def _operation_node(func: Any, args: Any, kwargs: Any, out: Any) -> Callable[[], None]:
    results = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]

    def node() -> None:
        again = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, torch.Tensor)]
        for old, new in zip(results, again, strict=True):
            # a graph writes the memory that it wrote when it was captured
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)

    return node


class FakeGraph:
    """Records a step as torch.cuda.graph would: pointers, grids and host numbers are frozen.

    >>> graph = FakeGraph()
    >>> with graph.capture(): step()           # runs the step once, under no_host_sync
    >>> graph.replay()                         # its operations and launches again, none of its Python
    """

    def __init__(self) -> None:
        self.nodes: list[Callable[[], None]] = []
        self.seen = Seen()

    @contextlib.contextmanager
    def capture(self, stream: int = CAPTURE_STREAM) -> Iterator[Seen]:
        """Record what is done within the context; it is carried out too.

        Args:
            stream: The current stream meanwhile; by default one of its own, as torch.cuda.graph does.
        """
        self.nodes = []
        with no_host_sync() as self.seen, on(_state.streams.device, stream):
            _state.nodes = self.nodes
            try:
                yield self.seen
            finally:
                _state.nodes = None

    def replay(self) -> None:
        """Repeat all that was recorded."""
        for node in self.nodes:
            node()
