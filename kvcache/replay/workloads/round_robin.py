"""Sessions in round robin."""

from __future__ import annotations

from kvcache.replay.trace import Trace
from kvcache.replay.workloads.builder import ARRIVAL_GAP, Builder
from kvcache.replay.workloads.sizes import WorkloadSizes


def round_robin(sizes: WorkloadSizes, seed: int) -> Trace:
    """`conversations` documents in turn, each sent `turns` times with a short new question behind it.

    The order that is worst for what goes by recency: the next one needed is the one used longest ago. With
    windows that are freed behind the sequence, reuse falls to zero long before the documents fill the Full
    pool.
    """
    build = Builder()
    documents = [build.new_block() for _ in range(sizes.conversations)]
    for number in range(sizes.turns * sizes.conversations):
        block = documents[(number + seed) % sizes.conversations]
        segments = [(block, sizes.document_len), (build.new_block(), sizes.question_len)]
        build.add(number * ARRIVAL_GAP, segments, sizes.output_len, [sizes.document_len])
    return build.trace("round-robin")
