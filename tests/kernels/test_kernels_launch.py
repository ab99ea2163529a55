"""kernels/launch.py: triton stays unimported until a launch, and modules keep their plain ints."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from kvcache.errors import InvalidInputError
from kvcache.kernels import apply, layout, slide
from kvcache.kernels.launch import check_operands, range_programs, takes_kernel

OPS = "extend, step, advance, slide, apply, translate"


def test_importing_and_running_on_the_cpu_imports_no_triton() -> None:
    code = f"""
import sys, torch
before = "triton" in sys.modules
from kvcache.kernels import {OPS}
translate.translate(torch.zeros(3, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), page_size=4)
assert before or "triton" not in sys.modules
"""
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_the_kernel_sees_constexprs_and_its_module_plain_ints() -> None:
    jit: Any = apply._apply_kernel.decorate()
    seen = jit.fn.__globals__
    assert type(seen["ADOPT"]).__name__ == "constexpr"
    assert seen["ADOPT"].value == layout.ADOPT
    assert type(apply.ADOPT) is int
    assert "tl" not in vars(apply)


def test_a_kernel_is_decorated_once_and_afresh_on_demand() -> None:
    kernel = slide._slide_kernel
    assert kernel.jit is kernel.jit
    assert kernel.decorate() is not kernel.decorate()
    assert [p.name for p in kernel.decorate().params if p.is_constexpr] == [
        "P",
        "BIGRAM",
        "BLOCK_ROWS",
        "BLOCK_PAGES",
    ]


def test_only_tensors_on_the_cpu_take_the_twin() -> None:
    assert not takes_kernel(torch.zeros(1))
    assert takes_kernel(torch.zeros(1, device="meta"))


@pytest.mark.parametrize(
    ("max_pages", "programs"), [(0, 1), (1, 1), (16, 1), (17, 2), (128, 8), (129, 8), (10**6, 8)]
)
def test_programs_of_a_page_range(max_pages: int, programs: int) -> None:
    assert range_programs(max_pages, 16) == programs


def test_operands_must_share_a_device() -> None:
    x = torch.zeros(2, dtype=torch.int32)
    check_operands(("x", x, 1), ("y", x, 1))
    with pytest.raises(InvalidInputError, match="y must be on cpu, got meta"):
        check_operands(("x", x, 1), ("y", x.to("meta"), 1))
