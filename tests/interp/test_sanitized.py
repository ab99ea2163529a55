"""Every kernel under the sanitizer: in order, shuffled, and interleaved at each memory access."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from instruments.kvsan import sanitize
from kernel_cases import (
    Case,
    advance_case,
    apply_case,
    assert_same,
    extend_case,
    run,
    slide_case,
    step_case,
    translate_case,
)
from kernel_contract import expected

MODES = [{}, {"order": 1}, {"interleave": 1}, {"interleave": 2}]
CASES: dict[str, Callable[[], Case]] = {
    "extend": lambda: extend_case(1, num_rows=5, max_pages=20),
    "extend_full_only": lambda: extend_case(2, num_rows=3, max_pages=20, has_swa=False),
    "extend_strided": lambda: extend_case(3, num_rows=2, max_pages=9 * 8),
    "step": lambda: step_case(4, num_rows=20, page_size=4),
    "step_full_only": lambda: step_case(5, num_rows=9, page_size=1, has_swa=False),
    "advance": lambda: advance_case(6, num_rows=20, has_lens=False),
    "advance_lens": lambda: advance_case(7, num_rows=20, has_lens=True),
    "slide": lambda: slide_case(8, num_rows=20, page_size=4, max_pages=7, keep=6),
    "slide_bigram": lambda: slide_case(
        9, num_rows=9, page_size=16, max_pages=3, keep=0, bigram=True
    ),
    "apply": lambda: apply_case(10, num=16, max_pages=20),
    "apply_one": lambda: apply_case(15, num=1, max_pages=20),
    "apply_full_only": lambda: apply_case(11, num=8, max_pages=9, has_swa=False),
    "apply_strided": lambda: apply_case(12, num=4, max_pages=9 * 8),
    "translate": lambda: translate_case(13, shape=(40,), page_size=4),
    "translate_int32": lambda: translate_case(14, shape=(5, 7), page_size=64, dtype=np.int32),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few entries: small cases then have several programs and several rounds."""
    for op, name, size in (
        ("extend", "_BLOCK", 8),
        ("step", "_BLOCK", 8),
        ("advance", "_BLOCK", 8),
        ("slide", "_BLOCK_ROWS", 8),
        ("slide", "_BLOCK_PAGES", 2),
        ("apply", "_BLOCK", 8),
        ("translate", "_BLOCK", 16),
    ):
        monkeypatch.setattr(f"kvcache.kernels.{op}.{name}", size)


@pytest.mark.parametrize("mode", MODES, ids=["in_order", "shuffled", "interleave1", "interleave2"])
@pytest.mark.parametrize("name", CASES)
def test_no_fault_and_the_same_result_in_any_order(name: str, mode: dict[str, int]) -> None:
    case = CASES[name]()
    with sanitize(**mode):
        got = run(case)
    assert_same(got, expected(case))
