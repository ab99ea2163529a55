"""Every kernel on a GPU against its twin, bit for bit, one launch each; other tests hold the twins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from decode_cases import decode_slide_case, decode_step_case
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
from match_cases import (
    bind_match_case,
    match_case,
    update_mirror_case,
)
from view_cases import fill_indices_case, fill_table_case

DEVICE = "cuda"
# each is a variant that the first launch compiles, which is most of the time that these tests take
PAGE_SIZES = [1, 64]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or HIP device"),
]


def check(case: Case) -> None:
    """Run kernel, then twin, on arrays of their own, and compare."""
    with count_launches() as launches:
        got = run(case, DEVICE)
    assert launches.total() == num_launches(case)
    assert_same(got, run(case, "cpu"))


@pytest.mark.parametrize("has_swa", [True, False], ids=["swa", "full_only"])
@pytest.mark.parametrize("max_pages", [0, 1, 127, 128, 129, 9 * 128 + 1])
@pytest.mark.parametrize("num_rows", [0, 1, 7, 256])
def test_extend(num_rows: int, max_pages: int, has_swa: bool) -> None:
    check(extend_case(max_pages, num_rows=num_rows, max_pages=max_pages, has_swa=has_swa))


@pytest.mark.parametrize("has_swa", [True, False], ids=["swa", "full_only"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("num_rows", [0, 1, 255, 256, 257, 1024])
def test_step(num_rows: int, page_size: int, has_swa: bool) -> None:
    seed = num_rows + page_size
    check(step_case(seed, num_rows=num_rows, page_size=page_size, has_swa=has_swa))


@pytest.mark.parametrize("has_lens", [True, False], ids=["lens", "allocated"])
@pytest.mark.parametrize("num_rows", [0, 1, 127, 128, 129, 1024])
def test_advance(num_rows: int, has_lens: bool) -> None:
    check(advance_case(num_rows, num_rows=num_rows, has_lens=has_lens))


@pytest.mark.parametrize("bigram", [False, True], ids=["tokens", "bigram"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("num_rows", [0, 1, 255, 256, 257, 600])
def test_slide(num_rows: int, page_size: int, bigram: bool) -> None:
    seed, keep = num_rows + page_size, 2 * page_size + 1
    sizes = {"num_rows": num_rows, "page_size": page_size, "max_pages": 9, "keep": keep}
    check(slide_case(seed, bigram=bigram, **sizes))


@pytest.mark.parametrize("has_swa", [True, False], ids=["swa", "full_only"])
@pytest.mark.parametrize(("num", "max_pages"), [(0, 3), (1, 0), (20, 5), (300, 129), (3, 1200)])
def test_apply(num: int, max_pages: int, has_swa: bool) -> None:
    check(apply_case(num, num=num, max_pages=max_pages, has_swa=has_swa))


@pytest.mark.parametrize("dtype", [np.int32, np.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("shape", [(0,), (1,), (1023,), (1024,), (1025,), (33, 700)], ids=str)
def test_translate(shape: tuple[int, ...], page_size: int, dtype: Any) -> None:
    check(translate_case(sum(shape), shape=shape, page_size=page_size, dtype=dtype))


@pytest.mark.parametrize("has_lens", [True, False], ids=["lens", "allocated"])
@pytest.mark.parametrize("window", [0, 1, 70])
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize(("num_rows", "max_pages"), [(1, 5), (40, 17), (257, 600)])
def test_views(num_rows: int, max_pages: int, page_size: int, window: int, has_lens: bool) -> None:
    sizes: dict[str, Any] = {
        "num_rows": num_rows,
        "page_size": page_size,
        "max_pages": max_pages,
        "window": window,
        "has_lens": has_lens,
    }
    seed = num_rows + page_size + window
    for aligned in (True, False):
        check(fill_table_case(seed, aligned=aligned, **sizes))
    check(fill_indices_case(seed, unit=page_size, **sizes))
    if max_pages * num_rows * page_size < 10**6:
        for dtype in (np.int32, np.int64):
            case = fill_indices_case(seed, unit=1, dtype=dtype, **sizes)
            check(case)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("num_rows", [1, 256, 300])
def test_decode(num_rows: int, page_size: int) -> None:
    seed = num_rows + page_size
    steps: list[dict[str, Any]] = [{}, {"missing": 1}, {"full_row": 0}, {"error": 2}]
    for how in [*steps, {"has_swa": False}]:
        case = decode_step_case(seed, num_rows=num_rows, page_size=page_size, **how)
        check(case)
    slides: list[dict[str, Any]] = [{}, {"room": 1}, {"error": 2}, {"has_swa": False}]
    for how in [*slides, {"bigram": True}]:
        sizes = {"num_rows": num_rows, "page_size": page_size, "max_pages": 7}
        case = decode_slide_case(seed, keep=page_size + 1, **sizes, **how)
        check(case)


@pytest.mark.parametrize(
    ("page_size", "bigram", "dtype", "aligned"),
    [
        (1, False, np.int32, True),
        (1, True, np.int64, False),
        (64, True, np.int32, False),
        (64, False, np.int32, True),
        (64, False, np.int64, True),
        (64, False, np.int32, False),
    ],
)
def test_match(page_size: int, bigram: bool, dtype: Any, aligned: bool) -> None:
    case, _ = match_case(
        page_size, num=64, page_size=page_size, bigram=bigram, dtype=dtype, aligned=aligned
    )
    check(case)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_bind_match(page_size: int) -> None:
    check(bind_match_case(page_size, num=40, page_size=page_size))


@pytest.mark.parametrize("num", [(1, 0, 0), (70, 300, 5), (0, 1, 40)], ids=str)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_update_mirror(page_size: int, num: tuple[int, int, int]) -> None:
    check(update_mirror_case(page_size, num=num, page_size=page_size))


# a case of each kernel that is over soon: what compute-sanitizer looks at (tools/gpu_check.py)
SHORT: dict[str, Callable[[], Case]] = {
    "extend": lambda: extend_case(1, num_rows=20, max_pages=150),
    "step": lambda: step_case(1, num_rows=300, page_size=64),
    "advance": lambda: advance_case(1, num_rows=200, has_lens=True),
    "slide": lambda: slide_case(1, num_rows=300, page_size=64, max_pages=9, keep=9),
    "apply": lambda: apply_case(1, num=40, max_pages=150),
    "translate": lambda: translate_case(1, shape=(2500,), page_size=64),
    "fill_table": lambda: fill_table_case(1, num_rows=9, page_size=64, max_pages=60, window=70),
    "fill_indices": lambda: fill_indices_case(
        1, num_rows=300, page_size=64, max_pages=20, unit=1, window=30
    ),
    "decode_step": lambda: decode_step_case(1, num_rows=300, page_size=64),
    "decode_slide": lambda: decode_slide_case(1, num_rows=300, page_size=64, max_pages=9, keep=9),
    "match": lambda: match_case(1, num=16, page_size=64)[0],
    "bind_match": lambda: bind_match_case(1, num=16, page_size=64),
    "update_mirror": lambda: update_mirror_case(1, num=(70, 300, 5), page_size=64),
}


@pytest.mark.parametrize("op", SHORT)
def test_short(op: str) -> None:
    check(SHORT[op]())
