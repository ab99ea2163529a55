"""The kernels of a captured decode step compile for four GPUs, spill nothing, and have one variant."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from decode_cases import decode_slide_case, decode_step_case
from instruments.aot import TARGETS, Resources, compiled_variants, resources
from kernel_cases import Case, run

CASES: dict[str, Callable[[], Case]] = {
    "step": lambda: decode_step_case(0, num_rows=3, page_size=64),
    "slide": lambda: decode_slide_case(0, num_rows=3, page_size=64, max_pages=3, keep=128),
}
OTHER_FLAGS: dict[str, Callable[[], Case]] = {
    "step_full_only": lambda: decode_step_case(0, num_rows=3, page_size=48, has_swa=False),
    "slide_bigram": lambda: decode_slide_case(
        0, num_rows=3, page_size=48, max_pages=3, keep=9, bigram=True
    ),
    "slide_full_only": lambda: decode_slide_case(
        0, num_rows=3, page_size=1, max_pages=3, keep=9, has_swa=False
    ),
}
MOST_REGISTERS = 80
MOST_BARRIERS = {"decode_step": 24, "decode_slide": 32}


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
@pytest.mark.parametrize("name", CASES)
def test_compiles_without_spills(name: str, target: str) -> None:
    case = CASES[name]()
    found = compile_one(target, case)
    print(f"\n{name} {target}: {found}")
    assert found.spills == 0
    assert found.registers <= MOST_REGISTERS
    if target == "sm_90":
        assert found.barriers <= MOST_BARRIERS[case.op]


@pytest.mark.parametrize("name", OTHER_FLAGS)
def test_other_flags_compile_without_spills(name: str) -> None:
    found = compile_one("sm_90", OTHER_FLAGS[name]())
    assert found.spills == 0
    assert found.registers <= MOST_REGISTERS


SIZES = [1, 2, 15, 16, 17, 33, 128]
SWEEPS: dict[str, Callable[[int], Case]] = {
    "step": lambda n: decode_step_case(n, num_rows=n, page_size=4),
    "slide": lambda n: decode_slide_case(n, num_rows=n, page_size=4, max_pages=n, keep=n),
}


@pytest.mark.parametrize("name", SWEEPS)
def test_one_variant_over_all_sizes(name: str) -> None:
    assert len(variants("sm_90", [SWEEPS[name](n) for n in SIZES])) == 1
