"""kernels/fill_indices.py: the CPU twin against the contract, the docstring's picture, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_cases import Case, assert_same, run
from view_cases import fill_indices_case
from view_contract import expected

from kvcache.errors import InvalidInputError

WINDOWS = [0, 1, 2, 3, 4, 5, 16, 17, 128]


@pytest.mark.parametrize("has_lens", [False, True], ids=["allocated", "lens"])
@pytest.mark.parametrize("unit", ["pages", "slots32", "slots64"])
@pytest.mark.parametrize("page_size", [1, 4, 16, 48])
@pytest.mark.parametrize(("num_rows", "max_pages"), [(0, 1), (1, 1), (7, 9), (40, 7)])
def test_lists_what_the_next_forward_reads(
    num_rows: int, max_pages: int, page_size: int, unit: str, has_lens: bool
) -> None:
    for window in WINDOWS:
        case = fill_indices_case(
            num_rows + page_size + window,
            num_rows=num_rows,
            page_size=page_size,
            max_pages=max_pages,
            unit=page_size if unit == "pages" else 1,
            window=window,
            has_lens=has_lens,
            dtype=np.int64 if unit == "slots64" else np.int32,
        )
        assert_same(run(case), expected(case))


@pytest.mark.parametrize(
    ("unit", "window", "indices", "last_page_len", "window_start"),
    [
        (4, 0, [11, 12, 13, 14, 15], 1, 0),
        (4, 6, [26, 28, 30], 1, 8),
        (1, 6, [*range(104, 108), *range(112, 116), 120], 1, 8),
        (1, 5, [*range(105, 108), *range(112, 116), 120], 1, 9),
    ],
)
def test_picture_of_the_docstring(
    unit: int, window: int, indices: list[int], last_page_len: int, window_start: int
) -> None:
    arrays: dict[str, Any] = {
        "rows": np.zeros(1, np.int32),
        "num_rows": np.ones(1, np.int32),
        "lens": None,
        "page_table": np.arange(11, 27, dtype=np.int32)[None, :],
        "swa_map": np.arange(100, dtype=np.int32) * 2,
        "row_state": np.array([[13], [17], [0], [0]], np.int32),
        "indptr": np.full(2, -1, np.int32),
        "indices": np.full(len(indices), -1, np.int32),
        "last_page_len": np.full(1, -1, np.int32),
        "window_start": np.full(1, -1, np.int32),
    }
    scalars = {"num_lanes": 1, "max_entries": 9, "page_size": 4, "unit": unit, "window": window}
    got = run(Case("fill_indices", arrays, scalars))
    assert got["indices"].tolist() == indices
    assert got["indptr"].tolist() == [0, len(indices)]
    assert (got["last_page_len"][0], got["window_start"][0]) == (last_page_len, window_start)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rows", np.zeros(9, np.int64), "rows must be torch.int32, got torch.int64"),
        ("num_rows", np.zeros(2, np.int32), r"num_rows.shape\[0\] must be 1, got 2"),
        ("lens", np.zeros(5, np.int32), r"num_lanes must be in \[0, 5\], got 6"),
        ("swa_map", np.zeros(0, np.int32), "swa_map must have an entry per Full page"),
        ("row_state", np.zeros((4, 2), np.int32), r"row_state.numel\(\) must be 36, got 8"),
        ("indptr", np.zeros(6, np.int32), r"num_lanes must be in \[0, 5\], got 6"),
        ("indices", np.zeros(40, np.int16), "indices must be torch.int32 or torch.int64"),
        ("num_lanes", -1, r"num_lanes must be in \[0, 6\], got -1"),
        ("unit", 2, r"unit must be 1 or page_size \(4\), got 2"),
        ("page_size", 0, "page_size must be >= 1, got 0"),
        ("window", -1, "window must be >= 0, got -1"),
    ],
)
def test_refuses_what_does_not_fit(name: str, value: Any, message: str) -> None:
    case = fill_indices_case(0, num_rows=4, page_size=4, max_pages=3, unit=4, window=4)
    arrays, scalars = dict(case.arrays), dict(case.scalars)
    arrays["last_page_len"] = arrays["window_start"] = np.zeros(6, np.int32)
    (arrays if name in arrays else scalars)[name] = value
    with pytest.raises(InvalidInputError, match=message):
        run(Case(case.op, arrays, scalars))
