"""Timers: on a CPU in CPU time, on a GPU with events around replays of a CUDA graph, and by the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kvcache.bench.case import OURS, Run

# how a figure was taken: name in the JSON -> what it says
CPU = "cpu"
GRAPH_COLD, GRAPH_HOT, WALL, HOST = "graph_cold", "graph_hot", "wall", "host"
MODES = {
    CPU: "CPU time of the thread in a call, inputs in the caches as the run before left them",
    GRAPH_COLD: "events around the replay of a CUDA graph of one call, L2 flushed before",
    GRAPH_HOT: "events around the replay of a CUDA graph of one call, which ran just before on the same data",
    WALL: "the clock from the call until the device is idle",
    HOST: "the clock from the call until it returns",
}

_MOST_REPEATS = 50
_LEAST_REPEATS = 3
# bytes that the copy ceiling moves: far more than any cache
_CPU_COPY, _GPU_COPY = 1 << 26, 1 << 30
_LEAST_FLUSH = 1 << 28
# GPU clock cycles: the host has enqueued the timed work before they are over
_HEAD_START = 200_000


class Timing(NamedTuple):
    """Repeats of one version in one mode, microseconds."""

    us: float  # median
    best_us: float
    repeats: int


def summary(samples: list[float]) -> Timing:
    """Median and minimum of samples in microseconds."""
    return Timing(statistics.median(samples), min(samples), len(samples))


def repeats_for(first_us: float, budget_us: float) -> int:
    """Return how often to do what took `first_us`: about `budget_us` long, twice what is far longer."""
    least = _LEAST_REPEATS if first_us < 2 * budget_us else 2
    return max(least, min(_MOST_REPEATS, int(budget_us / max(first_us, 1.0))))


class CpuTimer:
    """Times calls in CPU time of the thread, which others on the machine disturb least.

    Torch must not use threads of its own meanwhile (torch.set_num_threads(1)).
    """

    modes = (CPU,)

    def __init__(self, budget_ms: float) -> None:
        self.budget_us = 1e3 * budget_ms

    def _sample(self, run: Run) -> float:
        run.restore()
        start = time.thread_time_ns()
        run.run()
        return (time.thread_time_ns() - start) / 1e3

    def time(self, run: Run) -> dict[str, Timing]:
        """Return the timing of each mode; the state is as before after it."""
        first = self._sample(run)
        more = repeats_for(first, self.budget_us) - 1
        samples = [first, *(self._sample(run) for _ in range(more))]
        run.restore()
        return {CPU: summary(samples)}

    def copy_gb_per_s(self) -> float:
        """Return how fast memory is copied here, bytes read and bytes written both counted."""
        source = torch.ones(_CPU_COPY // 4, dtype=torch.int32)
        target = torch.zeros_like(source)
        best = float("inf")
        for _ in range(8):
            start = time.thread_time_ns()
            target.copy_(source)
            best = min(best, time.thread_time_ns() - start)
        return 2 * _CPU_COPY / best


class GpuTimer:
    """Times calls on a CUDA device, which is the current one.

    Args:
        cuda: torch.cuda, or what stands in for it in a test.
    """

    modes = (GRAPH_COLD, GRAPH_HOT, WALL, HOST)

    def __init__(self, budget_ms: float, *, device: str = "cuda", cuda: Any = torch.cuda) -> None:
        self.budget_us = 1e3 * budget_ms
        self.cuda = cuda
        self.device = device
        l2 = int(getattr(cuda.get_device_properties(device), "L2_cache_size", 0))
        self._flushed = torch.zeros(
            max(4 * l2, _LEAST_FLUSH) // 4, dtype=torch.int32, device=device
        )

    def time(self, run: Run) -> dict[str, Timing]:
        """Return the timing of each mode that the version can be timed in; the state is as before."""
        wall, host = self._clock(run)
        timings = {WALL: wall, HOST: host}
        replay = self._capture(run)
        if replay is not None:
            repeats = repeats_for(wall.us + 200.0, self.budget_us)
            timings[GRAPH_COLD] = self._events(run, replay, repeats, self._flush)
            timings[GRAPH_HOT] = self._events(run, replay, repeats, self._warm(run, replay))
        run.restore()
        self.cuda.synchronize()
        return timings

    def _clock(self, run: Run) -> tuple[Timing, Timing]:
        walls: list[float] = []
        hosts: list[float] = []
        repeats = 1
        while len(walls) < repeats:
            run.restore()
            self.cuda.synchronize()
            start = time.perf_counter_ns()
            run.run()
            returned = time.perf_counter_ns()
            self.cuda.synchronize()
            walls.append((time.perf_counter_ns() - start) / 1e3)
            hosts.append((returned - start) / 1e3)
            repeats = repeats_for(min(walls), self.budget_us)
        return summary(walls), summary(hosts)

    def _capture(self, run: Run) -> Callable[[], object] | None:
        """Return the replay of a graph of one call; its kernels are loaded since versions were compared.

        None for a version that no graph can hold. New tensors that a call makes live in the graph's memory.
        """
        if not run.version.captured:
            return None
        run.restore()
        self.cuda.synchronize()
        graph = self.cuda.CUDAGraph()
        try:
            with self.cuda.graph(graph):
                run.run()
        except RuntimeError:
            # an operation of torch that waits after all; ours must not
            if run.version.name == OURS:
                raise
            return None
        replay: Callable[[], object] = graph.replay
        return replay

    def _events(
        self, run: Run, replay: Callable[[], object], repeats: int, before: Callable[[], object]
    ) -> Timing:
        pairs = []
        for _ in range(repeats + 1):
            run.restore()
            before()
            start, end = (self.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            replay()
            end.record()
            pairs.append((start, end))
        self.cuda.synchronize()
        # the first replay uploads the graph
        return summary([1e3 * start.elapsed_time(end) for start, end in pairs[1:]])

    def _flush(self) -> None:
        self._flushed.zero_()

    def _warm(self, run: Run, replay: Callable[[], object]) -> Callable[[], None]:
        def warm() -> None:
            replay()
            run.restore()
            self.cuda._sleep(_HEAD_START)

        return warm

    def copy_gb_per_s(self) -> float:
        """Return how fast device memory is copied, bytes read and bytes written both counted."""
        source = torch.ones(_GPU_COPY // 4, dtype=torch.int32, device=self.device)
        target = torch.zeros_like(source)
        samples = []
        for _ in range(10):
            start, end = (self.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            target.copy_(source)
            end.record()
            samples.append((start, end))
        self.cuda.synchronize()
        return 2 * _GPU_COPY / 1e6 / min(start.elapsed_time(end) for start, end in samples)
