"""Count kernel launches, whether they are interpreted, recorded or real."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction


@contextlib.contextmanager
def count_launches() -> Iterator[Counter[str]]:
    """Yield a counter of launches by kernel name.

    Triton's own launch hooks do not fire in the interpreter.
    """
    counts: Counter[str] = Counter()

    def counted(run: Any) -> Any:
        def count_and_run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            if not warmup:
                counts[self.fn.__name__] += 1
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)

        return count_and_run

    with pytest.MonkeyPatch.context() as patch:
        for kind in (InterpretedFunction, JITFunction):
            patch.setattr(kind, "run", counted(kind.run))
        yield counts
