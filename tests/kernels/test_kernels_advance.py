"""kernels/advance.py: the CPU twin against the contract, and what the wrapper refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_cases import Case, advance_case, assert_same, run
from kernel_contract import expected

from kvcache.errors import InvalidInputError


@pytest.mark.parametrize("has_lens", [True, False], ids=["lens", "allocated"])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 300])
def test_moves_the_computed_length(num_rows: int, has_lens: bool) -> None:
    case = advance_case(num_rows, num_rows=num_rows, has_lens=has_lens)
    assert_same(run(case), expected(case))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rows", np.zeros((6, 1), np.int32), r"rows must be 1-D, got shape \(6, 1\)"),
        ("lens", np.zeros(6, np.int64), "lens must be torch.int32, got torch.int64"),
        ("lens", np.zeros(3, np.int32), r"num_rows must be in \[0, 3\], got 4"),
        ("row_state", np.zeros((3, 7), np.int32), r"row_state.shape\[0\] must be 4, got 3"),
        ("num_rows", 7, r"num_rows must be in \[0, 6\], got 7"),
    ],
)
def test_refuses_what_does_not_fit(name: str, value: Any, message: str) -> None:
    case = advance_case(0, num_rows=4, has_lens=True)
    arrays, scalars = dict(case.arrays), dict(case.scalars)
    (arrays if name in arrays else scalars)[name] = value
    with pytest.raises(InvalidInputError, match=message):
        run(Case(case.op, arrays, scalars))
