"""The kernels that fill attention views compile for four GPUs, spill nothing, and copy 16 bytes at a time."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from instruments.aot import TARGETS, Resources, compiled_variants, resources
from kernel_cases import Case, run
from view_cases import fill_indices_case, fill_table_case

CASES: dict[str, Callable[[], Case]] = {
    "table": lambda: fill_table_case(0, num_rows=3, page_size=64, max_pages=40),
    "table_swa": lambda: fill_table_case(0, num_rows=3, page_size=64, max_pages=5, window=128),
    "pages": lambda: fill_indices_case(0, num_rows=3, page_size=64, max_pages=5, unit=64),
    "pages_swa": lambda: fill_indices_case(
        0, num_rows=3, page_size=64, max_pages=5, unit=64, window=128
    ),
    "slots": lambda: fill_indices_case(0, num_rows=3, page_size=64, max_pages=5, unit=1),
    "slots_swa": lambda: fill_indices_case(
        0, num_rows=3, page_size=64, max_pages=5, unit=1, window=128, dtype=np.int64
    ),
}
OTHER_FLAGS: dict[str, Callable[[], Case]] = {
    "table_lens_odd_width": lambda: fill_table_case(
        0, num_rows=3, page_size=48, max_pages=5, has_lens=True, aligned=False
    ),
    "pages_of_one_token": lambda: fill_indices_case(
        0, num_rows=3, page_size=1, max_pages=5, unit=1, window=9
    ),
    "slots_swa_lens": lambda: fill_indices_case(
        0, num_rows=3, page_size=48, max_pages=5, unit=1, window=9, has_lens=True
    ),
}
MOST_REGISTERS = 64
# a sum over earlier rows takes two, the rest none
MOST_BARRIERS = {"fill_table": 0, "fill_indices": 4}


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
def test_compiles_without_spills_and_stores_in_vectors(name: str, target: str) -> None:
    case = CASES[name]()
    found = compile_one(target, case)
    print(f"\n{name} {target}: {found}")
    assert found.spills == 0
    assert found.registers <= MOST_REGISTERS
    assert found.barriers <= MOST_BARRIERS[case.op]
    if target != "gfx942":
        wide = "st.global.v2.b64" if name == "slots_swa" else "st.global.v4.b32"
        assert found.stores[wide] >= 1
    if target == "sm_90" and name == "table":
        assert found.loads["ld.global.v4.b32"] >= 1


@pytest.mark.parametrize("name", OTHER_FLAGS)
def test_other_flags_compile_without_spills(name: str) -> None:
    found = compile_one("sm_90", OTHER_FLAGS[name]())
    assert found.spills == 0
    assert found.registers <= MOST_REGISTERS


SIZES = [1, 2, 3, 15, 16, 17, 33, 128]
SWEEPS: dict[str, Callable[[int], Case]] = {
    "table": lambda n: fill_table_case(n, num_rows=n, page_size=4, max_pages=n, window=n),
    "pages": lambda n: fill_indices_case(
        n, num_rows=n, page_size=4, max_pages=n, unit=4, window=n, has_lens=True
    ),
}


@pytest.mark.parametrize("name", SWEEPS)
def test_one_variant_over_all_sizes(name: str) -> None:
    assert len(variants("sm_90", [SWEEPS[name](n) for n in SIZES])) == 1
