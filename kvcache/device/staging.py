"""Staging: one asynchronous upload a call, through a ring of pinned buffers that are never waited for."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvcache.allocation import allocating
from kvcache.uncopied import Uncopied

Int32Array = npt.NDArray[np.int32]

# buffers of an accelerator's ring at the start: copies wait behind forwards, so some calls' are under way
_FIRST_BUFFERS = 8
_ALIGN = 4  # words: every part begins at 16 bytes


def pinned_empty(words: int) -> torch.Tensor:
    """Return a [words] int32 host tensor in pinned memory: a copy out of it does not hold up the host."""
    return torch.empty(words, dtype=torch.int32, pin_memory=True)


def copy_event() -> Any:
    """Return an event that can say whether a copy is done."""
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


class _Buffer:
    """A pinned host buffer, its device twin, and the event after which it may be written again."""

    def __init__(self, words: int, device: torch.device) -> None:
        on_host = device.type == "cpu"
        with allocating((words,)):
            self.host = torch.empty(words, dtype=torch.int32) if on_host else pinned_empty(words)
        self.words: Int32Array = self.host.numpy()
        self.device = self.host
        if not on_host:
            with allocating((words,), device=device):
                self.device = torch.empty(words, dtype=torch.int32, device=device)
        self.copied: Any = None if on_host else copy_event()

    def is_free(self) -> bool:
        """Whether the last copy out of it is done. Asks, never waits."""
        return self.copied is None or bool(self.copied.query())


class Staging(Uncopied):
    """Collects the int32 descriptors of one call and uploads them in one copy.

    Usage: `begin()`, then `part(n)` for every array of descriptors (fill the returned view), then `upload()`
    once, then `device_part` / `host_part` of each.

    A buffer is not written before the copy out of it is done: its event is asked; where no buffer is free,
    the ring takes another one. The device twin is safe by stream order: its last readers were launched before
    the copy that overwrites it.

    Args:
        device: Where the descriptors go.
        words: int32 of a buffer at the start. A call that needs more allocates, which may make the host of a
            GPU wait, so this should hold what is usual.
    """

    def __init__(self, device: str, words: int) -> None:
        self._device = torch.device(device)
        num = 1 if self._device.type == "cpu" else _FIRST_BUFFERS
        self._ring = [_Buffer(words, self._device) for _ in range(num)]
        self._at = 0
        self._current = self._ring[0]
        self._used = 0
        self.uploads = 0
        self.upload_bytes = 0

    @property
    def buffers(self) -> int:
        """Length of the ring."""
        return len(self._ring)

    def begin(self) -> None:
        """Start a call: find a buffer whose copy is done, or add one to the ring."""
        self._used = 0
        if self._current.is_free():
            return
        # copies are done in the order of the ring: where the next buffer is not free, none is
        self._at = (self._at + 1) % len(self._ring)
        if not self._ring[self._at].is_free():
            self._ring.insert(self._at, _Buffer(self._current.words.size, self._device))
        self._current = self._ring[self._at]

    def part(self, words: int) -> slice:
        """Reserve `words` int32; return where they lie. `host_part` gives the view to fill."""
        start = self._used
        end = start + words
        self._used = -(-end // _ALIGN) * _ALIGN
        if self._used > self._current.words.size:
            larger = _Buffer(max(self._used, 2 * self._current.words.size), self._device)
            larger.words[:start] = self._current.words[:start]
            self._ring[self._at] = self._current = larger
        return slice(start, end)

    def matrix(self, height: int, width: int) -> tuple[slice, Int32Array]:
        """Reserve `height` x `width` int32; return where they lie and the view to fill, as `part` does."""
        where = self.part(height * width)
        return where, self.host_part(where).reshape(height, width)

    def host_part(self, where: slice) -> Int32Array:
        """Return the host view of a part. Valid until the next `part` of the call."""
        return self._current.words[where]

    def upload(self) -> None:
        """Start the copy of all parts. Does not wait."""
        buffer = self._current
        if buffer.device is not buffer.host:
            used = self._used
            buffer.device[:used].copy_(buffer.host[:used], non_blocking=True)
        self._count(buffer)

    def upload_to(self, target: torch.Tensor, where: slice) -> None:
        """Start the copy of the only part straight to where it will stay. Does not wait."""
        buffer = self._current
        target.copy_(buffer.host[where], non_blocking=True)
        self._count(buffer)

    def _count(self, buffer: _Buffer) -> None:
        if buffer.copied is not None:
            buffer.copied.record()
        self.uploads += 1
        self.upload_bytes += 4 * self._used

    def count(self, words: int) -> None:
        """Count a copy that did not go through the ring."""
        self.uploads += 1
        self.upload_bytes += 4 * words

    def device_part(self, where: slice) -> torch.Tensor:
        """Return the device view of a part, after `upload`."""
        return self._current.device[where]
