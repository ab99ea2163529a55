"""Count the bytes that interpreted kernels load and store: what one launch asks of memory."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from triton.runtime.interpreter import interpreter_builder

_SECTOR = 32  # bytes that a GPU moves at least


@dataclasses.dataclass
class Traffic:
    """Bytes of the lanes that are not masked."""

    loaded: int = 0
    stored: int = 0
    sectors: set[int] = dataclasses.field(default_factory=set)  # touched, by number

    @property
    def moved(self) -> int:
        """Bytes loaded and stored."""
        return self.loaded + self.stored

    @property
    def sector_bytes(self) -> int:
        """Bytes of the sectors touched, each once, whether read, written or both."""
        return _SECTOR * len(self.sectors)


@contextlib.contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Yield what all interpreted launches in the context load and store."""
    traffic = Traffic()
    builder = type(interpreter_builder)
    load, store = builder.create_masked_load, builder.create_masked_store

    def note(pointers: Any, mask: Any) -> int:
        data = pointers.data
        active = np.broadcast_to(True if mask is None else np.asarray(mask.data, bool), data.shape)
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        traffic.sectors.update((data[active].ravel() // np.uint64(_SECTOR)).tolist())
        return int(active.sum()) * size

    def counted_load(b: Any, pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
        traffic.loaded += note(pointers, mask)
        return load(b, pointers, mask, other, *rest)

    def counted_store(b: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        traffic.stored += note(pointers, mask)
        return store(b, pointers, value, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_masked_load", counted_load)
        patch.setattr(builder, "create_masked_store", counted_store)
        yield traffic
