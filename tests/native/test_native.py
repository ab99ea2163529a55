"""The stock JIT kernels, compiled and run on the CPU, against their twins at the scale of a real batch.

The interpreter is too slow for batches of 256 and for long lives; this is 1,000 times faster, runs what the
compiler accepts, and runs the programs of a launch in two threads at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from kernel_life import Life

# every lane is unrolled on the CPU, so the blocks are smaller than on a GPU
BLOCKS = {
    "extend._BLOCK": 32,
    "step._BLOCK": 32,
    "advance._BLOCK": 32,
    "slide._BLOCK_ROWS": 16,
    "slide._BLOCK_PAGES": 4,
    "apply._BLOCK": 32,
    "translate._BLOCK": 64,
}
BATCH = 256


class Native:
    """Switches the wrappers between kernel and twin."""

    def __init__(self) -> None:
        self.on = True

    def check(self, case: Case) -> None:
        """Run kernel, then twin, and compare."""
        self.on = True
        with count_launches() as launches:
            got = run(case)
        assert launches.total() == num_launches(case)
        self.on = False
        assert_same(got, run(case))


@pytest.fixture(scope="module")
def native() -> Iterator[Native]:
    from instruments.cpu_driver import CpuDriver
    from instruments.recording import driven_by

    switch = Native()
    with pytest.MonkeyPatch.context() as patch, driven_by(CpuDriver(threads=2)):
        patch.setattr("kvcache.kernels.launch.takes_kernel", lambda tensor: switch.on)
        for name, size in BLOCKS.items():
            patch.setattr(f"kvcache.kernels.{name}", size)
        yield switch


CASES: dict[str, Callable[[int], Case]] = {
    "extend": lambda seed: extend_case(seed, num_rows=BATCH, max_pages=300),
    "extend_full_only": lambda seed: extend_case(seed, num_rows=BATCH, max_pages=3, has_swa=False),
    "step": lambda seed: step_case(seed, num_rows=BATCH, page_size=64),
    "step_4096_rows": lambda seed: step_case(seed, num_rows=4096, page_size=64),
    "step_full_only": lambda seed: step_case(seed, num_rows=BATCH, page_size=1, has_swa=False),
    "advance": lambda seed: advance_case(seed, num_rows=BATCH, has_lens=False),
    "advance_lens": lambda seed: advance_case(seed, num_rows=BATCH, has_lens=True),
    "slide": lambda seed: slide_case(seed, num_rows=BATCH, page_size=64, max_pages=9, keep=128),
    "slide_long_rows": lambda seed: slide_case(
        seed, num_rows=5, page_size=64, max_pages=3000, keep=100
    ),
    "slide_bigram": lambda seed: slide_case(
        seed, num_rows=BATCH, page_size=48, max_pages=9, keep=100, bigram=True
    ),
    "apply": lambda seed: apply_case(seed, num=BATCH, max_pages=150),
    "apply_long_ranges": lambda seed: apply_case(seed, num=9, max_pages=3000),
    "apply_full_only": lambda seed: apply_case(seed, num=BATCH, max_pages=9, has_swa=False),
    "translate": lambda seed: translate_case(seed, shape=(BATCH, 1000), page_size=64),
    "translate_int32": lambda seed: translate_case(
        seed, shape=(BATCH, 999), page_size=16, dtype=np.int32
    ),
}


@pytest.mark.parametrize("seed", range(3), ids=lambda seed: f"seed{seed}")
@pytest.mark.parametrize("name", CASES)
def test_same_as_the_twin(name: str, seed: int, native: Native) -> None:
    native.check(CASES[name](seed))


@pytest.mark.parametrize("page_size", [1, 64])
def test_a_long_life_is_the_same(page_size: int, native: Native) -> None:
    """1,000 random calls on kernels and on twins, all device state compared after each."""
    sizes: dict[str, Any] = {"max_rows": 40, "full_pages": 400, "swa_pages": 250, "keep": 100}
    on_kernels = Life(5, page_size=page_size, **sizes)
    on_twins = Life(5, page_size=page_size, **sizes)
    total = 0
    for _ in range(1000):
        native.on = True
        with count_launches() as launches:
            name = on_kernels.act()
        assert launches.total() <= 1
        total += launches.total()
        native.on = False
        assert on_twins.act() == name
        for field, tensor in on_twins.tensors().items():
            np.testing.assert_array_equal(
                on_kernels.tensors()[field].numpy(), tensor.numpy(), err_msg=f"{name}: {field}"
            )
    assert total > 900
    native.on = True
    on_kernels.check()
