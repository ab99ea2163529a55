"""kernels/apply.py: the CPU twin against the contract, op by op, and what the wrapper refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import Case, apply_case, assert_same, run
from kernel_contract import expected

from kvcache.errors import InvalidInputError
from kvcache.kernels import layout
from kvcache.kernels.apply import apply


@pytest.mark.parametrize("has_swa", [True, False], ids=["swa", "full_only"])
@pytest.mark.parametrize("max_pages", [0, 1, 9, 200])
@pytest.mark.parametrize("num", [0, 1, 2, 60])
def test_does_what_the_contract_says(num: int, max_pages: int, has_swa: bool) -> None:
    case = apply_case(num + max_pages, num=num, max_pages=max_pages, has_swa=has_swa)
    assert_same(run(case), expected(case))


@pytest.mark.parametrize("op", range(8))
def test_each_op_alone(op: int) -> None:
    case = apply_case(op, num=6, max_pages=5, ops=(op,))
    assert_same(run(case), expected(case))


def _run_one(op: int, swa_pos: int = 0) -> dict[str, list[int]]:
    """One range of two pages: row 0 names Full pages 1 and 2, slots 1 and 2 hold pages 3 and 4."""
    tensors = {
        "desc": [[op], [2], [0], [0], [1], [0], [swa_pos]],
        "page_table": [[1, 2, 9]],
        "slab": [8, 3, 4, 7],
        "swa_map": [0, 11, 12, 13, 14, 0, 0, 17, 18, 19],
        "full_stack": [0, 0, 0],
        "swa_stack": [0, 0, 0],
        "row_state": [[0], [0], [0], [0]],
        "tops": [0, 0],
    }
    on_device = {name: torch.tensor(x, dtype=torch.int32) for name, x in tensors.items()}
    apply(*on_device.values(), start=0, num=1, max_pages=2, full_top=2, swa_top=1)
    changed = {}
    for name, before in tensors.items():
        if name != "tops" and on_device[name].tolist() != before:
            changed[name] = on_device[name].flatten().tolist()
    assert on_device["tops"].tolist() == [2, 1]
    return changed


@pytest.mark.parametrize(
    ("op", "swa_pos", "changed"),
    [
        (layout.BIND, -1, {"page_table": [3, 4, 9]}),
        (layout.STORE, -1, {"slab": [8, 1, 2, 7]}),
        (
            layout.ADOPT,
            -1,
            {"swa_map": [0, 0, 0, 11, 12, 0, 0, 17, 18, 19], "full_stack": [1, 2, 0]},
        ),
        (
            layout.FREE_ROW,
            1,
            {
                "swa_map": [0, 0, 0, 13, 14, 0, 0, 17, 18, 19],
                "full_stack": [1, 2, 0],
                "swa_stack": [0, 11, 12],
            },
        ),
        (layout.FREE_ROW, -1, {"full_stack": [1, 2, 0]}),
        (
            layout.FREE_SLOT,
            0,
            {
                "swa_map": [0, 11, 12, 0, 0, 0, 0, 17, 18, 19],
                "full_stack": [3, 4, 0],
                "swa_stack": [13, 14, 0],
            },
        ),
        (layout.FREE_SLOT, -1, {"full_stack": [3, 4, 0]}),
        (
            layout.DROP_ROW,
            0,
            {"swa_map": [0, 0, 0, 13, 14, 0, 0, 17, 18, 19], "swa_stack": [11, 12, 0]},
        ),
        (
            layout.DROP_SLOT,
            0,
            {"swa_map": [0, 11, 12, 0, 0, 0, 0, 17, 18, 19], "swa_stack": [13, 14, 0]},
        ),
        (layout.SET_ROW, -1, {"row_state": [2, 0, 1, 0]}),
    ],
    ids=[
        "bind",
        "store",
        "adopt",
        "free_row",
        "free_row_tomb",
        "free_slot",
        "free_slot_tomb",
        "drop_row",
        "drop_slot",
        "set_row",
    ],
)
def test_truth_table(op: int, swa_pos: int, changed: dict[str, list[int]]) -> None:
    assert _run_one(op, swa_pos) == changed


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("desc", np.zeros((5, 8), np.int32), r"desc.shape\[0\] must be 7, got 5"),
        ("desc", np.zeros((7, 8), np.int64), "desc must be torch.int32, got torch.int64"),
        ("slab", np.zeros((2, 4), np.int32), r"slab must be 1-D, got shape \(2, 4\)"),
        ("row_state", np.zeros((4, 2), np.int32), r"row_state.numel\(\) must be 24, got 8"),
        ("tops", np.zeros(1, np.int32), r"tops.shape\[0\] must be 2, got 1"),
        ("start", -1, r"start must be in \[0, 8\], got -1"),
        ("start", 5, r"num must be in \[0, 3\], got 4"),
        ("num", -1, r"num must be in \[0, 6\], got -1"),
        ("full_top", 10**6, r"full_top must be in \[0, \d+\], got 1000000"),
        ("swa_top", -1, r"swa_top must be in \[0, \d+\], got -1"),
    ],
)
def test_refuses_what_does_not_fit(name: str, value: Any, message: str) -> None:
    case = apply_case(0, num=4, max_pages=3)
    arrays, scalars = dict(case.arrays), dict(case.scalars)
    (arrays if name in arrays else scalars)[name] = value
    with pytest.raises(InvalidInputError, match=message):
        run(Case(case.op, arrays, scalars))
