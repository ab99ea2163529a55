"""One system prompt, many questions."""

from __future__ import annotations

import numpy as np

from kvcache.replay.trace import Trace
from kvcache.replay.workloads.builder import ARRIVAL_GAP, Builder
from kvcache.replay.workloads.sizes import WorkloadSizes


def shared_prompt(sizes: WorkloadSizes, seed: int) -> Trace:
    """One system prompt, many short unique questions: the case of SGLang's release note."""
    rng = np.random.default_rng(seed)
    build = Builder()
    system = build.new_block()
    for arrival in np.cumsum(rng.exponential(ARRIVAL_GAP, sizes.requests)).tolist():
        segments = [(system, sizes.system_len), (build.new_block(), sizes.question_len)]
        build.add(arrival, segments, sizes.output_len, [sizes.system_len])
    return build.trace("shared-prompt")
