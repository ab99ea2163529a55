"""Trees of prefixes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvcache.replay.trace import Trace
from kvcache.replay.workloads.builder import ARRIVAL_GAP, Builder
from kvcache.replay.workloads.sizes import WorkloadSizes


@dataclass(slots=True)
class _Edge:
    """A run of tokens in the forest, with (where it forks off, edge) for every child."""

    block: int
    tokens: int
    children: list[tuple[int, _Edge]]


def forest(sizes: WorkloadSizes, seed: int) -> Trace:
    """Trees of prefixes that fork at random lengths, also within what others read on.

    A request goes down one tree, picking forks at random, and ends in a question of its own.
    """
    rng = np.random.default_rng(seed)
    build = Builder()

    def grow(depth: int) -> _Edge:
        tokens = int(rng.integers(sizes.system_len // 2, 3 * sizes.system_len // 2 + 1))
        edge = _Edge(build.new_block(), tokens, [])
        if depth > 1:
            for cut in sorted(rng.integers(0, tokens + 1, sizes.fanout).tolist()):
                edge.children.append((cut, grow(depth - 1)))
        return edge

    roots = [grow(sizes.depth) for _ in range(sizes.trees)]
    for arrival in np.cumsum(rng.exponential(ARRIVAL_GAP, sizes.requests)).tolist():
        edge = roots[int(rng.integers(sizes.trees))]
        segments, hints, length = [], [], 0
        while edge.children:
            cut, child = edge.children[int(rng.integers(len(edge.children)))]
            segments.append((edge.block, cut))
            length += cut
            hints.append(length)
            edge = child
        segments += [(edge.block, edge.tokens), (build.new_block(), sizes.question_len)]
        hints.append(length + edge.tokens)
        build.add(arrival, segments, sizes.output_len, hints)
    return build.trace("forest")
