"""Staging: one asynchronous upload a call, through a ring of pinned buffers that are never waited for."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Int32Array = npt.NDArray[np.int32]

_FIRST_WORDS = 4096
_ALIGN = 4  # words: every part begins at 16 bytes


class _Buffer:
    """A pinned host buffer, its device twin, and the event after which it may be written again."""

    def __init__(self, words: int, device: torch.device) -> None:
        pin = device.type == "cuda"
        self.host = torch.empty(words, dtype=torch.int32, pin_memory=pin)
        self.words: Int32Array = self.host.numpy()
        on_host = device.type == "cpu"
        self.device = self.host if on_host else torch.empty_like(self.host, device=device)
        self.copied: Any = torch.cuda.Event() if pin else None  # type: ignore[no-untyped-call]

    def is_free(self) -> bool:
        """Whether the last copy out of it is done. Asks, never waits."""
        return self.copied is None or bool(self.copied.query())


class Staging:
    """Collects the int32 descriptors of one call and uploads them in one copy.

    Usage: `begin()`, then `part(n)` for every array of descriptors (fill the returned view), then `upload()`
    once, then `device_part` / `host_part` of each.

    A buffer is not written before the copy out of it is done: its event is asked; where no buffer is free,
    the ring takes another one. The device twin is safe by stream order: its last readers were launched before
    the copy that overwrites it.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._ring = [_Buffer(_FIRST_WORDS, self._device)]
        self._current = self._ring[0]
        self._used = 0
        self.uploads = 0
        self.upload_bytes = 0

    @property
    def buffers(self) -> int:
        """Length of the ring: the most copies that were ever under way at a time, plus one."""
        return len(self._ring)

    def begin(self) -> None:
        """Start a call: find a buffer whose copy is done, or add one to the ring."""
        self._used = 0
        if self._current.is_free():
            return
        for buffer in self._ring:
            if buffer.is_free():
                self._current = buffer
                return
        self._current = _Buffer(self._current.words.size, self._device)
        self._ring.append(self._current)

    def part(self, words: int) -> slice:
        """Reserve `words` int32; return where they lie. `host_part` gives the view to fill."""
        start = self._used
        end = start + words
        self._used = -(-end // _ALIGN) * _ALIGN
        if self._used > self._current.words.size:
            larger = _Buffer(max(self._used, 2 * self._current.words.size), self._device)
            larger.words[:start] = self._current.words[:start]
            self._ring[self._ring.index(self._current)] = larger
            self._current = larger
        return slice(start, end)

    def host_part(self, where: slice) -> Int32Array:
        """Return the host view of a part. Valid until the next `part` of the call."""
        return self._current.words[where]

    def upload(self) -> None:
        """Start the copy of all parts. Does not wait."""
        used = self._used
        buffer = self._current
        if buffer.device is not buffer.host:
            buffer.device[:used].copy_(buffer.host[:used], non_blocking=True)
        if buffer.copied is not None:
            buffer.copied.record()
        self.uploads += 1
        self.upload_bytes += 4 * used

    def device_part(self, where: slice) -> torch.Tensor:
        """Return the device view of a part, after `upload`."""
        return self._current.device[where]
