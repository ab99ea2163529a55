"""Argument checks that every module shares. Each raises InvalidInputError and changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvcache.errors import InvalidInputError

if TYPE_CHECKING:
    import torch

# dtype objects: numpy compares them faster than the classes
INT32, INT64 = np.dtype(np.int32), np.dtype(np.int64)
TOKEN_DTYPES = (INT32, INT64)

# that kernels and twins run on; to torch, HIP is cuda
DEVICE_KINDS = ("cpu", "cuda")


def check_tensor(
    name: str,
    x: torch.Tensor,
    *,
    ndim: int,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> None:
    """Raise InvalidInputError unless `x` is a contiguous `ndim`-D `dtype` tensor on `device`."""
    if x.ndim != ndim:
        raise InvalidInputError(f"{name} must be {ndim}-D, got shape {tuple(x.shape)}")
    if x.dtype != dtype:
        raise InvalidInputError(f"{name} must be {dtype}, got {x.dtype}")
    if device is not None and x.device != device:
        raise InvalidInputError(f"{name} must be on {device}, got {x.device}")
    if not x.is_contiguous():
        raise InvalidInputError(f"{name} must be contiguous, got stride {x.stride()}")


def check_device(name: str, value: Any) -> None:
    """Raise InvalidInputError unless `value` names a device of this machine: cpu, cuda or cuda:N."""
    import torch

    try:
        device = torch.device(value) if isinstance(value, (str, torch.device)) else None
    except RuntimeError:
        device = None
    if (
        device is None
        or device.type not in DEVICE_KINDS
        or (device.type == "cpu" and device.index not in (None, 0))
    ):
        raise InvalidInputError(f"{name} must be cpu, cuda or cuda:N, got {value!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidInputError(
            f"{name} must be there, got {value!r}: {torch.cuda.device_count()} CUDA devices found"
        )


def check_int(name: str, value: Any, *, low: int, high: int | None = None) -> int:
    """Return `value` as an int, or raise InvalidInputError unless it is one in [low, high]."""
    if type(value) is int and value >= low and (high is None or value <= high):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise InvalidInputError(f"{name} must be an int, got {value!r}")
    if value < low or (high is not None and value > high):
        span = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise InvalidInputError(f"{name} must be {span}, got {value}")
    return int(value)


def as_int_array(name: str, values: Any, *, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return `values` as a contiguous 1-D array of `dtype`; integers only, nothing is rounded or wrapped.

    A read-only or unaligned array is copied: to numba it is of another type, and it would compile anew.
    """
    if type(values) is np.ndarray and values.dtype == dtype and values.ndim == 1:
        return values if values.flags.carray else values.copy()
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError):  # a ragged list, a tensor on a device
        raise InvalidInputError(
            f"{name} must be 1-D and hold integers, got a {type(values).__name__}"
        ) from None
    if array.ndim != 1:
        raise InvalidInputError(f"{name} must be 1-D, got shape {array.shape}")
    if array.size == 0:
        return np.zeros(0, dtype)
    if array.dtype.kind not in "iu":
        raise InvalidInputError(f"{name} must hold integers, got {array.dtype}")
    narrow = array.astype(dtype, order="C")
    if not (narrow == array).all():
        raise InvalidInputError(f"{name} must fit {dtype}, got [{array.min()}, {array.max()}]")
    return narrow


def as_indices(name: str, values: Any, size: int) -> npt.NDArray[np.int64]:
    """Return `values` as a 1-D int64 array, or raise InvalidInputError unless all are in [0, size)."""
    index = as_int_array(name, values, dtype=INT64)
    if index.size and (index.min() < 0 or index.max() >= size):
        raise InvalidInputError(
            f"{name} must be in [0, {size}), got {index.min()} .. {index.max()}"
        )
    return index


def check_type(name: str, value: Any, expected: type) -> None:
    """Raise InvalidInputError unless `value` is an instance of `expected`."""
    if not isinstance(value, expected):
        raise InvalidInputError(f"{name} must be a {expected.__name__}, got {type(value).__name__}")


def check_list(name: str, values: Any) -> list[Any]:
    """Return the items of `values` as a list, or raise InvalidInputError if it has none to go through."""
    try:
        return list(values)
    except TypeError:
        raise InvalidInputError(f"{name} must be a list, got {type(values).__name__}") from None
