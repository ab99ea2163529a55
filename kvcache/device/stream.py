"""One device and one stream for all launches of a cache: the check that what is current did not change."""

from __future__ import annotations

from typing import Any

import torch

from kvcache.errors import InvalidInputError

# torch.cuda.current_stream makes an object a call; what compiled code of torch asks costs a tenth of that
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def current() -> tuple[int, int]:
    """Return the index of the current device and the handle of the stream that is current on it."""
    device = torch.cuda.current_device()
    if _raw_stream is None:
        return device, int(torch.cuda.current_stream(device).cuda_stream)
    return device, _raw_stream(device)


def is_capturing() -> bool:
    """Return whether the current stream records a graph."""
    return torch.cuda.is_current_stream_capturing()


def indexed(name: str | torch.device) -> str:
    """Return a device's name with its index: "cuda" is the one that is current now, and stays it."""
    name = str(name)
    if ":" in name or torch.device(name).type == "cpu":
        return name
    return f"{name}:{current()[0]}"


class StreamGuard:
    """Refuses what would be launched on another device than the cache's, or on a second stream.

    Kernels, uploads and the events behind them go to what is current. On one stream they run in order: each
    call sees what those before it did. A call on another stream could overtake them. With another device
    current, kernels are launched there, and so are events, which then say nothing of the copies:

        cuda:1    forward ........ | copy out of a staging buffer
        cuda:0    event: done at once, so the next call writes into that buffer before the copy
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # device and stream of the first call that may launch
        self._first: tuple[int, int] | None = None

    def check(self, *, captured: bool = False) -> None:
        """Raise InvalidInputError unless the cache's device is current, and the stream of the first call.

        Args:
            captured: Whether a graph may record the call. torch.cuda.graph makes a stream of its own the
                current one, which runs nothing: any stream will do then. Replay the graph on the cache's.
        """
        now = current()
        if now != self._first:
            self._check_other(now, captured)

    def _check_other(self, now: tuple[int, int], captured: bool) -> None:
        device, stream = now
        if device != self._device.index:
            raise InvalidInputError(
                f"the current device must be {self._device}, where the cache is, "
                f"got {self._device.type}:{device}"
            )
        if captured and is_capturing():
            return
        if self._first is not None:
            raise InvalidInputError(
                "the current stream must be that of the cache's first launch "
                f"({self._first[1]:#x}), got {stream:#x}"
            )
        self._first = now
