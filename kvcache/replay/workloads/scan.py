"""Prompts that nobody sends again, beside conversations that go on."""

from __future__ import annotations

import numpy as np

from kvcache.replay.trace import Trace
from kvcache.replay.workloads.builder import ARRIVAL_GAP, Builder
from kvcache.replay.workloads.sizes import WorkloadSizes

# share of the requests that are seen once
_ONCE = 0.7


def scan(sizes: WorkloadSizes, seed: int) -> Trace:
    """Seven of ten prompts are never seen again: what goes by recency alone is flushed by them.

    The others are of `conversations` that grow by `message_len` a turn, from two thirds of `document_len` to
    four times that; then another one begins in its place.
    """
    rng = np.random.default_rng(seed)
    build = Builder()
    first = max(1, 2 * sizes.document_len // 3)
    talks = [[(build.new_block(), first)] for _ in range(sizes.conversations)]
    for arrival in np.cumsum(rng.exponential(ARRIVAL_GAP, sizes.requests)).tolist():
        if rng.random() < _ONCE:
            build.add(
                arrival, [(build.new_block(), sizes.document_len)], sizes.output_len, hints=[]
            )
            continue
        talk = int(rng.integers(sizes.conversations))
        before = sum(tokens for _, tokens in talks[talk])
        talks[talk].append((build.new_block(), sizes.message_len))
        if before + sizes.message_len > 4 * sizes.document_len:
            talks[talk], before = [(build.new_block(), first)], first
        build.add(arrival, talks[talk], sizes.output_len, [before])
    return build.trace("scan")
