"""Workloads by name, generated from a seed.

Unlike a trace they know their boundaries (ends of system prompts and messages), which the policy
`hints` can use, and which answer a request waits for.
"""

from __future__ import annotations

from collections.abc import Callable

from kvcache.errors import InvalidInputError
from kvcache.replay.trace import Trace
from kvcache.replay.workloads.forest import forest
from kvcache.replay.workloads.multi_turn import multi_turn
from kvcache.replay.workloads.round_robin import round_robin
from kvcache.replay.workloads.scan import scan
from kvcache.replay.workloads.shared_prompt import shared_prompt
from kvcache.replay.workloads.sizes import WorkloadSizes
from kvcache.replay.workloads.templates import templates
from kvcache.replay.workloads.uniform import uniform

__all__ = ["WORKLOADS", "WorkloadSizes", "default_sizes", "make_workload"]

WORKLOADS: dict[str, Callable[[WorkloadSizes, int], Trace]] = {
    "shared-prompt": shared_prompt,
    "multi-turn": multi_turn,
    "forest": forest,
    "uniform": uniform,
    "templates": templates,
    "scan": scan,
    "round-robin": round_robin,
}

# where they differ from those of shared-prompt
_SIZES = {
    "uniform": WorkloadSizes(requests=4000, question_len=246, output_len=64),
    "templates": WorkloadSizes(
        requests=4000,
        trees=5,
        depth=2,
        fanout=40,
        system_len=4096,
        message_len=2048,
        question_len=364,
        output_len=64,
    ),
    "scan": WorkloadSizes(
        requests=4000, conversations=50, document_len=9600, message_len=384, output_len=64
    ),
    "round-robin": WorkloadSizes(
        conversations=48, turns=10, document_len=16_384, question_len=128, output_len=64
    ),
}


def default_sizes(name: str) -> WorkloadSizes:
    """Return what the workload `name` is made of unless told otherwise.

    Raises:
        InvalidInputError: There is no workload of that name.
    """
    if name not in WORKLOADS:
        raise InvalidInputError(f"workload must be one of {', '.join(WORKLOADS)}, got {name!r}")
    return _SIZES.get(name, WorkloadSizes())


def make_workload(name: str, sizes: WorkloadSizes | None = None, *, seed: int = 0) -> Trace:
    """Generate the workload `name`: the same sizes and seed give the same requests.

    Raises:
        InvalidInputError: There is no workload of that name.

    Example:
        >>> len(make_workload("shared-prompt", seed=1))
        300
    """
    default = default_sizes(name)
    return WORKLOADS[name](sizes or default, seed)
