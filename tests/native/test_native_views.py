"""The kernels that fill attention views, native on the CPU in two threads, at the scale of a real batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from kernel_cases import Case, assert_same, run
from view_cases import fill_indices_case, fill_table_case

# every lane is unrolled on the CPU, so the blocks are smaller than on a GPU
BLOCKS = {
    "fill_table._BLOCK": 32,
    "fill_indices._BLOCK": 32,
    "fill_indices._BLOCK_ROWS": 32,
}
BATCH = 256


@pytest.fixture(scope="module")
def run_native() -> Callable[[Case], dict[str, object]]:
    from instruments.cpu_driver import CpuDriver
    from instruments.recording import driven_by

    driver = CpuDriver(threads=2)

    def on_kernel(case: Case) -> dict[str, object]:
        with pytest.MonkeyPatch.context() as patch, driven_by(driver):
            patch.setattr("kvcache.kernels.launch.takes_kernel", lambda tensor: True)
            for name, size in BLOCKS.items():
                patch.setattr(f"kvcache.kernels.{name}", size)
            return dict(run(case))

    return on_kernel


CASES: dict[str, Callable[[int], Case]] = {
    "table": lambda seed: fill_table_case(seed, num_rows=BATCH, page_size=64, max_pages=300),
    "table_swa": lambda seed: fill_table_case(
        seed, num_rows=BATCH, page_size=64, max_pages=300, window=128, has_lens=True
    ),
    "table_odd_width": lambda seed: fill_table_case(
        seed, num_rows=BATCH, page_size=48, max_pages=77, aligned=False
    ),
    "pages": lambda seed: fill_indices_case(
        seed, num_rows=BATCH, page_size=64, max_pages=300, unit=64
    ),
    "pages_swa": lambda seed: fill_indices_case(
        seed, num_rows=BATCH, page_size=64, max_pages=40, unit=64, window=128, has_lens=True
    ),
    "slots": lambda seed: fill_indices_case(
        seed, num_rows=BATCH, page_size=64, max_pages=30, unit=1
    ),
    "slots_swa": lambda seed: fill_indices_case(
        seed, num_rows=BATCH, page_size=48, max_pages=30, unit=1, window=500, dtype=np.int64
    ),
    "slots_of_one_page": lambda seed: fill_indices_case(
        seed, num_rows=BATCH, page_size=1, max_pages=3000, unit=1, window=4000
    ),
}


@pytest.mark.parametrize("seed", range(3), ids=lambda seed: f"seed{seed}")
@pytest.mark.parametrize("name", CASES)
def test_same_as_the_twin(
    name: str, seed: int, run_native: Callable[[Case], dict[str, np.ndarray]]
) -> None:
    case = CASES[name](seed)
    assert_same(run_native(case), run(case))
