"""Every kernel compiles for four GPUs, spills nothing, and takes no more than perf/results/compile.json says.

What there is to compile: tests/kernels/compile_cases.py. Everything is compiled once and shared by the tests.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import triton
from compile_cases import KERNELS, SWEEPS, compile_kernel, count_variants
from instruments.aot import TARGETS, Resources, compiled_variants
from kernel_cases import step_case

from kvcache import kernels
from kvcache.kernels.launch import Kernel

ROOT = Path(__file__).parents[2]
COMMITTED: dict[str, Any] = json.loads((ROOT / "perf/results/compile.json").read_text())
REGENERATE = (
    "if that is meant, run perf/compile_table.py under each version of Triton that it lists"
)

# bounds for any version of Triton. Registers per thread:
MOST_REGISTERS = 80
# none but one in the loop of apply (map entries are read, then cleared), those of the sums over earlier rows
# and of a match (eight warps meet for a hash and for a block of a compare), and those of prefix sums in the
# kernels of one program; a warp of 64 threads needs fewer
MOST_BARRIERS = {
    "extend": 0,
    "step": 8,
    "advance": 0,
    "slide": 24,
    "apply": 1,
    "translate": 0,
    "decode_step": 24,
    "decode_slide": 32,
    "fill_table": 0,
    "fill_indices": 4,
    "match": 16,
    "bind_match": 0,
    "update_mirror": 6,
}
# loads and stores of 16 bytes, at least. A match reads the tree's tokens so, and keys that are aligned. SWA
# views look each page up; pages at any place of the slab or of a row (apply, bind_match) are moved one by one
WIDE = {
    "translate (P=64, int64)": (1, 1),
    "translate (P=1, int32)": (1, 1),
    "fill_table (Full)": (1, 1),
    "fill_table (SWA)": (0, 1),
    "fill_indices (pages, Full)": (0, 1),
    "fill_indices (pages, SWA)": (0, 1),
    "fill_indices (slots, Full)": (0, 1),
    "fill_indices (slots, SWA, int64)": (0, 1),
    "match (P=64, aligned)": (2, 0),
    "match (P=16, aligned)": (2, 0),
    "match (P=64, aligned, int64)": (2, 0),
    "match (P=4096, aligned)": (2, 0),
    "match (P=64)": (1, 0),
    "match (P=64, bigram)": (1, 0),
    "update_mirror (P=64)": (1, 1),
}

compiled = functools.cache(compile_kernel)
variants_of = functools.cache(count_variants)
every_kernel = pytest.mark.parametrize("name", KERNELS)
every_target = pytest.mark.parametrize("target", TARGETS)


def committed() -> dict[str, Any]:
    """The committed figures of the running Triton; skips where there are none."""
    if triton.__version__ not in COMMITTED:
        pytest.skip(
            f"perf/results/compile.json has triton {', '.join(COMMITTED)}, not {triton.__version__}"
        )
    return COMMITTED[triton.__version__]


def worse(now: dict[str, int], before: dict[str, int]) -> list[str]:
    """What of `now` is worse than `before`, in words."""
    more = ("registers", "spills", "shared", "barriers")
    fewer = ("wide_loads", "wide_stores")
    found = [name for name in more if now[name] > before[name]]
    found += [name for name in fewer if now[name] < before[name]]
    return [f"{name}: {before[name]} -> {now[name]}" for name in found]


@every_target
@every_kernel
def test_spills_nothing_and_stays_in_bounds(name: str, target: str) -> None:
    found: Resources = compiled(name, target)
    print(f"\n{name} {target}: {found}")
    assert found.spills == 0
    assert found.registers <= MOST_REGISTERS
    assert found.barriers <= MOST_BARRIERS[KERNELS[name].op]
    assert found.stores


@every_target
@pytest.mark.parametrize("name", WIDE)
def test_copies_and_compares_16_bytes_at_a_time(name: str, target: str) -> None:
    found = compiled(name, target).figures()
    loads, stores = WIDE[name]
    assert found["wide_loads"] >= loads
    assert found["wide_stores"] >= stores


@every_target
@every_kernel
def test_is_no_worse_than_the_committed_table(name: str, target: str) -> None:
    table = committed()["kernels"]
    found = worse(compiled(name, target).figures(), table[name][target])
    assert not found, f"{'; '.join(found)} ({REGENERATE})"


@pytest.mark.parametrize("op", SWEEPS)
def test_one_variant_over_all_sizes(op: str) -> None:
    assert variants_of(op) == 1


def test_every_kernel_of_the_package_is_compiled() -> None:
    ops = {
        name
        for name in (module.name for module in pkgutil.iter_modules(kernels.__path__))
        if any(
            isinstance(value, Kernel)
            for value in vars(importlib.import_module(f"kvcache.kernels.{name}")).values()
        )
    }
    assert ops == set(SWEEPS) == set(MOST_BARRIERS) == {kernel.op for kernel in KERNELS.values()}
    assert set(WIDE) <= set(KERNELS)


def test_the_committed_table_is_whole_and_written_from_its_figures() -> None:
    spec = importlib.util.spec_from_file_location("_table", ROOT / "perf/compile_table.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.render(COMMITTED) == (ROOT / "perf/results/compile.md").read_text()
    assert script.summary(COMMITTED) in (ROOT / "docs/benchmarks.md").read_text(), REGENERATE
    assert {"3.6.0", "3.9.0"} <= set(COMMITTED)
    for figures in COMMITTED.values():
        assert list(figures["kernels"]) == list(KERNELS), REGENERATE
        assert all(list(by_target) == list(TARGETS) for by_target in figures["kernels"].values())
        assert figures["variants"] == dict.fromkeys(SWEEPS, 1)


def test_whatever_gets_worse_is_named() -> None:
    before = {
        "registers": 40,
        "spills": 0,
        "shared": 32,
        "barriers": 2,
        "wide_loads": 2,
        "wide_stores": 1,
    }
    assert worse(before, before) == []
    better = {**before, "registers": 39, "wide_loads": 3}
    assert worse(better, before) == []
    for name in before:
        step = -1 if name.startswith("wide") else 1
        now = {**before, name: before[name] + step}
        assert worse(now, before) == [f"{name}: {before[name]} -> {now[name]}"]


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
