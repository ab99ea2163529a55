"""The match on a real device: the host's results bit for bit, without a wait, and rows bound from them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_device_match import Life, cache_of

from kvcache.device.device_match import DeviceKeys

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or HIP device"),
]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_same_results_as_on_the_host(page_size: int, dtype: torch.dtype) -> None:
    cache = cache_of(device="cuda", page_size=page_size, full_pages=400 // page_size)
    life = Life(page_size, cache)
    hits = 0
    for i in range(400):
        life.act()
        if i % 3:
            continue
        keys, handles = life.batch()
        tokens = torch.from_numpy(keys.tokens.copy()).to("cuda", dtype)
        there = DeviceKeys(tokens, keys.starts, keys.lens)
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = cache.match(there, handles, on="device", touch=False)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        want = cache.match(keys, handles, touch=False)
        np.testing.assert_array_equal(found.fetch().results, want.results)
        hits += int((want.full_hit_len > 0).sum())
        index = np.arange(min(len(keys), 4))
        rows = cache.admit(found, index)
        cache.check()
        by_device = cache.pools.page_table[rows.tolist()].cpu()
        cache.abort(rows)
        rows = cache.admit(want, index)
        by_plan = cache.pools.page_table[rows.tolist()].cpu()
        for j, n in enumerate(cache.rows.computed_len[cache.index(rows)] // page_size):
            assert torch.equal(by_device[j, :n], by_plan[j, :n])
        cache.abort(rows)
    assert hits > 100
