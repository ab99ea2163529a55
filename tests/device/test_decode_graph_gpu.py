"""A real graph capture of the decode step: replayed over a long life, the same as eager twins on the CPU."""

from __future__ import annotations

import pytest
import torch
from decode_life import DecodeLife, eager, state_of

from kvcache import CacheConfig, KVCacheManager
from kvcache.device.decode_step import DecodeStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or HIP device"),
]


class Captured:
    """Decode by replaying one CUDA graph."""

    def __init__(self, cache: KVCacheManager) -> None:
        self.step = DecodeStep(cache, ("page_table", "swa_page_table", "swa_indices"))
        self.step.warm_up()
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            self.step.before_forward()
            self.step.after_forward()

    def __call__(self, cache: KVCacheManager, rows: list[int]) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            with self.step.running(rows):
                self.step.replay(self.graph)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_replay_is_the_same_as_eager_over_a_long_life() -> None:
    sizes = {"page_size": 4, "window": 10, "full_pages": 400, "swa_pages": 200, "max_len": 160}

    def config(device: str) -> CacheConfig:
        return CacheConfig(**sizes, max_rows=40, device=device)

    on_gpu = DecodeLife(7, config("cuda"), Captured)
    on_cpu = DecodeLife(7, config("cpu"), eager)
    for i in range(4000):
        assert on_gpu.act() == on_cpu.act()
        if i % 100 == 99:
            assert state_of(on_gpu.cache) == state_of(on_cpu.cache)
    on_gpu.decode.step.check_error()  # type: ignore[attr-defined]
    on_gpu.cache.check()
    assert on_cpu.steps > 2000
