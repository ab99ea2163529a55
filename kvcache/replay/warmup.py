"""Warm-up: have all that a replay runs compiled, so that no run is timed with it."""

from __future__ import annotations

from kvcache.checkpoints import parse_checkpoints
from kvcache.replay.config import EngineConfig
from kvcache.replay.counters import ReplayResult
from kvcache.replay.engine import Engine
from kvcache.replay.workloads import WorkloadSizes, make_workload


def warm_up(device: str) -> ReplayResult:
    """Replay a workload so small and pools so tight that every call of the manager comes up.

    Returns:
        The counts of that replay: `calls` says what has been compiled.
    """
    sizes = WorkloadSizes(
        requests=24, system_len=24, question_len=6, output_len=20, trees=2, depth=2, fanout=2
    )
    config = EngineConfig(
        page_size=4,
        window=8,
        full_tokens=120,
        swa_tokens=64,
        chunk=32,
        running=6,
        checkpoints=parse_checkpoints("branch,hints,every=8"),
        abort_every=5,
        device=device,
    )
    return Engine(make_workload("forest", sizes), config).run()
