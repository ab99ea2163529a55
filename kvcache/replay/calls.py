"""The manager's batched calls with a stopwatch: how long the host is busy, call by call."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from kvcache.manager import KVCacheManager

_P = ParamSpec("_P")
_R = TypeVar("_R")


class TimedCalls:
    """The calls of a manager that an engine makes, same names, same arguments.

    Attributes:
        counts, seconds: by name of the call.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self.counts: dict[str, int] = {}
        self.seconds: dict[str, float] = {}
        self.match = self._timed("match", manager.match)
        self.admit = self._timed("admit", manager.admit)
        self.capacity = self._timed("capacity", manager.capacity)
        self.extend = self._timed("extend", manager.extend)
        self.step = self._timed("step", manager.step)
        self.advance = self._timed("advance", manager.advance)
        self.commit = self._timed("commit", manager.commit)
        self.slide = self._timed("slide", manager.slide)
        self.finish = self._timed("finish", manager.finish)
        self.retract = self._timed("retract", manager.retract)
        self.abort = self._timed("abort", manager.abort)

    @property
    def host_seconds(self) -> float:
        """Seconds spent in all calls together."""
        return sum(self.seconds.values())

    def _timed(self, name: str, call: Callable[_P, _R]) -> Callable[_P, _R]:
        counts, seconds, now = self.counts, self.seconds, time.perf_counter
        counts[name], seconds[name] = 0, 0.0

        def timed(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            start = now()
            try:
                return call(*args, **kwargs)
            finally:
                seconds[name] += now() - start
                counts[name] += 1

        return timed
