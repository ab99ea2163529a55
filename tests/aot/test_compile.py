"""Every kernel compiles for four GPUs, spills nothing, and is compiled once whatever the sizes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from instruments.aot import TARGETS, Resources, compiled_variants, resources
from kernel_cases import (
    Case,
    advance_case,
    apply_case,
    extend_case,
    run,
    slide_case,
    step_case,
    translate_case,
)

# what one launch looks like in a usual configuration, for each kernel and flag
CASES: dict[str, Callable[[], Case]] = {
    "extend": lambda: extend_case(0, num_rows=3, max_pages=5),
    "step": lambda: step_case(0, num_rows=3, page_size=64),
    "advance": lambda: advance_case(0, num_rows=3, has_lens=False),
    "slide": lambda: slide_case(0, num_rows=3, page_size=64, max_pages=3, keep=128),
    "apply": lambda: apply_case(0, num=3, max_pages=5),
    "translate": lambda: translate_case(0, shape=(40,), page_size=64),
}
OTHER_FLAGS: dict[str, Callable[[], Case]] = {
    "extend_full_only": lambda: extend_case(0, num_rows=3, max_pages=5, has_swa=False),
    "step_full_only": lambda: step_case(0, num_rows=3, page_size=1, has_swa=False),
    "step_odd_page": lambda: step_case(0, num_rows=3, page_size=48),
    "advance_lens": lambda: advance_case(0, num_rows=3, has_lens=True),
    "slide_bigram": lambda: slide_case(
        0, num_rows=3, page_size=48, max_pages=3, keep=9, bigram=True
    ),
    "apply_full_only": lambda: apply_case(0, num=3, max_pages=5, has_swa=False),
    "translate_int32": lambda: translate_case(0, shape=(40,), page_size=1, dtype=np.int32),
}
# registers per thread, with room for other versions of Triton: 3.6.0 takes 64 where 3.9.0 takes 48
MOST_REGISTERS = 80
# barriers on sm_90: none but one in the loop of apply (map entries are read, then cleared) and those
# of the prefix sums in the kernels of one program
MOST_BARRIERS = {"extend": 0, "step": 8, "advance": 0, "slide": 24, "apply": 1, "translate": 0}


def variants(target: str, cases: Iterable[Case]) -> list[Any]:
    """Compile what the wrapper launches for each case (all of one op)."""
    cases = list(cases)
    op = cases[0].op
    kernel = getattr(importlib.import_module(f"kvcache.kernels.{op}"), f"_{op}_kernel")
    return compiled_variants(kernel, TARGETS[target], lambda: [run(case) for case in cases])


def compile_one(target: str, case: Case) -> Resources:
    (binary,) = variants(target, [case])
    return resources(binary)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", CASES)
def test_compiles_without_spills(op: str, target: str) -> None:
    found = compile_one(target, CASES[op]())
    print(f"\n{op} {target}: {found}")
    assert found.spills == 0
    assert found.registers <= MOST_REGISTERS
    assert found.stores
    if target == "sm_90":
        assert found.barriers <= MOST_BARRIERS[op]


@pytest.mark.parametrize("name", OTHER_FLAGS)
def test_other_flags_compile_without_spills(name: str) -> None:
    found = compile_one("sm_90", OTHER_FLAGS[name]())
    print(f"\n{name} sm_90: {found}")
    assert found.spills == 0
    assert found.registers <= MOST_REGISTERS


def test_translate_reads_and_writes_whole_blocks_in_vectors() -> None:
    found = compile_one("sm_90", CASES["translate"]())
    assert found.loads["ld.global.v2.b64"] >= 1
    assert found.stores["st.global.v2.b64"] >= 1


SIZES = [1, 2, 3, 15, 16, 17, 32, 33, 128, 160]
SWEEPS: dict[str, Callable[[int], Case]] = {
    "extend": lambda n: extend_case(n, num_rows=n, max_pages=n),
    "step": lambda n: step_case(n, num_rows=n, page_size=4),
    "advance": lambda n: advance_case(n, num_rows=n, has_lens=True),
    "slide": lambda n: slide_case(n, num_rows=n, page_size=4, max_pages=n, keep=n),
    "apply": lambda n: apply_case(n, num=n, max_pages=5),
    "translate": lambda n: translate_case(n, shape=(n,), page_size=4),
}


@pytest.mark.parametrize("op", SWEEPS)
def test_one_variant_over_all_sizes(op: str) -> None:
    assert len(variants("sm_90", [SWEEPS[op](n) for n in SIZES])) == 1


def test_a_descriptor_view_that_is_not_aligned_compiles_nothing_new() -> None:
    """The plan may hand out a slice of its staging buffer; only whole state tensors must be aligned."""
    import torch

    from kvcache.kernels.step import _step_kernel, step

    def call() -> None:
        case = step_case(0, num_rows=8, page_size=4)
        arrays = {name: torch.from_numpy(x) for name, x in case.arrays.items() if x is not None}
        rows = arrays.pop("rows")
        for shift in range(4):
            step(rows[shift:], *arrays.values(), **{**case.scalars, "num_rows": 4})

    assert len(compiled_variants(_step_kernel, TARGETS["sm_90"], call)) == 1
