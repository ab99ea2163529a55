"""The bound: what an infinite cache of a model without sliding windows would reuse.

Requests come one at a time, in order, and each is computed whole before the next is matched: every
page-aligned prefix that was ever computed is reused, but for the last token of a prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from kvcache.config import CacheConfig
from kvcache.keys import KeyBatch
from kvcache.manager import KVCacheManager
from kvcache.replay.calls import TimedCalls
from kvcache.replay.counters import SAMPLES, ReplayResult, Timeline
from kvcache.replay.trace import Trace

BOUND = "bound"


def replay_bound(
    trace: Trace,
    *,
    page_size: int,
    decode: bool = True,
    on_end: Callable[[int], object] | None = None,
) -> tuple[ReplayResult, Timeline]:
    """Replay `trace` against an infinite full-attention cache.

    Args:
        trace: the requests.
        page_size: tokens.
        decode: whether outputs are cached too.
        on_end: called with 1 after each request.

    Returns:
        The counts, and how they grew. Pools are always on the CPU: only lengths matter.
    """
    started = time.perf_counter()
    pages = trace.pages_for_all(page_size, 1, outputs=decode)
    manager = KVCacheManager(
        CacheConfig(
            page_size=page_size,
            window=None,
            full_pages=pages,
            swa_pages=0,
            max_rows=1,
            max_len=trace.max_len,
            checkpoints=(),
            max_namespaces=1,
        )
    )
    calls = TimedCalls(manager)
    result, timeline = ReplayResult(BOUND, full_pages=pages), Timeline()
    tokens = np.empty(trace.max_len, np.int32)
    start = np.zeros(1, np.int64)
    next_sample = 0.0
    for index in range(len(trace)):
        trace.fill(index, tokens)
        input_len = int(trace.input_len[index])
        output_len = int(trace.output_len[index]) if decode else 0
        end_len = np.array([input_len + output_len], np.int64)
        match = calls.match(KeyBatch(tokens, start, np.array([input_len - 1], np.int64)))
        rows = calls.admit(match)
        calls.extend(rows, end_len)
        calls.advance(rows)
        calls.finish(rows, KeyBatch(tokens, start, end_len))
        reused = int(match.reuse_len[0])
        result.requests += 1
        result.input_tokens += input_len
        result.output_tokens += output_len
        result.computed_tokens += input_len + output_len - reused
        result.full_hit_tokens += reused
        result.reused_tokens += reused
        if index + 1 >= next_sample:
            stats = manager.stats()
            timeline.sample(result, (pages - stats.full_pages_free, 0), (0, 0))
            next_sample = index + 1 + len(trace) / SAMPLES
        if on_end is not None:
            on_end(1)
    result.steps = len(trace)
    result.close(manager, calls)
    result.wall_seconds = time.perf_counter() - started
    return result, timeline
