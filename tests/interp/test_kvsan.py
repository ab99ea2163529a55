"""The sanitizer finds each planted fault, and nothing in sound kernels."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from instruments.kvsan import KernelFault, sanitize
from triton.runtime.errors import InterpreterError


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture(scope="module")
def faulty() -> ModuleType:
    path = Path(__file__).with_name("faulty_kernels.py")
    spec = importlib.util.spec_from_file_location("faulty_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "grid", "args", "message"),
    [
        ("store_without_mask", 4, [30, 30, 30, 8], "store out of bounds of `out_ptr`"),
        ("counter_without_atomic", 4, [4, 8, 1], "race on `stack_ptr`|race on `top_ptr`"),
        ("neighbour_read_in_place", 3, [32, 8], "race on `x_ptr`"),
    ],
)
def test_finds(faulty: ModuleType, name: str, grid: int, args: list[int], message: str) -> None:
    sizes = [torch.zeros(n, dtype=torch.int32) for n in args]
    kernel = getattr(faulty, name)
    # arguments whose parameter is no pointer stay ints
    bound = [
        x if parameter.endswith("_ptr") else n
        for parameter, x, n in zip(kernel.arg_names, sizes, args, strict=True)
    ]
    with sanitize(), pytest.raises(KernelFault, match=message):
        kernel[(grid,)](*bound)


def test_finds_a_page_that_two_programs_free(faulty: ModuleType) -> None:
    pages, swa_map = ints(1, 1, 2, 3), ints(0, 8, 7, 6)
    args = (pages, swa_map, torch.zeros(8, dtype=torch.int32), ints(0))
    with sanitize(), pytest.raises(KernelFault, match="race on `map_ptr`"):
        faulty.shared_page_freed_twice[(4,)](*args)


def test_finds_a_gather_past_the_end(faulty: ModuleType) -> None:
    args = (ints(0, 1, 2, 50, 1, 2, 3, 0), ints(*range(8)), ints(*range(8)), 8, 8)
    with sanitize(), pytest.raises(KernelFault, match="load out of bounds of `x_ptr`: element 50"):
        faulty.gather_past_the_end[(1,)](*args)


def test_finds_lanes_that_disagree(faulty: ModuleType) -> None:
    with sanitize(), pytest.raises(KernelFault, match="different values to one address"):
        faulty.two_lanes_one_address[(1,)](ints(*range(8)), ints(0, 0, 0, 0), 8)


def test_finds_a_read_back_but_not_after_a_barrier(faulty: ModuleType) -> None:
    with sanitize():
        faulty.read_back_after_barrier[(1,)](ints(0), ints(0))
        with pytest.raises(KernelFault, match="without a barrier"):
            faulty.read_back[(1,)](ints(0), ints(0))


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("index_overflow", (ints(70000), ints(0), 70000)),
        ("false_assert", (ints(1),)),
        ("false_assumption", (ints(1), ints(0))),
    ],
)
def test_turns_on_checks_that_the_interpreter_leaves_off(
    faulty: ModuleType, name: str, args: tuple[object, ...]
) -> None:
    with sanitize(), pytest.raises((InterpreterError, AssertionError)):
        getattr(faulty, name)[(1,)](*args)


def test_poison_shows_a_masked_lane_in_the_value(faulty: ModuleType) -> None:
    plain, poisoned = ints(0), ints(0)
    faulty.masked_lane_summed[(1,)](ints(*range(8)), plain, 7, 8)
    with sanitize():
        faulty.masked_lane_summed[(1,)](ints(*range(8)), poisoned, 7, 8)
    assert plain.item() == 21
    assert poisoned.item() == 21 + 0x5A5A5A5A


def test_orders_show_a_result_that_depends_on_them(faulty: ModuleType) -> None:
    results = set()
    for mode in ({}, {"order": 1}, {"order": 2}, {"interleave": 1}, {"interleave": 2}):
        out = ints(0, 0, 0, 0)
        with sanitize(**mode):
            faulty.ticket_order_shows[(4,)](ints(5, 6, 7, 8), out, ints(0))
        assert sorted(out.tolist()) == [5, 6, 7, 8]
        results.add(tuple(out.tolist()))
    assert len(results) > 1


@pytest.mark.parametrize("mode", [{}, {"order": 3}, {"interleave": 3}], ids=str)
def test_is_silent_on_a_sound_kernel(faulty: ModuleType, mode: dict[str, int]) -> None:
    x, out = torch.arange(30, dtype=torch.int32), torch.zeros(30, dtype=torch.int32)
    with sanitize(**mode):
        faulty.sound[(4,)](x, out, 30, 8)
    assert torch.equal(x, out)
