"""Typed errors: every error the library raises on purpose derives from KVCacheError.

A call that raises one of these has changed nothing: no host state, no device memory, no launch.
"""


class KVCacheError(Exception):
    """Base class of every error raised on purpose."""


class InvalidInputError(KVCacheError, ValueError):
    """An argument has a wrong shape, dtype, device or value. Says the name, what was expected, what came."""


class CapacityError(KVCacheError):
    """The pools (or the rows) cannot hold what was asked for, even after evicting all that may go."""


class StaleMatchError(KVCacheError):
    """A match result may no longer hold: what it found, or what is behind that, was evicted. Match again."""


class ReceiptError(KVCacheError, ValueError):
    """A row's handle or a lock's receipt that was never given out, or whose request or lock has ended."""


class IntegrityError(KVCacheError):
    """An invariant of the library itself is broken: the bug is ours. Names the invariant."""


class ClosedError(KVCacheError):
    """The manager was closed."""


class BrokenError(KVCacheError):
    """A decode step failed half-way, so host and device may disagree. `reset()` makes the cache whole."""


class ConcurrentCallError(KVCacheError):
    """A second thread called while a call was under way. The manager belongs to one thread at a time."""


class CacheFolderWarning(UserWarning):
    """Compiled code cannot be kept: every process compiles it anew. Names the folder and the remedy."""
