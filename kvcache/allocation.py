"""Memory that cannot be had is a CapacityError of ours, whatever numpy and torch raise."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from kvcache.errors import CapacityError

# torch raises plain RuntimeErrors where the host, or pinned memory, runs out
_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a zeroed tensor.

    Raises:
        CapacityError: The device has no such memory; names the bytes.
    """
    with allocating(shape, str(dtype).removeprefix("torch."), device):
        return torch.zeros(shape, dtype=dtype, device=device)


@contextmanager
def allocating(
    shape: tuple[int, ...] | None = None, dtype: str = "int32", device: Any = "the host"
) -> Iterator[None]:
    """Raise CapacityError, with the bytes, where the body is refused memory.

    Args:
        shape: Of what the body makes; default: what numpy's error says, for a body that makes many arrays.
        dtype: Name of its dtype.
        device: Where it is to be.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not _OUT_OF_MEMORY.search(str(error)):
            raise
        if shape is None:
            shape, dtype = getattr(error, "shape", None), str(getattr(error, "dtype", dtype))
        if shape is None:
            reason = str(error).splitlines()[0] if str(error) else "out of memory"
            raise CapacityError(f"memory on {device} is short: {reason}") from error
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        raise CapacityError(
            f"an {dtype} array of shape {list(shape)} needs {nbytes:,} bytes on {device}, "
            "more than can be had"
        ) from error
