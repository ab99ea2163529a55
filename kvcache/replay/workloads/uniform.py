"""Forks anywhere in a set of documents."""

from __future__ import annotations

import numpy as np

from kvcache.replay.trace import Trace
from kvcache.replay.workloads.builder import ARRIVAL_GAP, Builder
from kvcache.replay.workloads.sizes import WorkloadSizes


def uniform(sizes: WorkloadSizes, seed: int) -> Trace:
    """A request reads a document up to anywhere in it and asks a question of its own.

    Few documents are asked about often (a Pareto law). No length is likelier than another, so no rule about
    where windows are to be kept helps: what is left is to choose among them.
    """
    rng = np.random.default_rng(seed)
    build = Builder()
    documents = [build.new_block() for _ in range(sizes.documents)]
    for arrival in np.cumsum(rng.exponential(ARRIVAL_GAP, sizes.requests)).tolist():
        block = documents[int(1 + rng.pareto(1.0)) % sizes.documents]
        fork = int(rng.integers(1, sizes.document_len + 1))
        segments = [(block, fork), (build.new_block(), sizes.question_len)]
        build.add(arrival, segments, sizes.output_len, [fork])
    return build.trace("uniform")
