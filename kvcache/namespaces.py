"""Namespaces: one handle for every adapter, salt or tenant; two of them never share a page."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

from kvcache.checks import INT64, as_int_array
from kvcache.errors import CapacityError, InvalidInputError
from kvcache.tree.radix_tree import RadixTree
from kvcache.uncopied import Uncopied


class Namespaces(Uncopied):
    """The handles of all namespaces in use. A handle is GEN << 32 | root; it dies with its namespace."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._handles: dict[Hashable, int] = {}
        self._keys: dict[int, Hashable] = {}
        self.default = self.handle(None)
        self._defaults = np.full(1024, self.default, np.int64)

    def __len__(self) -> int:
        return len(self._handles)

    def handle(self, key: Hashable) -> int:
        """Return the handle of `key`; a new namespace takes a root, an empty one's where all are taken.

        Equal Python keys are one: 1, True and 1.0 are.
        """
        try:
            known = self._handles.get(key)
        except TypeError as error:  # a tuple is hashable by its type, with a list in it not
            raise InvalidInputError(f"key must be hashable, got {key!r}") from error
        if known is not None:
            return known
        if self._tree.num_roots >= self._tree.max_roots:
            # in the order of their making, so that every replica gives up the same one
            empty = next(
                (h for h in self._keys if h != self.default and self._tree.is_empty(h)), None
            )
            if empty is None:
                raise CapacityError(
                    f"max_namespaces ({self._tree.max_roots}) are in use, got a further one: {key!r}"
                )
            self._tree.drop_root(empty)
            self.forget(empty)
        handle = self._tree.new_root()
        self._handles[key] = handle
        self._keys[handle] = key
        return handle

    def forget(self, handle: int) -> None:
        """Forget a namespace whose root is gone."""
        del self._handles[self._keys.pop(handle)]

    def handles(
        self, namespaces: npt.ArrayLike | None, batch: int, name: str = "namespaces"
    ) -> npt.NDArray[np.int64]:
        """Return [batch] handles from `namespaces`: None (the default), one handle, or [batch] of them.

        Raises:
            InvalidInputError: A wrong number of handles, or one of no standing namespace.
        """
        if namespaces is None:
            if self._defaults.size < batch:
                self._defaults = np.full(2 * batch, self.default, np.int64)
            return self._defaults[:batch].copy()
        if isinstance(namespaces, (int, np.integer)) and not isinstance(namespaces, bool):
            namespaces = as_int_array(name, [namespaces], dtype=INT64).repeat(batch)
        handles = as_int_array(name, namespaces, dtype=INT64)
        if handles.size != batch:
            raise InvalidInputError(f"{name} must have {batch} entries, got {handles.size}")
        bad = self._tree.first_bad_handle(handles)
        if bad >= 0:
            raise InvalidInputError(
                f"{name}[{bad}] must be the handle of a standing namespace, got {handles[bad]}"
            )
        # a match keeps them, and the caller may reuse the buffer
        return handles.copy()
