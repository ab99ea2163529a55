"""kernels/extend.py: the CPU twin against the contract, and what the wrapper refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import Case, assert_same, extend_case, run
from kernel_contract import expected

from kvcache.errors import InvalidInputError
from kvcache.kernels.extend import extend


@pytest.mark.parametrize("has_swa", [True, False], ids=["swa", "full_only"])
@pytest.mark.parametrize("max_pages", [0, 1, 7, 300])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 40])
def test_gives_the_pages_the_contract_gives(num_rows: int, max_pages: int, has_swa: bool) -> None:
    case = extend_case(
        num_rows + max_pages, num_rows=num_rows, max_pages=max_pages, has_swa=has_swa
    )
    assert_same(run(case), expected(case))


def test_first_pops_are_the_top_of_the_stacks() -> None:
    fresh = torch.arange(6, 0, -1, dtype=torch.int32)
    page_table = torch.zeros((2, 3), dtype=torch.int32)
    swa_map = torch.zeros(7, dtype=torch.int32)
    state = torch.zeros((4, 2), dtype=torch.int32)
    tops = torch.zeros(2, dtype=torch.int32)
    # row 1 gets pages 0 and 1, row 0 gets page 2
    desc = torch.tensor([[1, 0], [0, 2], [2, 1], [0, 2], [8, 11]], dtype=torch.int32)
    sizes = {"num_rows": 2, "full_top": 6, "swa_top": 5, "total": 3, "max_pages": 2}

    extend(desc, page_table, fresh, fresh, swa_map, state, tops, **sizes, has_swa=True)

    assert page_table.tolist() == [[0, 0, 3], [1, 2, 0]]
    assert swa_map.tolist() == [0, 2, 3, 4, 0, 0, 0]  # the SWA stack had one page less: 2 on top
    assert state[1].tolist() == [11, 8]
    assert tops.tolist() == [3, 2]


def _broken(case: Case, name: str, value: Any) -> Case:
    arrays, scalars = dict(case.arrays), dict(case.scalars)
    (arrays if name in arrays else scalars)[name] = value
    return Case(case.op, arrays, scalars)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("desc", np.zeros((5, 9), np.int64), "desc must be torch.int32, got torch.int64"),
        ("desc", np.zeros((4, 9), np.int32), r"desc.shape\[0\] must be 5, got 4"),
        ("desc", np.zeros(45, np.int32), r"desc must be 2-D, got shape \(45,\)"),
        ("page_table", np.zeros(8, np.int32), r"page_table must be 2-D, got shape \(8,\)"),
        ("row_state", np.zeros((4, 2), np.int32), r"row_state.numel\(\) must be 28, got 8"),
        ("tops", np.zeros(3, np.int32), r"tops.shape\[0\] must be 2, got 3"),
        ("swa_map", np.zeros(3, np.int32), r"swa_map.shape\[0\] must be \d+, got 3"),
        ("num_rows", 7, r"num_rows must be in \[0, 6\], got 7"),
        ("num_rows", -1, r"num_rows must be in \[0, 6\], got -1"),
        ("full_top", 10**6, r"full_top must be in \[0, \d+\], got 1000000"),
        ("total", 10**5, r"total must be in \[0, \d+\], got 100000"),
        ("swa_top", 0, r"swa_top must be in \[\d+, \d+\], got 0"),
    ],
)
def test_refuses_what_does_not_fit(name: str, value: Any, message: str) -> None:
    case = extend_case(0, num_rows=4, max_pages=3)
    with pytest.raises(InvalidInputError, match=message):
        run(_broken(case, name, value))


def test_refuses_a_table_that_is_not_contiguous() -> None:
    case = extend_case(0, num_rows=4, max_pages=3)
    tensors = {name: torch.from_numpy(array) for name, array in case.arrays.items()}
    tensors["page_table"] = tensors["page_table"].T
    with pytest.raises(InvalidInputError, match="page_table must be contiguous"):
        extend(*tensors.values(), **case.scalars)
