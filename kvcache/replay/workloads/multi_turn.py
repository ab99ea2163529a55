"""Conversations that take turns."""

from __future__ import annotations

import numpy as np

from kvcache.replay.trace import NO_REQUEST, Trace
from kvcache.replay.workloads.builder import THINK_TIME, Builder
from kvcache.replay.workloads.sizes import WorkloadSizes


def multi_turn(sizes: WorkloadSizes, seed: int) -> Trace:
    """Conversations that take turns: a prompt is all that was said before and a new message.

    Messages and answers have random lengths; a turn waits for the answer before it.
    """
    rng = np.random.default_rng(seed)
    build = Builder()
    system = build.new_block()
    starts = rng.exponential(THINK_TIME, sizes.conversations).cumsum() / sizes.turns
    pauses = rng.exponential(THINK_TIME, (sizes.conversations, sizes.turns)).cumsum(axis=1)
    times = starts[:, None] + pauses
    segments = [[(system, sizes.system_len)] for _ in range(sizes.conversations)]
    hints = [[sizes.system_len] for _ in range(sizes.conversations)]
    last_request = [NO_REQUEST] * sizes.conversations
    for request, turn in enumerate(np.argsort(times, axis=None, kind="stable").tolist()):
        talk = turn // sizes.turns
        message = int(rng.integers(1, 2 * sizes.message_len))
        answer = int(rng.integers(0, 2 * sizes.output_len + 1))
        segments[talk].append((build.new_block(), message))
        hints[talk].append(hints[talk][-1] + message)
        block = build.add(
            float(times.flat[turn]), segments[talk], answer, hints[talk], last_request[talk]
        )
        segments[talk].append((block, answer))
        hints[talk].append(hints[talk][-1] + answer)
        last_request[talk] = request
    return build.trace("multi-turn")
