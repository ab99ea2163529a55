"""The kernels of the match on the device, native on the CPU in two threads, at the scale of a real batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from instruments.fakedev import accelerator, no_host_sync
from kernel_cases import Case, assert_same, run
from match_cases import (
    bind_match_case,
    expected_bind,
    expected_match,
    expected_update,
    match_case,
    update_mirror_case,
)
from test_device_match import Life, cache_of

from kvcache.device.device_match import DeviceKeys

# every lane is unrolled on the CPU, so the blocks are smaller than on a GPU
BLOCKS = {
    "match._BLOCK": 64,
    "match._HASH_BLOCK": 64,
    "bind_match._BLOCK": 16,
    "update_mirror._BLOCK": 32,
    "apply._BLOCK": 16,
    "extend._BLOCK": 16,
    "advance._BLOCK": 16,
    "slide._BLOCK_ROWS": 16,
}
BATCH = 256


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    from instruments.cpu_driver import CpuDriver
    from instruments.recording import driven_by

    with pytest.MonkeyPatch.context() as patch, driven_by(CpuDriver(threads=2)) as active:
        for name, size in BLOCKS.items():
            patch.setattr(f"kvcache.kernels.{name}", size)
        yield active


def run_native(case: Case) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvcache.kernels.launch.takes_kernel", lambda tensor: True)
        return run(case)


TREE = {"num_slots": 3000, "inserts": 200, "key_pages": 40}
MATCHES: dict[str, dict[str, Any]] = {
    "page64": {"page_size": 64, "aligned": True},
    "page16_int64": {"page_size": 16, "dtype": np.int64, "aligned": True},
    "page48_bigram": {"page_size": 48, "bigram": True},
    "page1": {"page_size": 1, "keep_pages": 20},
    "full_only": {"page_size": 4, "keep_pages": 0},
}


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("seed", range(2), ids=lambda seed: f"seed{seed}")
@pytest.mark.parametrize("name", MATCHES)
def test_match_is_that_of_the_host(name: str, seed: int) -> None:
    case, grown = match_case(seed, num=BATCH, **MATCHES[name], **TREE)
    assert_same(run_native(case), expected_match(case, grown))


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("seed", range(2), ids=lambda seed: f"seed{seed}")
def test_bind_and_update(seed: int) -> None:
    case = bind_match_case(seed, num=BATCH, page_size=16, **TREE)
    assert_same(run_native(case), expected_bind(case))
    case = update_mirror_case(seed, num=(1000, 1500, 300), page_size=16)
    assert_same(run_native(case), expected_update(case))


@pytest.mark.usefixtures("driver")
def test_a_cache_on_an_accelerator_matches_there_and_never_waits() -> None:
    """The whole path on the fake device: log, upload, update, match, admit, bind."""
    with accelerator(lag=3):
        cache = cache_of(device="kvdev")
        life = Life(3, cache)
        hits = bound = 0
        for _ in range(100):
            life.act()
            keys, handles = life.batch()
            tokens = torch.from_numpy(keys.tokens.copy()).to("kvdev")
            there = DeviceKeys(tokens, keys.starts, keys.lens)
            with no_host_sync() as seen:
                found = cache.match(there, handles, on="device", touch=False)
            assert seen.uploads <= 1 or hits == 0  # the first one copies the whole tree
            assert seen.launches["_match_kernel"] == (len(keys) > 0)
            assert set(seen.launches) <= {"_match_kernel", "_update_mirror_kernel"}
            want = cache.match(keys, handles, touch=False)
            assert found.results.tolist() == want.results.tolist()
            hits += int((want.full_hit_len > 0).sum())
            index = np.arange(min(len(keys), 4))
            if index.size:
                rows = cache.admit(found, index)
                by_plan = cache.match(keys, handles, touch=False)
                pages = [r.tolist() for r in cache.pools.page_table[cache.index(rows).tolist()]]
                cache.abort(rows)
                rows = cache.admit(by_plan, index)
                for row, mine in zip(cache.index(rows).tolist(), pages, strict=True):
                    n = int(cache.rows.computed_len[row]) // 4
                    assert cache.pools.page_table[row].tolist()[:n] == mine[:n]
                    bound += n
                cache.check()
                cache.abort(rows)
        assert hits > 20
        assert bound > 20
