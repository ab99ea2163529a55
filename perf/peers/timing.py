"""Timing: sides alternate inside every repeat; the table is made of medians of CPU time.

CPU time of the calling thread (`time.thread_time_ns`) is what a call costs on a core of its own: on a machine
that others use too, wall-clock time mostly says who else was running. Both are recorded. torch runs on
one thread, so that nothing of a call is done elsewhere.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from side import Side


@dataclass
class Samples:
    """Times of one case on one side, microseconds per request."""

    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.cpu)

    @property
    def best(self) -> float:
        return min(self.cpu)

    def as_json(self) -> dict[str, Any]:
        return {
            "us_cpu_median": self.median,
            "us_cpu_min": self.best,
            "us_wall_median": statistics.median(self.wall),
            "us_wall_min": min(self.wall),
            "samples": len(self.cpu),
        }


class Bench:
    """Collects samples of one (page size, window).

    Attributes:
        samples: case -> side name -> Samples.
        notes: Figures that are no times, by name.
    """

    def __init__(self, page_size: int, window: int, *, quick: bool, full: bool) -> None:
        self.page_size = page_size
        self.window = window
        self.quick = quick
        self.full = full
        self.samples: dict[str, dict[str, Samples]] = {}
        self.notes: dict[str, Any] = {}

    def repeats(self, many: int, few: int) -> int:
        """Return how often to repeat: `many`, or `few` in a quick run."""
        return few if self.quick else many

    def time(
        self,
        case: str,
        side: Side,
        requests: int,
        call: Callable[..., Any],
        *args: Any,
        calls: int = 1,
    ) -> None:
        """Call `calls` times in a row, as one sample; note CPU and wall time a request."""
        gc.disable()
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        for _ in range(calls):
            call(*args)
        cpu, wall = time.thread_time_ns() - cpu, time.perf_counter_ns() - wall
        gc.enable()
        samples = self.samples.setdefault(case, {}).setdefault(side.name, Samples())
        samples.cpu.append(cpu / 1e3 / requests / calls)
        samples.wall.append(wall / 1e3 / requests / calls)
