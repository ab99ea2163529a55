"""The oracle by its short name: `kvcache.reference.ReferenceManager` (kvcache/oracle)."""

from kvcache.oracle.manager import Committed, Disagreement, Match, ReferenceManager, Taken

__all__ = ["Committed", "Disagreement", "Match", "ReferenceManager", "Taken"]
