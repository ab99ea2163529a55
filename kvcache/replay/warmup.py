"""Warm-up: have all that a replay runs compiled, so that no run is timed with it."""

from __future__ import annotations

import numpy as np

from kvcache import warmup
from kvcache.config import CacheConfig
from kvcache.replay.tokens import common_prefix_len
from kvcache.replay.workloads import make_workload
from kvcache.replay.workloads.sizes import WorkloadSizes


def warm_up(config: CacheConfig) -> None:
    """Compile and load what a replay with such a cache runs."""
    warmup.warm_up(config, every=False)
    trace = make_workload("forest", WorkloadSizes(requests=1))
    tokens = np.empty(trace.max_len, np.int32)
    trace.fill(0, tokens)
    trace.pages_for_all(config.page_size, 1, outputs=True)
    common_prefix_len(tokens, 0, 0, 1)
