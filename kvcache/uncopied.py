"""Uncopied: objects that are one with memory, a device or a tree, and so cannot be copied or pickled."""

from __future__ import annotations

from typing import Any, NoReturn


class Uncopied:
    """Base of what copy.copy, copy.deepcopy and pickle must refuse: TypeError, with the reason.

    A copy would be no whole one: its arrays are views of each other, its tensors are a device's, and what it
    counts is shared with objects that a copy would leave behind.
    """

    __slots__ = ()

    def __copy__(self) -> Any:
        _refuse(self, "copied")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _refuse(self, "copied")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse(self, "pickled")


def _refuse(value: object, what: str) -> NoReturn:
    raise TypeError(
        f"a {type(value).__name__} cannot be {what}: it belongs to one cache, in this process, and a copy "
        "would not be whole; make a new KVCacheManager from the same CacheConfig"
    )
