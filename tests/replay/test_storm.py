"""Short storms over the simulated engine (storm.py); `make soak` runs long ones."""

from __future__ import annotations

from typing import Any

import pytest
from storm import MEMORY_SLACK, WEATHERS, Weather, storm

from kvcache import KVCacheManager
from kvcache.errors import IntegrityError

TROUBLES = {"abort", "stop", "retract", "flush", "evict", "drop"}


@pytest.mark.parametrize("weather", WEATHERS, ids=lambda weather: weather.name)
def test_a_storm_leaves_nothing_behind(weather: Weather) -> None:
    report = storm(weather, 120, seed=1)
    assert report.requests + report.refused == 120
    assert set(report.troubles) == TROUBLES
    assert report.retractions > 0
    assert report.leaked_pages == 0
    assert report.grown_blocks < MEMORY_SLACK


def test_pools_run_out_in_a_storm() -> None:
    report = storm(WEATHERS[0], 120, seed=1)
    assert report.retractions > report.troubles["retract"]


class LosesAPage(KVCacheManager):
    """Forgets a free page on an abort, in the host's count and on the device alike."""

    def abort(self, rows: Any) -> None:
        super().abort(rows)
        if self._state.plane.full_top:
            self._state.plane.full_top -= 1
            self.pools.tops[0] -= 1


class Remembers(KVCacheManager):
    """Keeps something for every match."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.log: list[Any] = []

    def match(self, *args: Any, **kwargs: Any) -> Any:
        self.log.append([[] for _ in range(50)])
        return super().match(*args, **kwargs)


def test_a_lost_page_is_found() -> None:
    with pytest.raises(IntegrityError, match="P1"):
        storm(WEATHERS[0], 60, seed=1, manager_type=LosesAPage)


def test_memory_that_grows_is_seen() -> None:
    report = storm(WEATHERS[0], 120, seed=1, manager_type=Remembers)
    assert report.grown_blocks > MEMORY_SLACK
