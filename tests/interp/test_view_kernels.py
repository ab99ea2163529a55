"""The kernels that fill attention views, interpreted: against their twins, and under the sanitizer.

Plain runs use blocks of few entries as well as those that ship: a launch costs time by program, not by
block.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from instruments.kvsan import sanitize
from kernel_cases import Case, assert_same, run
from view_cases import fill_indices_case, fill_table_case
from view_contract import expected


@pytest.mark.parametrize("has_lens", [False, True], ids=["allocated", "lens"])
@pytest.mark.parametrize("window", [0, 5, 128], ids=lambda w: f"window{w}")
@pytest.mark.parametrize("page_size", [1, 4, 16, 48, 64, 256])
def test_table(page_size: int, window: int, has_lens: bool) -> None:
    case = fill_table_case(
        page_size, num_rows=3, page_size=page_size, max_pages=9, window=window, has_lens=has_lens
    )
    assert_same(run(case), expected(case))


@pytest.mark.parametrize("window", [0, 40], ids=["full", "swa"])
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "odd_width"])
@pytest.mark.parametrize("max_pages", [1, 511, 512, 513, 9 * 512 + 1])
def test_table_block_edges(max_pages: int, aligned: bool, window: int) -> None:
    case = fill_table_case(
        max_pages, num_rows=1, page_size=4, max_pages=max_pages, window=window, aligned=aligned
    )
    assert_same(run(case), expected(case))


@pytest.mark.parametrize("has_lens", [False, True], ids=["allocated", "lens"])
@pytest.mark.parametrize("window", [0, 5, 128], ids=lambda w: f"window{w}")
@pytest.mark.parametrize("unit", ["pages", "slots32", "slots64"])
@pytest.mark.parametrize("page_size", [1, 4, 16, 48, 64])
def test_indices(page_size: int, unit: str, window: int, has_lens: bool) -> None:
    case = fill_indices_case(
        page_size,
        num_rows=3,
        page_size=page_size,
        max_pages=9,
        unit=page_size if unit == "pages" else 1,
        window=window,
        has_lens=has_lens,
        dtype=np.int64 if unit == "slots64" else np.int32,
    )
    assert_same(run(case), expected(case))


@pytest.mark.parametrize("window", [0, 40], ids=["full", "swa"])
@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("max_pages", [511, 512, 513, 9 * 512 + 1])
def test_indices_block_edges(max_pages: int, num_rows: int, window: int) -> None:
    case = fill_indices_case(
        max_pages,
        num_rows=num_rows,
        num_lanes=num_rows,
        page_size=2,
        max_pages=max_pages,
        unit=2,
        window=window,
    )
    assert_same(run(case), expected(case))


@pytest.mark.parametrize("num_rows", [0, 3, 4, 5, 9])
def test_indices_adds_up_rows_block_by_block(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcache.kernels.fill_indices._BLOCK_ROWS", 4)
    case = fill_indices_case(
        num_rows, num_rows=num_rows, page_size=4, max_pages=3, unit=4, window=6
    )
    assert_same(run(case), expected(case))


SANITIZED: dict[str, Callable[[], Case]] = {
    "table": lambda: fill_table_case(1, num_rows=5, page_size=4, max_pages=48),
    "table_odd_width": lambda: fill_table_case(
        2, num_rows=5, page_size=4, max_pages=40, aligned=False
    ),
    "table_swa": lambda: fill_table_case(8, num_rows=5, page_size=16, max_pages=48, window=100),
    "table_swa_lens": lambda: fill_table_case(
        3, num_rows=5, page_size=16, max_pages=48, window=100, has_lens=True
    ),
    "pages": lambda: fill_indices_case(4, num_rows=9, page_size=4, max_pages=40, unit=4),
    "pages_swa_lens": lambda: fill_indices_case(
        5, num_rows=9, page_size=4, max_pages=40, unit=4, window=30, has_lens=True
    ),
    "slots": lambda: fill_indices_case(
        6, num_rows=5, page_size=16, max_pages=5, unit=1, dtype=np.int64
    ),
    "slots_swa": lambda: fill_indices_case(
        7, num_rows=9, page_size=16, max_pages=5, unit=1, window=20
    ),
}


@pytest.mark.parametrize(
    "mode",
    [{}, {"order": 1}, {"interleave": 1}, {"interleave": 2}],
    ids=["in_order", "shuffled", "interleave1", "interleave2"],
)
@pytest.mark.parametrize("name", SANITIZED)
def test_no_fault_and_the_same_result_in_any_order(
    name: str, mode: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # a table is two blocks of columns wide, the last of them in part
    monkeypatch.setattr("kvcache.kernels.fill_table._BLOCK", 32)
    monkeypatch.setattr("kvcache.kernels.fill_indices._BLOCK", 16)
    monkeypatch.setattr("kvcache.kernels.fill_indices._BLOCK_ROWS", 4)
    case = SANITIZED[name]()
    with sanitize(**mode):
        got = run(case)
    assert_same(got, expected(case))
