"""Prefix-cache manager for models that mix full and sliding-window attention."""

from kvcache.checkpoints import Branch, CheckpointPolicy, Every, Hints, parse_checkpoints
from kvcache.config import CacheConfig
from kvcache.device.decode_step import DecodeStep
from kvcache.device.device_match import DeviceKeys, DeviceMatch
from kvcache.device.views import PageIndices, PageTable, Views
from kvcache.errors import (
    CapacityError,
    ClosedError,
    IntegrityError,
    InvalidInputError,
    KVCacheError,
    ReceiptError,
    StaleMatchError,
)
from kvcache.keys import KeyBatch, Ragged
from kvcache.manager import KVCacheManager
from kvcache.match_batch import MatchBatch
from kvcache.results import Capacity, CommitResult, EvictResult, Stats
from kvcache.types import Lens, Rows

__version__ = "0.1.0"

__all__ = [
    "Branch",
    "CacheConfig",
    "Capacity",
    "CapacityError",
    "CheckpointPolicy",
    "ClosedError",
    "CommitResult",
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
    "Lens",
    "MatchBatch",
    "PageIndices",
    "PageTable",
    "Ragged",
    "ReceiptError",
    "Rows",
    "StaleMatchError",
    "Stats",
    "Views",
    "__version__",
    "parse_checkpoints",
]
