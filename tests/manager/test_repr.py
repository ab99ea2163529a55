"""What a debugger and a log line show of a manager and of keys: short, and without device work."""

from __future__ import annotations

import numpy as np
from instruments.fakedev import accelerator, no_host_sync

from kvcache import CacheConfig, KeyBatch, KVCacheManager

SIZES = {"page_size": 4, "full_pages": 64, "max_rows": 3, "max_len": 64}


def test_repr_of_keys_says_how_many_tokens_they_name() -> None:
    tokens = np.arange(1000, dtype=np.int32)
    assert repr(KeyBatch(tokens, [0, 500], [7, 5])) == "KeyBatch(2 keys, 12 tokens, int32)"
    assert repr(KeyBatch.pack([])) == "KeyBatch(0 keys, 0 tokens, int64)"


def test_repr_of_a_manager_says_what_runs_and_what_is_free() -> None:
    cache = KVCacheManager(CacheConfig(**SIZES, window=8, swa_pages=32))
    rows = cache.admit(cache.match(KeyBatch(np.arange(20, dtype=np.int32), [0], [19])))
    cache.extend(rows, [20])
    about = "KVCacheManager(page_size=4, window=8, device='cpu'"
    pages = "59 of 64 Full pages and 27 of 32 SWA pages free"
    assert repr(cache) == f"{about}: 1 of 3 rows running, {pages})"
    cache.close()
    assert repr(cache) == f"{about}, closed)"


def test_repr_without_a_window_names_no_swa_pages() -> None:
    cache = KVCacheManager(CacheConfig(**SIZES, window=None, swa_pages=0))
    rows = "0 of 3 rows running, 64 of 64 Full pages free"
    assert repr(cache) == f"KVCacheManager(page_size=4, window=None, device='cpu': {rows})"


def test_repr_does_no_device_work() -> None:
    with accelerator(run_kernels=False):
        cache = KVCacheManager(CacheConfig(**SIZES, window=8, swa_pages=32, device="kvdev"))
        with no_host_sync() as seen:
            assert "device='kvdev:0'" in repr(cache)
        assert not seen.ops
        assert not seen.launches
