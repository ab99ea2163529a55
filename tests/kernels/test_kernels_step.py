"""kernels/step.py: the CPU twin against the contract, and what the wrapper refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import Case, assert_same, run, step_case
from kernel_contract import expected

from kvcache.errors import InvalidInputError
from kvcache.kernels.step import step


@pytest.mark.parametrize("has_swa", [True, False], ids=["swa", "full_only"])
@pytest.mark.parametrize("page_size", [1, 4, 16, 48, 64, 256])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 100, 600])
def test_gives_the_pages_the_contract_gives(num_rows: int, page_size: int, has_swa: bool) -> None:
    case = step_case(num_rows + page_size, num_rows=num_rows, page_size=page_size, has_swa=has_swa)
    assert_same(run(case), expected(case))


@pytest.mark.parametrize(
    ("computed", "allocated", "new_allocated", "new_page_at"),
    [
        (0, 0, 1, 0),  # an empty row begins its first page
        (3, 3, 4, None),  # the last token of a page that is held
        (4, 4, 5, 1),  # a token that begins a page
        (3, 4, 4, None),  # room is there already
        (4, 8, 8, None),
        (2, 9, 9, None),  # far ahead of what is computed
    ],
)
def test_a_page_comes_only_where_one_begins(
    computed: int, allocated: int, new_allocated: int, new_page_at: int | None
) -> None:
    page_table = torch.zeros((1, 4), dtype=torch.int32)
    stack = torch.arange(8, 0, -1, dtype=torch.int32)
    swa_map = torch.zeros(9, dtype=torch.int32)
    state = torch.tensor([[computed], [allocated], [0], [0]], dtype=torch.int32)
    tops = torch.tensor([8, 7], dtype=torch.int32)
    rows = torch.zeros(1, dtype=torch.int32)

    args = (rows, page_table, stack, stack, swa_map, state, tops)
    step(*args, num_rows=1, page_size=4, has_swa=True)

    taken = new_page_at is not None
    assert state[:, 0].tolist() == [computed, new_allocated, 0, 0]
    assert page_table[0].tolist() == [int(page == new_page_at) for page in range(4)]
    assert tops.tolist() == ([7, 6] if taken else [8, 7])
    assert swa_map[1] == (2 if taken else 0)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rows", np.zeros(6, np.int64), "rows must be torch.int32, got torch.int64"),
        ("full_stack", np.zeros((2, 4), np.int32), r"full_stack must be 1-D, got shape \(2, 4\)"),
        ("row_state", np.zeros((4, 2), np.int32), r"row_state.numel\(\) must be 28, got 8"),
        ("tops", np.zeros(1, np.int32), r"tops.shape\[0\] must be 2, got 1"),
        ("swa_map", np.zeros(0, np.int32), r"swa_map.shape\[0\] must be \d+, got 0"),
        ("num_rows", 7, r"num_rows must be in \[0, 6\], got 7"),
        ("page_size", 0, "page_size must be >= 1, got 0"),
    ],
)
def test_refuses_what_does_not_fit(name: str, value: Any, message: str) -> None:
    case = step_case(0, num_rows=4, page_size=4)
    arrays, scalars = dict(case.arrays), dict(case.scalars)
    (arrays if name in arrays else scalars)[name] = value
    with pytest.raises(InvalidInputError, match=message):
        run(Case(case.op, arrays, scalars))
