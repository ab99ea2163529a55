"""Namespaces: one handle for every adapter, salt or tenant; two of them never share a page."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcache.checks import INT64, as_int_array
from kvcache.errors import CapacityError, InvalidInputError
from kvcache.tree.radix_tree import RadixTree
from kvcache.uncopied import Uncopied

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class LookUp(NamedTuple):
    """What a look-up gave out, and what it gave up for it."""

    handles: Int64Array  # [keys]
    ranges: Int32Array | None  # what the device has to free; None: nothing was given up
    full_pages: int  # pages of the namespaces that were given up
    swa_pages: int


class Namespaces(Uncopied):
    """The handles of all namespaces in use. A handle is GEN << 32 | root; it dies with its namespace.

    A handle that was given out is safe until the next match, which uses it. From then on its namespace may
    make room for another one while no row runs in it, the least recently looked up first. The default
    namespace never does.
    """

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self.default = tree.new_root()
        # all but the default, least recently looked up first
        self._handles: OrderedDict[Hashable, int] = OrderedDict()
        self._keys: dict[int, Hashable] = {}
        # handles given out since the last match: the last ones of _handles
        self._given: dict[int, None] = {}
        self._defaults = np.full(1024, self.default, np.int64)

    def __len__(self) -> int:
        return len(self._handles) + 1

    # -- look-up ---------------------------------------------------------------------------------------------

    def known(self, key: Hashable) -> int | None:
        """Return the handle of a standing namespace, now the most recent one; None: there is none."""
        if key is None:
            return self.default
        handle = self._handles.get(key)
        if handle is not None:
            self._give_out(key, handle)
        return handle

    def look_up(self, keys: Iterable[Hashable], may_free: Callable[[], None]) -> LookUp:
        """Return the handles of `keys`, all or none; a new one takes a free root, or one that is given up.

        Equal Python keys are one: 1, True and 1.0 are. Costs the keys and the pages that are given up; a
        namespace that rows keep is met once in many calls, since it counts as looked up then.

        Args:
            may_free: Called before something is given up, which the device has to free; may raise.

        Raises:
            CapacityError: A key does not fit; the message names it.
            InvalidInputError: A key cannot be hashed.
        """
        keys = _as_list(keys)
        new: dict[Hashable, int] = {}
        asked: set[int] = {self.default}
        for i, key in enumerate(keys):
            try:
                handle = self.default if key is None else self._handles.get(key)
            except TypeError as error:  # a tuple is hashable by its type, with a list in it not
                raise InvalidInputError(f"keys[{i}] must be hashable, got {key!r}") from error
            if handle is None:
                new.setdefault(key, i)
            else:
                asked.add(handle)
        free = self._tree.max_roots - self._tree.num_roots
        given_up, running = self._make_room(len(new) - free, asked)
        if len(given_up) + free < len(new):
            at = [*new.values()][len(given_up) + free]
            raise CapacityError(
                f"max_namespaces ({self._tree.max_roots}, with the default one) are in use, by rows or by "
                f"handles that no match has used yet, got a further one: keys[{at}] = {keys[at]!r}"
            )
        if given_up:
            may_free()
        for handle in running:
            self._give_out(self._keys[handle], handle)
        ranges, full, swa = None, 0, 0
        if given_up:
            ranges, full, swa = self._tree.drop_roots(np.array(given_up, np.int64))
            for handle in given_up:
                self.forget(handle)
        handles = np.empty(len(keys), np.int64)
        for i, key in enumerate(keys):
            known = self.known(key)
            if known is None:
                known = self._tree.new_root()
                self._keys[known] = key
                self._give_out(key, known)
            handles[i] = known
        return LookUp(handles, ranges, full, swa)

    def _give_out(self, key: Hashable, handle: int) -> None:
        self._handles[key] = handle
        self._handles.move_to_end(key)
        self._given[handle] = None

    def _make_room(self, num: int, asked: set[int]) -> tuple[list[int], list[int]]:
        """Return (up to `num` handles to give up, those that rows run in and that came before them).

        The latter count as looked up now, so that the next one who needs room does not meet them again.
        """
        given_up: list[int] = []
        running: list[int] = []
        for handle in self._handles.values():
            if len(given_up) >= num or handle in self._given:
                break
            if handle not in asked:
                (running if self._tree.is_locked(handle) else given_up).append(handle)
        return given_up, running

    def end_look_up(self, handles: Int64Array) -> None:
        """A match uses `handles`: from now on what was given out is safe only where a row runs."""
        if handles.size:
            self._given.clear()

    def forget(self, handle: int) -> None:
        """Forget a namespace whose root is gone."""
        del self._handles[self._keys.pop(handle)]
        self._given.pop(handle, None)

    # -- handles as arguments --------------------------------------------------------------------------------

    def handles(
        self, namespaces: npt.ArrayLike | None, batch: int, name: str = "namespaces"
    ) -> Int64Array:
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

    def check_same(self, before: Int64Array, now: Int64Array) -> None:
        """Raise InvalidInputError unless an earlier match was in the namespaces of this one.

        Where a namespace was given up since and made anew its handle differs. What was found in it is gone,
        and a hint of it says nothing.
        """
        if before.size != now.size or any(
            self._tree.first_bad_handle(before[i : i + 1]) < 0
            for i in np.flatnonzero(before != now)
        ):
            raise InvalidInputError("previous must be of the same batch: namespaces differ")


def _as_list(keys: Iterable[Hashable]) -> list[Hashable]:
    if isinstance(keys, (str, bytes)):  # each letter would be a namespace
        raise InvalidInputError(f"keys must be a sequence of keys, got {keys!r}")
    try:
        return list(keys)
    except TypeError:
        raise InvalidInputError(f"keys must be a sequence of keys, got {keys!r}") from None
