"""Prompts of three levels."""

from __future__ import annotations

import numpy as np

from kvcache.replay.trace import Trace
from kvcache.replay.workloads.builder import ARRIVAL_GAP, Builder
from kvcache.replay.workloads.sizes import WorkloadSizes


def templates(sizes: WorkloadSizes, seed: int) -> Trace:
    """System prompts, each with some sets of tools or examples behind it, and a question behind those.

    `trees` system prompts of `system_len`; to each `fanout` second levels of `message_len`, of which few are
    used often (a Pareto law).
    """
    rng = np.random.default_rng(seed)
    build = Builder()
    systems = [build.new_block() for _ in range(sizes.trees)]
    seconds = [[build.new_block() for _ in range(sizes.fanout)] for _ in systems]
    ends = [sizes.system_len, sizes.system_len + sizes.message_len]
    for arrival in np.cumsum(rng.exponential(ARRIVAL_GAP, sizes.requests)).tolist():
        system = int(rng.integers(sizes.trees))
        second = int(1 + rng.pareto(0.8)) % sizes.fanout
        segments = [
            (systems[system], sizes.system_len),
            (seconds[system][second], sizes.message_len),
            (build.new_block(), sizes.question_len),
        ]
        build.add(arrival, segments, sizes.output_len, ends)
    return build.trace("templates")
