"""A full snapshot of what a manager holds, to see that a call changed nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

# memory that every call overwrites before it reads it: no state
_SCRATCH = {
    "RadixTree": {"_ranges", "_marks", "_kept", "_found", "_marked"},
    "Rows": {"_found", "_raw_handles"},
    "DataPlane": {"_summary"},
    "_Buffer": {"host", "words", "device"},
}


def snapshot(thing: Any, path: str = "manager") -> dict[str, Any]:
    """Return all values below `thing` by their path: arrays as bytes, tensors read from their device.

    Everything of an object is walked, so what is added to a class later is seen too.
    """
    found: dict[str, Any] = {}
    _walk(thing, path, found, set())
    return found


def _walk(thing: Any, path: str, found: dict[str, Any], met: set[int]) -> None:
    if isinstance(thing, torch.Tensor):
        thing = thing.cpu().numpy()
    if isinstance(thing, np.ndarray):
        found[path] = (str(thing.dtype), thing.shape, thing.tobytes())
    elif isinstance(thing, dict):
        found[f"{path}.keys()"] = [*thing]  # in order: it decides which namespace makes room
        for key, value in thing.items():
            _walk(value, f"{path}[{key!r}]", found, met)
    elif isinstance(thing, (list, tuple)):
        found[f"len({path})"] = len(thing)
        for i, value in enumerate(thing):
            _walk(value, f"{path}[{i}]", found, met)
    elif type(thing).__module__.startswith("kvcache"):
        if id(thing) in met:
            return
        met.add(id(thing))
        names = vars(thing) if hasattr(thing, "__dict__") else type(thing).__slots__
        for name in names:
            if name not in _SCRATCH.get(type(thing).__name__, ()):
                _walk(getattr(thing, name), f"{path}.{name}", found, met)
    else:
        found[path] = repr(thing)


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The paths at which two snapshots differ."""
    return [p for p in {**before, **after} if before.get(p) != after.get(p)]
