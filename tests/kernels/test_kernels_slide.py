"""kernels/slide.py: the CPU twin against the contract, the frontiers of known faults, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import Case, assert_same, run, slide_case
from kernel_contract import expected

from kvcache.errors import InvalidInputError
from kvcache.kernels.slide import slide


@pytest.mark.parametrize("bigram", [False, True], ids=["tokens", "bigram"])
@pytest.mark.parametrize("page_size", [1, 4, 16, 48, 64, 256])
@pytest.mark.parametrize(("num_rows", "max_pages"), [(0, 1), (1, 1), (2, 9), (300, 12), (3, 2000)])
def test_frees_what_the_contract_frees(
    num_rows: int, max_pages: int, page_size: int, bigram: bool
) -> None:
    for keep in (0, page_size - 1, 2 * page_size, 2 * page_size + 1):
        case = slide_case(
            num_rows + page_size,
            num_rows=num_rows,
            page_size=page_size,
            max_pages=max_pages,
            keep=keep,
            bigram=bigram,
        )
        assert_same(run(case), expected(case))


def _frontier(
    computed: int, page_size: int, keep: int, *, owned: int = 0, old: int = 0, bigram: bool = False
) -> tuple[int, list[int]]:
    """Slide one row whose page p is Full page p + 1 over SWA page p + 1; return frontier, pushes."""
    pages = -(-computed // page_size) + 1
    ids = torch.arange(pages + 1, dtype=torch.int32)
    page_table, swa_map = ids[1:].clone()[None, :], ids.clone()
    swa_stack = torch.zeros(pages, dtype=torch.int32)
    state = torch.tensor([[computed], [computed], [owned], [old]], dtype=torch.int32)
    tops = torch.zeros(2, dtype=torch.int32)
    rows = torch.zeros(1, dtype=torch.int32)
    sizes = {"num_rows": 1, "page_size": page_size, "keep": keep, "bigram": bigram}
    slide(rows, page_table, swa_map, swa_stack, state, tops, **sizes)
    pushed = swa_stack[: int(tops[1])].tolist()
    assert [page for page in range(1, pages + 1) if swa_map[page] == 0] == pushed
    return int(state[3, 0]), pushed


@pytest.mark.parametrize("computed", range(19, 24))
def test_page_larger_than_window_keeps_the_page_before_the_insert_boundary(computed: int) -> None:
    assert _frontier(computed, page_size=8, keep=2) == (8, [1])


def test_page_larger_than_window_full_size() -> None:
    assert _frontier(712, page_size=256, keep=128) == (256, [1])


def test_window_that_is_no_multiple_of_the_page() -> None:
    assert _frontier(27, page_size=4, keep=6) == (16, [1, 2, 3, 4])


@pytest.mark.parametrize("page_size", range(1, 257, 5))
def test_a_whole_window_stays_before_the_end_of_the_key_without_its_last_token(
    page_size: int,
) -> None:
    for keep in (0, 1, 6, page_size - 1, page_size, page_size + 1, 128):
        for computed in (0, 1, page_size, 3 * page_size + 1, 700):
            end = max(0, computed - 1) // page_size * page_size
            frontier, _ = _frontier(computed, page_size, keep)
            assert frontier % page_size == 0
            assert end - frontier >= min(keep, end)
            assert end - frontier < keep + page_size  # and no page more than that


@pytest.mark.parametrize("page_size", [1, 4])
def test_nothing_inside_the_window_is_freed_chunk_by_chunk(page_size: int) -> None:
    first, _ = _frontier(17, page_size, keep=8)
    second, freed = _frontier(33, page_size, keep=8, old=first)
    assert (first, second) == (8, 24)
    assert freed == [page + 1 for page in range(8 // page_size, 24 // page_size)]


def test_bigram_keys_keep_the_page_that_the_last_token_does_not_complete() -> None:
    assert _frontier(32, page_size=4, keep=7, bigram=True) == (20, [1, 2, 3, 4, 5])
    assert _frontier(0, page_size=4, keep=0, bigram=True) == (0, [])
    assert _frontier(1, page_size=1, keep=0, bigram=True) == (0, [])


def test_pages_of_the_tree_stay() -> None:
    assert _frontier(40, page_size=4, keep=8, owned=16) == (28, [5, 6, 7])
    assert _frontier(41, page_size=4, keep=8, owned=16) == (32, [5, 6, 7, 8])
    assert _frontier(40, page_size=4, keep=8, owned=40) == (28, [])


def test_a_key_that_ends_with_a_page_keeps_the_window_before_that_page() -> None:
    """The same prompt, sent again, leaves its last token off."""
    assert [_frontier(n, page_size=4, keep=8)[0] for n in range(39, 43)] == [28, 28, 32, 32]
    assert [_frontier(n, page_size=1, keep=8)[0] for n in range(8, 12)] == [0, 0, 1, 2]
    bigram = [_frontier(n, page_size=4, keep=8, bigram=True)[0] for n in range(39, 43)]
    assert bigram == [28, 28, 28, 32]


def test_the_frontier_never_moves_back() -> None:
    assert _frontier(20, page_size=4, keep=8, old=16) == (16, [])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rows", np.zeros(6, np.int64), "rows must be torch.int32, got torch.int64"),
        ("swa_map", np.zeros(0, np.int32), "swa_map must have an entry per Full page"),
        ("row_state", np.zeros((4, 2), np.int32), r"row_state.numel\(\) must be 28, got 8"),
        ("tops", np.zeros(1, np.int32), r"tops.shape\[0\] must be 2, got 1"),
        ("num_rows", 7, r"num_rows must be in \[0, 6\], got 7"),
        ("page_size", 0, "page_size must be >= 1, got 0"),
        ("keep", -1, "keep must be >= 0, got -1"),
    ],
)
def test_refuses_what_does_not_fit(name: str, value: Any, message: str) -> None:
    case = slide_case(0, num_rows=4, page_size=4, max_pages=3, keep=4)
    arrays, scalars = dict(case.arrays), dict(case.scalars)
    (arrays if name in arrays else scalars)[name] = value
    with pytest.raises(InvalidInputError, match=message):
        run(Case(case.op, arrays, scalars))
