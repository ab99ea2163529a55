"""Prefix-cache manager for models that mix full and sliding-window attention."""

from kvcache.checkpoints import Branch, CheckpointPolicy, Every, Hints, parse_checkpoints
from kvcache.config import CacheConfig
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
from kvcache.stats import Capacity, CommitResult, EvictResult, Stats

__version__ = "0.1.0"

__all__ = [
    "Branch",
    "CacheConfig",
    "Capacity",
    "CapacityError",
    "CheckpointPolicy",
    "ClosedError",
    "CommitResult",
    "Every",
    "EvictResult",
    "Hints",
    "IntegrityError",
    "InvalidInputError",
    "KVCacheError",
    "KVCacheManager",
    "KeyBatch",
    "MatchBatch",
    "Ragged",
    "ReceiptError",
    "StaleMatchError",
    "Stats",
    "__version__",
    "parse_checkpoints",
]
