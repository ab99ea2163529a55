"""The kernels of a captured decode step, interpreted: against the contract, and under the sanitizer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from decode_cases import decode_slide_case, decode_step_case
from decode_contract import NO_PAGE, expected
from instruments.kvsan import sanitize
from kernel_cases import Case, assert_same, run


@pytest.mark.parametrize("has_swa", [True, False], ids=["swa", "full_only"])
@pytest.mark.parametrize("page_size", [1, 4, 16, 48, 64, 256])
@pytest.mark.parametrize("num_rows", [0, 1, 255, 256, 257, 600])
def test_step(num_rows: int, page_size: int, has_swa: bool) -> None:
    seed = num_rows + page_size
    case = decode_step_case(seed, num_rows=num_rows, page_size=page_size, has_swa=has_swa)
    assert_same(run(case), expected(case))


@pytest.mark.parametrize("missing", [1, 3, 20, 100])
def test_step_without_pages(missing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.kernels.decode_step._BLOCK", 16)
    for seed in range(4):
        case = decode_step_case(seed, num_rows=70, page_size=4, missing=missing)
        assert_same(run(case), expected(case))


@pytest.mark.parametrize("full_row", [0, 15, 16, 40])
def test_step_at_the_end_of_a_page_table(full_row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.kernels.decode_step._BLOCK", 16)
    case = decode_step_case(full_row, num_rows=41, page_size=4, full_row=full_row)
    assert_same(run(case), expected(case))


@pytest.mark.parametrize("has_swa", [True, False], ids=["swa", "full_only"])
@pytest.mark.parametrize("bigram", [False, True], ids=["tokens", "bigram"])
@pytest.mark.parametrize("page_size", [1, 4, 48, 64])
@pytest.mark.parametrize(("num_rows", "max_pages"), [(0, 1), (1, 1), (20, 5), (257, 2), (2, 60)])
def test_slide(num_rows: int, max_pages: int, page_size: int, bigram: bool, has_swa: bool) -> None:
    case = decode_slide_case(
        num_rows + max_pages,
        num_rows=num_rows,
        page_size=page_size,
        max_pages=max_pages,
        keep=(1, page_size, page_size + 1, 128)[num_rows % 4],
        bigram=bigram,
        has_swa=has_swa,
    )
    assert_same(run(case), expected(case))


@pytest.mark.parametrize("room", [0, 1, 5, 30])
def test_slide_with_a_full_stack(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.kernels.decode_slide._BLOCK_ROWS", 8)
    for seed in range(4):
        case = decode_slide_case(seed, num_rows=40, page_size=4, max_pages=6, keep=4, room=room)
        assert_same(run(case), expected(case))


def test_an_error_from_before_stops_everything() -> None:
    for case in (
        decode_step_case(3, num_rows=20, page_size=4, error=NO_PAGE),
        decode_slide_case(3, num_rows=20, page_size=4, max_pages=6, keep=4, error=NO_PAGE),
    ):
        assert_same(run(case), expected(case))


SANITIZED: dict[str, Callable[[], Case]] = {
    "step": lambda: decode_step_case(1, num_rows=20, page_size=4),
    "step_full_only": lambda: decode_step_case(2, num_rows=9, page_size=1, has_swa=False),
    "step_without_pages": lambda: decode_step_case(3, num_rows=30, page_size=4, missing=5),
    "step_at_the_end": lambda: decode_step_case(4, num_rows=30, page_size=4, full_row=20),
    "slide": lambda: decode_slide_case(5, num_rows=20, page_size=4, max_pages=7, keep=6),
    "slide_bigram": lambda: decode_slide_case(
        6, num_rows=9, page_size=16, max_pages=3, keep=1, bigram=True
    ),
    "slide_full_stack": lambda: decode_slide_case(
        7, num_rows=30, page_size=4, max_pages=7, keep=6, room=12
    ),
}


@pytest.mark.parametrize("name", SANITIZED)
def test_no_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in ("decode_step._BLOCK", "decode_slide._BLOCK_ROWS"):
        monkeypatch.setattr(f"kvcache.kernels.{block}", 8)
    monkeypatch.setattr("kvcache.kernels.decode_slide._BLOCK_PAGES", 2)
    case = SANITIZED[name]()
    with sanitize():
        got = run(case)
    assert_same(got, expected(case))
