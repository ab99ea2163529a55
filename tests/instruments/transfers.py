"""Streams, pinned memory and copy events of the fake accelerator: no buffer is written during a copy."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch

# pinned buffers by address; kept alive, so that no other tensor takes the address
_pinned: dict[int, torch.Tensor] = {}


def pin(buffer: torch.Tensor) -> None:
    """Let a host buffer count as pinned memory."""
    _pinned[buffer.untyped_storage().data_ptr()] = buffer


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether a host tensor lies in a buffer that `pin` was given."""
    return tensor.untyped_storage().data_ptr() in _pinned


@dataclasses.dataclass(eq=False)
class _Flight:
    """Copies out of pinned memory that one event stands for."""

    sources: list[tuple[torch.Tensor, torch.Tensor]]  # (pinned memory, what it held at the copy)
    number: int


def _check(sources: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for source, before in sources:
        if not torch.equal(source, before):
            raise AssertionError("pinned memory was written while a copy out of it was under way")


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
        if flight.sources or self._flights:  # on an idle stream it is done at once
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
        sources, self._sources = self._sources, []
        flights, self._flights = self._flights, []
        for under_way in (sources, *(flight.sources for flight in flights)):
            _check(under_way)
        self._sources = sources
        newest = self._recorded - self.lag
        self._flights = [flight for flight in flights if flight.number > newest]


class Streams:
    """What is current of the fake devices and their streams, and the copies of each stream.

    Attributes:
        device: Index of the current device.
        lag: See Transfers.
    """

    def __init__(self, lag: int = 0) -> None:
        self.device = 0
        self.lag = lag
        self._current: dict[int, int] = {}
        self._transfers: dict[tuple[int, int], Transfers] = {}

    def current(self) -> tuple[int, int]:
        """The current device and the stream that is current on it."""
        return self.device, self._current.get(self.device, 0)

    def transfers(self, device: int) -> Transfers:
        """The copies of the stream that is current on `device`."""
        stream = device, self._current.get(device, 0)
        return self._transfers.setdefault(stream, Transfers(self.lag))

    @contextlib.contextmanager
    def on(self, device: int, stream: int) -> Iterator[None]:
        """Make a device, and a stream of it, the current ones within the context."""
        before = self.device, self._current.get(device, 0)
        self.device, self._current[device] = device, stream
        try:
            yield
        finally:
            self.device, self._current[device] = before

    def land(self) -> None:
        """Check the copies under way of all streams."""
        for transfers in self._transfers.values():
            transfers.land()


class CopyEvent:
    """Stands in for torch.cuda.Event: it is recorded on the current stream of the current device."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._transfers: Transfers | None = None
        self._flight: _Flight | None = None

    def record(self) -> None:
        self._streams.land()
        self._transfers = self._streams.transfers(self._streams.device)
        self._flight = self._transfers.record()

    def synchronize(self) -> None:
        if self._transfers is not None and self._flight is not None:
            self._transfers.finish(self._flight)

    def query(self) -> bool:
        if self._transfers is None or self._flight is None:
            return True
        self._streams.land()
        return self._transfers.is_done(self._flight)
