"""Compiled code owns no memory, so it counts no references: two atomic operations an array and call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import njit
from numba.core.errors import TypingError

from kvcache.compiled import compiled


def _pair(decorate: Any) -> Any:
    """A function with a branch that another one calls in a loop: where numba counts."""

    @decorate
    def pick(x: Any, i: int) -> int:
        if x[i] > 3:
            return int(x[i])
        return int(x[0])

    @decorate
    def total(x: Any, n: int) -> int:
        found = 0
        for i in range(n):
            found += pick(x, i)
        return found

    assert total(np.arange(9), 5) == 4
    return total


def _counts(function: Any) -> int:
    (code,) = function.inspect_llvm().values()
    return int(code.count("call void @NRT_"))


def test_compiled_code_counts_no_references() -> None:
    assert _counts(_pair(njit(nogil=True))) > 0  # or this test sees nothing
    assert _counts(_pair(compiled)) == 0


def test_compiled_code_cannot_make_arrays() -> None:
    @compiled
    def make(n: int) -> Any:
        return np.zeros(n)

    with pytest.raises(TypingError):
        make(3)
