"""Prefix-cache manager for models that mix full and sliding-window attention."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcache.config import CacheConfig
    from kvcache.device.decode_step import DecodeStep
    from kvcache.device.device_match import DeviceKeys, DeviceMatch
    from kvcache.device.views import PageIndices, PageTable, Views
    from kvcache.errors import (
        BrokenError,
        CacheFolderWarning,
        CapacityError,
        ClosedError,
        ConcurrentCallError,
        IntegrityError,
        InvalidInputError,
        KVCacheError,
        ReceiptError,
        StaleMatchError,
    )
    from kvcache.keys import KeyBatch, Ragged
    from kvcache.manager import KVCacheManager
    from kvcache.match_batch import MatchBatch
    from kvcache.pins import PinResult
    from kvcache.policies.checkpoints import (
        Branch,
        CheckpointPolicy,
        Chunks,
        Every,
        Hints,
        Ladder,
        parse_checkpoints,
    )
    from kvcache.policies.retention import Lru, Retention, Value, parse_retention
    from kvcache.results import Capacity, CommitResult, EvictResult, Stats
    from kvcache.types import Lens, Rows

__version__ = "0.1.0"

__all__ = [
    "Branch",
    "BrokenError",
    "CacheConfig",
    "CacheFolderWarning",
    "Capacity",
    "CapacityError",
    "CheckpointPolicy",
    "Chunks",
    "ClosedError",
    "CommitResult",
    "ConcurrentCallError",
    "DecodeStep",
    "DeviceKeys",
    "DeviceMatch",
    "Every",
    "EvictResult",
    "Hints",
    "IntegrityError",
    "InvalidInputError",
    "KVCacheError",
    "KVCacheManager",
    "KeyBatch",
    "Ladder",
    "Lens",
    "Lru",
    "MatchBatch",
    "PageIndices",
    "PageTable",
    "PinResult",
    "Ragged",
    "ReceiptError",
    "Retention",
    "Rows",
    "StaleMatchError",
    "Stats",
    "Value",
    "Views",
    "__version__",
    "parse_checkpoints",
    "parse_retention",
]

# where the names above live. One is imported when it is first asked for: numba and torch take seconds, which
# the command line need not wait for. For type checkers the same stands above (tests/package/test_exports.py)
_NAMES = {
    "config": ("CacheConfig",),
    "device.decode_step": ("DecodeStep",),
    "device.device_match": ("DeviceKeys", "DeviceMatch"),
    "device.views": ("PageIndices", "PageTable", "Views"),
    "errors": (
        "BrokenError",
        "CacheFolderWarning",
        "CapacityError",
        "ClosedError",
        "ConcurrentCallError",
        "IntegrityError",
        "InvalidInputError",
        "KVCacheError",
        "ReceiptError",
        "StaleMatchError",
    ),
    "keys": ("KeyBatch", "Ragged"),
    "manager": ("KVCacheManager",),
    "match_batch": ("MatchBatch",),
    "pins": ("PinResult",),
    "policies.checkpoints": (
        "Branch",
        "CheckpointPolicy",
        "Chunks",
        "Every",
        "Hints",
        "Ladder",
        "parse_checkpoints",
    ),
    "policies.retention": ("Lru", "Retention", "Value", "parse_retention"),
    "results": ("Capacity", "CommitResult", "EvictResult", "Stats"),
    "types": ("Lens", "Rows"),
}


if not TYPE_CHECKING:  # with it a type checker would take every name for one

    def __getattr__(name: str) -> Any:
        """Import a public name, or the modules that hold some, when it is first asked for."""
        for module, names in _NAMES.items():
            if name in names:
                value = getattr(import_module(f"{__name__}.{module}"), name)
                globals()[name] = value  # the next one does not come through here
                return value
        modules = [module for module in _NAMES if module.split(".")[0] == name]
        if not modules:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        for module in modules:
            import_module(f"{__name__}.{module}")
        return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
