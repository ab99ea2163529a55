"""Pinned memory and copy events of the fake accelerator: a buffer must not be written during a copy."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(eq=False)
class _Flight:
    """Copies out of pinned memory that one event stands for."""

    sources: list[tuple[torch.Tensor, torch.Tensor]]  # (pinned memory, what it held at the copy)
    number: int

    def check(self) -> None:
        for source, before in self.sources:
            if not torch.equal(source, before):
                raise AssertionError(
                    "pinned memory was written while a copy out of it was under way"
                )


class Transfers:
    """The copies of one stream. A copy is under way until `lag` later events were recorded.

    Every event that is recorded or asked checks that the memory of all copies under way is as it was.
    """

    def __init__(self, lag: int) -> None:
        self.lag = lag
        self._recorded = 0
        self._sources: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._flights: list[_Flight] = []

    def begin(self, source: torch.Tensor) -> None:
        """A copy out of `source` begins."""
        if self.lag:
            self._sources.append((source, source.clone()))

    def record(self) -> _Flight:
        """Record an event behind the copies that began since the last one."""
        self._recorded += 1
        flight = _Flight(self._sources, self._recorded)
        self._sources = []
        self._flights.append(flight)
        self.land()
        return flight

    def is_done(self, flight: _Flight) -> bool:
        self.land()
        return flight not in self._flights

    def finish(self, flight: _Flight) -> None:
        """Wait for the copies that an event stands for, and so for all before them."""
        self.land()
        self._flights = [other for other in self._flights if other.number > flight.number]

    def land(self) -> None:
        """Check all copies under way; those whose time has come are done."""
        flights, self._flights = self._flights, []
        for flight in flights:
            flight.check()
        newest = self._recorded - self.lag
        self._flights = [flight for flight in flights if flight.number > newest]


class CopyEvent:
    """Stands in for torch.cuda.Event on one stream."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._flight: _Flight | None = None

    def record(self) -> None:
        self._flight = self._transfers.record()

    def synchronize(self) -> None:
        if self._flight is not None:
            self._transfers.finish(self._flight)

    def query(self) -> bool:
        return self._flight is None or self._transfers.is_done(self._flight)
