"""Calls that are malformed in any state: each raises the error beside it and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvcache.keys import KeyBatch, Ragged

_ONE_KEY = KeyBatch.pack([[1, 2, 3]])
_NO_KEYS = KeyBatch.pack([])

BAD_CALLS: dict[str, Callable[[Any], Any]] = {
    "rows of floats": lambda m: m.step(np.array([0.0])),
    "rows in two dimensions": lambda m: m.slide(np.zeros((1, 1), np.int64)),
    "a row past int64": lambda m: m.abort([2**64]),
    "more new lengths than rows": lambda m: m.extend(np.zeros(0, np.int64), np.array([1])),
    "more lengths than rows": lambda m: m.advance(np.zeros(0, np.int64), np.array([1])),
    "lengths of floats": lambda m: m.extend(np.zeros(0, np.int64), np.array([1.5])),
    "more keys than rows": lambda m: m.commit(np.zeros(0, np.int64), _ONE_KEY),
    "more keys than rows at the end": lambda m: m.finish(np.zeros(0, np.int64), _ONE_KEY),
    "keys that are no KeyBatch": lambda m: m.match([[1, 2, 3]]),
    "commit keys that are no KeyBatch": lambda m: m.commit(np.zeros(0, np.int64), [[1]]),
    "more hints than rows": lambda m: m.commit(np.zeros(0, np.int64), _NO_KEYS, Ragged.pack([[1]])),
    "hints that are no Ragged": lambda m: m.retract(np.zeros(0, np.int64), _NO_KEYS, [[1]]),
    "a handle of no namespace": lambda m: m.match(_ONE_KEY, 2**40 + 12345),
    "a handle below 0": lambda m: m.match(_ONE_KEY, -1),
    "more namespaces than keys": lambda m: m.match(_ONE_KEY, np.zeros(2, np.int64)),
    "a previous match of another size": lambda m: m.match(_ONE_KEY, previous=m.match(_NO_KEYS)),
    "an index past the batch": lambda m: m.admit(m.match(_NO_KEYS), np.array([0])),
    "an index below 0": lambda m: m.admit(m.match(_NO_KEYS), np.array([-1])),
    "an index of floats": lambda m: m.admit(m.match(_NO_KEYS), np.array([0.5])),
    "a batch that is none": lambda m: m.admit(None),
    "a negative number of pages": lambda m: m.evict(-1, 0),
    "half a page": lambda m: m.evict(0, 0.5),
    "the letters of a namespace": lambda m: m.namespaces("abc"),
    "a namespace that cannot be hashed": lambda m: m.namespaces(["a", ["b"]]),
    "dropping no namespace": lambda m: m.drop_namespace(2**40 + 12345),
}

# handles of no request: ReceiptError
BAD_HANDLES: dict[str, Callable[[Any], Any]] = {
    "a handle of no row": lambda m: m.advance(np.array([-1])),
    "an index for a handle": lambda m: m.step(np.array([0])),
    "a row past the last": lambda m: m.abort(np.array([1 << 32 | m.config.max_rows])),
    "a generation to come": lambda m: m.slide(np.array([(2**31 - 1) << 32])),
    "a handle below 0": lambda m: m.retract(np.array([-(2**63)]), _ONE_KEY),
}
