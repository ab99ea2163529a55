"""Every kernel against its twin, bit for bit, under the interpreter.

A launch costs 0.1 to 0.3 ms per Triton operation and program whatever the block size, so the cases have
few programs. Block edges are tried at the blocks that ship, and, where that costs many programs, also at
blocks of a few entries.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from instruments.launches import count_launches
from kernel_cases import (
    Case,
    advance_case,
    apply_case,
    assert_same,
    extend_case,
    num_launches,
    run,
    slide_case,
    step_case,
    translate_case,
)

from kvcache.kernels import layout

PAGE_SIZES = [1, 4, 16, 64, 256]
ODD_PAGE_SIZE = 48


def check(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run kernel, then twin, and compare."""
    with count_launches() as launches:
        got = run(case)
    assert launches.total() == num_launches(case)
    with monkeypatch.context() as patch:
        patch.setattr("kvcache.kernels.launch.takes_kernel", lambda tensor: False)
        want = run(case)
    assert_same(got, want)


def small_blocks(monkeypatch: pytest.MonkeyPatch, op: str, **blocks: int) -> None:
    """Let the kernel of `op` run with small blocks."""
    for name, size in blocks.items():
        monkeypatch.setattr(f"kvcache.kernels.{op}.{name}", size)


@pytest.mark.parametrize("has_swa", [True, False], ids=["swa", "full_only"])
@pytest.mark.parametrize("max_pages", [0, 1, 127, 128, 129, 9 * 128 + 1])
def test_extend(max_pages: int, has_swa: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    num_rows = 6 if max_pages <= 129 else 2
    check(
        extend_case(max_pages, num_rows=num_rows, max_pages=max_pages, has_swa=has_swa), monkeypatch
    )


@pytest.mark.parametrize("num_rows", [0, 1, 20])
@pytest.mark.parametrize("max_pages", [15, 16, 17, 150])
def test_extend_small_blocks(
    max_pages: int, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch, "extend", _BLOCK=16)
    check(extend_case(num_rows, num_rows=num_rows, max_pages=max_pages), monkeypatch)


@pytest.mark.parametrize("has_swa", [True, False], ids=["swa", "full_only"])
@pytest.mark.parametrize("page_size", [*PAGE_SIZES, ODD_PAGE_SIZE])
@pytest.mark.parametrize("num_rows", [0, 1, 32, 255, 256, 257, 600])
def test_step(
    num_rows: int, page_size: int, has_swa: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = step_case(num_rows + page_size, num_rows=num_rows, page_size=page_size, has_swa=has_swa)
    check(case, monkeypatch)


@pytest.mark.parametrize("has_lens", [True, False], ids=["lens", "allocated"])
@pytest.mark.parametrize("num_rows", [0, 1, 127, 128, 129, 300])
def test_advance(num_rows: int, has_lens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    check(advance_case(num_rows, num_rows=num_rows, has_lens=has_lens), monkeypatch)


@pytest.mark.parametrize("bigram", [False, True], ids=["tokens", "bigram"])
@pytest.mark.parametrize("page_size", [*PAGE_SIZES, ODD_PAGE_SIZE])
@pytest.mark.parametrize(
    ("num_rows", "max_pages"),
    [(0, 1), (1, 1), (20, 3), (20, 4), (20, 5), (255, 2), (256, 2), (257, 2), (2, 60)],
)
def test_slide(
    num_rows: int, max_pages: int, page_size: int, bigram: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = slide_case(
        num_rows + max_pages,
        num_rows=num_rows,
        page_size=page_size,
        max_pages=max_pages,
        keep=(0, page_size, page_size + 1, 128)[num_rows % 4],
        bigram=bigram,
    )
    check(case, monkeypatch)


@pytest.mark.parametrize("num_rows", [7, 8, 9, 40])
@pytest.mark.parametrize("max_pages", [1, 2, 30])
def test_slide_small_blocks(max_pages: int, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch, "slide", _BLOCK_ROWS=8, _BLOCK_PAGES=2)
    case = slide_case(num_rows, num_rows=num_rows, page_size=4, max_pages=max_pages, keep=6)
    check(case, monkeypatch)


@pytest.mark.parametrize("has_swa", [True, False], ids=["swa", "full_only"])
@pytest.mark.parametrize("max_pages", [0, 1, 127, 128, 129, 9 * 128 + 1])
def test_apply(max_pages: int, has_swa: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    num = 10 if max_pages <= 129 else 2
    check(apply_case(max_pages, num=num, max_pages=max_pages, has_swa=has_swa), monkeypatch)


@pytest.mark.parametrize("num", [0, 1, 30])
@pytest.mark.parametrize("max_pages", [15, 16, 17, 150])
def test_apply_small_blocks(max_pages: int, num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch, "apply", _BLOCK=16)
    check(apply_case(num, num=num, max_pages=max_pages), monkeypatch)


@pytest.mark.parametrize("op", range(layout.SET_ROW + 1))
def test_apply_each_op(op: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(apply_case(op, num=4, max_pages=9, ops=(op,)), monkeypatch)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("page_size", [*PAGE_SIZES, ODD_PAGE_SIZE])
@pytest.mark.parametrize("shape", [(0,), (), (1,), (1023,), (1024,), (1025,), (3, 700)])
def test_translate(
    shape: tuple[int, ...], page_size: int, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = translate_case(page_size, shape=shape, page_size=page_size, dtype=dtype)
    check(case, monkeypatch)
