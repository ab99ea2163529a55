"""kernels/fill_table.py: the CPU twin against the contract, the docstring's picture, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_cases import Case, assert_same, run
from view_cases import fill_table_case
from view_contract import expected

from kvcache.errors import InvalidInputError

WINDOWS = [0, 1, 2, 3, 4, 5, 16, 17, 128]


@pytest.mark.parametrize("has_lens", [False, True], ids=["allocated", "lens"])
@pytest.mark.parametrize("page_size", [1, 4, 16, 48, 64, 256])
@pytest.mark.parametrize(("num_rows", "max_pages"), [(0, 1), (1, 1), (7, 9), (60, 33)])
def test_lists_what_the_next_forward_reads(
    num_rows: int, max_pages: int, page_size: int, has_lens: bool
) -> None:
    for window in WINDOWS:
        case = fill_table_case(
            num_rows + page_size + window,
            num_rows=num_rows,
            page_size=page_size,
            max_pages=max_pages,
            window=window,
            has_lens=has_lens,
            aligned=window % 2 == 0,
        )
        assert_same(run(case), expected(case))


def test_cuts_a_row_that_is_wider_than_the_table() -> None:
    case = fill_table_case(3, num_rows=9, page_size=4, max_pages=40, window=0, width=16)
    assert_same(run(case), expected(case))


def test_picture_of_the_docstring() -> None:
    arrays: dict[str, Any] = {
        "rows": np.zeros(1, np.int32),
        "num_rows": np.ones(1, np.int32),
        "lens": None,
        "page_table": np.arange(11, 27, dtype=np.int32)[None, :],
        "swa_map": np.arange(100, dtype=np.int32) * 2,
        "row_state": np.array([[13], [17], [0], [0]], np.int32),
        "table": np.full((1, 16), -1, np.int32),
        "cache_seqlens": np.full(1, -1, np.int32),
        "window_start": np.full(1, -1, np.int32),
    }
    sizes = {"num_lanes": 1, "width": 16, "page_size": 4}
    full = run(Case("fill_table", arrays, {**sizes, "window": 0}))
    assert full["table"][0].tolist() == [11, 12, 13, 14, 15] + [0] * 11
    assert (full["cache_seqlens"][0], full["window_start"][0]) == (17, 0)
    swa = run(Case("fill_table", arrays, {**sizes, "window": 6}))
    assert swa["table"][0].tolist() == [26, 28, 30] + [0] * 13
    assert (swa["cache_seqlens"][0], swa["window_start"][0]) == (9, 8)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rows", np.zeros(9, np.int64), "rows must be torch.int32, got torch.int64"),
        ("rows", np.zeros(3, np.int32), r"num_lanes must be in \[0, 3\], got 6"),
        ("num_rows", np.zeros(2, np.int32), r"num_rows.shape\[0\] must be 1, got 2"),
        ("lens", np.zeros(5, np.int32), r"num_lanes must be in \[0, 5\], got 6"),
        ("swa_map", np.zeros(0, np.int32), "swa_map must have an entry per Full page"),
        ("row_state", np.zeros((4, 2), np.int32), r"row_state.numel\(\) must be 36, got 8"),
        ("table", np.zeros((7, 20), np.int32), "must be multiples of 16, got 16 and 20"),
        ("num_lanes", -1, r"num_lanes must be in \[0, 6\], got -1"),
        ("width", 8, "must be multiples of 16, got 8 and 32"),
        ("width", 48, r"width must be in \[0, 32\], got 48"),
        ("page_size", 0, "page_size must be >= 1, got 0"),
        ("window", -1, "window must be >= 0, got -1"),
    ],
)
def test_refuses_what_does_not_fit(name: str, value: Any, message: str) -> None:
    case = fill_table_case(0, num_rows=4, page_size=4, max_pages=3, window=4)
    arrays, scalars = dict(case.arrays), dict(case.scalars)
    arrays["window_start"] = np.zeros(6, np.int32)
    (arrays if name in arrays else scalars)[name] = value
    with pytest.raises(InvalidInputError, match=message):
        run(Case(case.op, arrays, scalars))
