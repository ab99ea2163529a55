"""kernels/decode_step.py and decode_slide.py: the CPU twins against the contract; faults; refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from decode_cases import decode_slide_case, decode_step_case
from decode_contract import NO_PAGE, ROW_FULL, STACK_FULL, expected
from kernel_cases import Case, assert_same, run

from kvcache.errors import InvalidInputError


@pytest.mark.parametrize("has_swa", [True, False], ids=["swa", "full_only"])
@pytest.mark.parametrize("page_size", [1, 4, 16, 48, 64, 256])
@pytest.mark.parametrize("num_rows", [0, 1, 40, 600])
def test_step_takes_what_the_contract_takes(num_rows: int, page_size: int, has_swa: bool) -> None:
    for seed in range(3):
        case = decode_step_case(seed, num_rows=num_rows, page_size=page_size, has_swa=has_swa)
        assert_same(run(case), expected(case))


@pytest.mark.parametrize("missing", [1, 2, 9])
@pytest.mark.parametrize("has_swa", [True, False], ids=["swa", "full_only"])
def test_step_stops_where_no_page_is_free(has_swa: bool, missing: int) -> None:
    for seed in range(6):
        case = decode_step_case(seed, num_rows=40, page_size=4, has_swa=has_swa, missing=missing)
        got = run(case)
        assert_same(got, expected(case))
        assert got["error"][0] == NO_PAGE
        assert (got["tops"] >= 0).all()


@pytest.mark.parametrize("full_row", [0, 7, 39])
def test_step_stops_where_a_page_table_ends(full_row: int) -> None:
    case = decode_step_case(1, num_rows=40, page_size=4, full_row=full_row)
    got = run(case)
    assert_same(got, expected(case))
    assert got["error"].tolist() == [ROW_FULL, case.arrays["rows"][full_row]]


@pytest.mark.parametrize("has_swa", [True, False], ids=["swa", "full_only"])
@pytest.mark.parametrize("bigram", [False, True], ids=["tokens", "bigram"])
@pytest.mark.parametrize("page_size", [1, 4, 16, 48, 64, 256])
@pytest.mark.parametrize(("num_rows", "max_pages"), [(0, 1), (1, 1), (60, 12), (3, 500)])
def test_slide_frees_what_the_contract_frees(
    num_rows: int, max_pages: int, page_size: int, bigram: bool, has_swa: bool
) -> None:
    for keep in (1, page_size, 2 * page_size + 1):
        case = decode_slide_case(
            num_rows + keep,
            num_rows=num_rows,
            page_size=page_size,
            max_pages=max_pages,
            keep=keep,
            bigram=bigram,
            has_swa=has_swa,
        )
        assert_same(run(case), expected(case))


@pytest.mark.parametrize("room", [0, 1, 5, 20])
def test_slide_stops_where_the_stack_is_full(room: int) -> None:
    case = decode_slide_case(2, num_rows=40, page_size=4, max_pages=6, keep=4, room=room)
    got = run(case)
    assert_same(got, expected(case))
    assert got["error"][0] == STACK_FULL


def test_an_error_from_before_stops_everything() -> None:
    for case in (
        decode_step_case(3, num_rows=20, page_size=4, error=NO_PAGE),
        decode_slide_case(3, num_rows=20, page_size=4, max_pages=6, keep=4, error=NO_PAGE),
    ):
        assert_same(run(case), {k: v for k, v in case.arrays.items() if v is not None})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rows", np.zeros(6, np.int32), r"rows.shape\[0\] must be 7, got 6"),
        ("num_rows", np.zeros(2, np.int32), r"num_rows.shape\[0\] must be 1, got 2"),
        ("row_state", np.zeros((4, 2), np.int32), r"row_state.numel\(\) must be 28, got 8"),
        ("tops", np.zeros(1, np.int32), r"tops.shape\[0\] must be 2, got 1"),
        ("error", np.zeros(1, np.int32), r"error.shape\[0\] must be 2, got 1"),
        ("page_size", 0, "page_size must be >= 1, got 0"),
        ("swa_map", np.zeros(0, np.int32), "swa_map"),
        ("keep", -1, "keep must be >= 0, got -1"),
    ],
)
def test_refuses_what_does_not_fit(name: str, value: Any, message: str) -> None:
    for case in (
        decode_step_case(0, num_rows=4, page_size=4),
        decode_slide_case(0, num_rows=4, page_size=4, max_pages=3, keep=4),
    ):
        arrays, scalars = dict(case.arrays), dict(case.scalars)
        if name not in arrays and name not in scalars:
            continue
        (arrays if name in arrays else scalars)[name] = value
        with pytest.raises(InvalidInputError, match=message):
            run(Case(case.op, arrays, scalars))
