"""All kernels together over a random life of rows: no page is lost or held twice, at any step.

The SWA pool is smaller than the Full pool and wraps many times (the fault of SGLang issue 9123).
"""

from __future__ import annotations

from collections import Counter

import pytest
from kernel_life import Life


@pytest.mark.parametrize("seed", range(2), ids=lambda seed: f"seed{seed}")
@pytest.mark.parametrize(("page_size", "keep"), [(1, 3), (4, 6), (16, 0), (8, 2)])
def test_every_page_is_free_or_has_one_owner(page_size: int, keep: int, seed: int) -> None:
    life = Life(seed, page_size=page_size, max_rows=9, full_pages=50, swa_pages=33, keep=keep)
    names: Counter[str] = Counter()
    popped = 0
    for _ in range(250):
        before = life.swa_free
        names[life.act()] += 1
        popped += max(0, before - life.swa_free)
        life.check()
    assert len(names) == 5
    assert popped > 3 * life.swa_pages, "the pool did not wrap: the test shows nothing"
