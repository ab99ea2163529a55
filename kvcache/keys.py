"""Keys and other ragged input: flat buffers with starts and lengths, never Python lists of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.checks import INT64, TOKEN_DTYPES, as_int_array, check_list
from kvcache.compiled import compiled
from kvcache.errors import InvalidInputError
from kvcache.types import Lens

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
TokenArray = npt.NDArray[np.int32] | npt.NDArray[np.int64]


@compiled
def first_bad_span(starts: Int64Array, lens: Int64Array | Int32Array, size: int) -> int:
    """Return the index of the first key that is not within [0, size), or -1."""
    for b in range(starts.shape[0]):
        # not starts + lens > size: the sum could wrap
        if starts[b] < 0 or lens[b] < 0 or lens[b] > size - starts[b]:
            return b
    return -1


def check_spans(starts: Int64Array, lens: Int64Array | Int32Array, size: int) -> None:
    """Raise InvalidInputError unless each key is within [0, size) of the token buffer."""
    if starts.size != lens.size:
        raise InvalidInputError(f"lens must have {starts.size} entries, got {lens.size}")
    b = first_bad_span(starts, lens, size)
    if b < 0:
        return
    if starts[b] < 0 or lens[b] < 0:
        raise InvalidInputError(
            f"starts and lens must be >= 0, got {starts[b]} and {lens[b]} of keys[{b}]"
        )
    raise InvalidInputError(
        f"keys must end within tokens ({size}), "
        f"got keys[{b}] of {lens[b]} tokens from {starts[b]} on"
    )


def _check_tokens(tokens: Any) -> None:
    """Raise InvalidInputError unless `tokens` is what KeyBatch takes."""
    if not isinstance(tokens, np.ndarray) or tokens.dtype not in TOKEN_DTYPES:
        got = getattr(tokens, "dtype", type(tokens).__name__)
        raise InvalidInputError(f"tokens must be an int32 or int64 numpy array, got {got}")
    if tokens.ndim != 1 or not tokens.flags.c_contiguous:
        raise InvalidInputError(
            f"tokens must be 1-D and contiguous, got shape {tokens.shape}, strides {tokens.strides}"
        )


class KeyBatch:
    """The keys of a batch: views into one flat token buffer, which is neither copied nor kept.

    Keys may lie anywhere in the buffer, so rows of a 2-D token pool serve as they are
    (`starts = row * stride`). Arrays are checked once and kept as they are: make a new batch instead of
    writing to `starts` or `lens`. int64 buffers, and read-only ones, run code of their own, which is compiled
    at their first use or by `warm_up`; that for unaligned buffers is compiled at their first use.

    Args:
        tokens: [num_tokens] int32 or int64, contiguous; token ids in [0, 2^31).
        starts: [batch] ints, first token of each key.
        lens: [batch] ints, tokens of each key.

    Raises:
        InvalidInputError: A wrong dtype or shape, or a key that leaves the buffer.

    Example:
        >>> keys = KeyBatch(np.array([5, 6, 7, 5, 6], np.int32), [0, 3], [3, 2])
        >>> len(keys)
        2
    """

    __slots__ = ("lens", "starts", "tokens")

    tokens: TokenArray
    starts: Int64Array
    lens: Int64Array

    def __init__(self, tokens: TokenArray, starts: npt.ArrayLike, lens: Lens) -> None:
        _check_tokens(tokens)
        starts = as_int_array("starts", starts, dtype=INT64)
        lens = as_int_array("lens", lens, dtype=INT64)
        check_spans(starts, lens, tokens.size)
        self.tokens = tokens
        self.starts = starts
        self.lens = lens

    @classmethod
    def pack(cls, keys: Sequence[npt.ArrayLike]) -> KeyBatch:
        """Copy separate keys into one buffer. For tests, examples and small batches; int64 tokens."""
        keys = check_list("keys", keys)
        parts = [as_int_array(f"keys[{i}]", key, dtype=INT64) for i, key in enumerate(keys)]
        lens = np.array([part.size for part in parts], np.int64)
        starts = np.zeros_like(lens)
        np.cumsum(lens[:-1], out=starts[1:])
        return cls(np.concatenate(parts) if parts else np.zeros(0, np.int64), starts, lens)

    def __len__(self) -> int:
        return self.starts.size

    def __repr__(self) -> str:
        return f"KeyBatch({len(self)} keys, {self.lens.sum()} tokens, {self.tokens.dtype})"


class Ragged:
    """A list of ints for each request of a batch, flat: request i has `values[indptr[i]:indptr[i + 1]]`.

    Raises:
        InvalidInputError: `indptr` does not begin with 0, descends, or does not end with `len(values)`.
    """

    __slots__ = ("indptr", "values")

    values: Int64Array
    indptr: Int64Array

    def __init__(self, values: npt.ArrayLike, indptr: npt.ArrayLike) -> None:
        self.values = as_int_array("values", values, dtype=INT64)
        self.indptr = as_int_array("indptr", indptr, dtype=INT64)
        ends = self.indptr
        if ends.size == 0 or ends[0] != 0 or ends[-1] != self.values.size:
            raise InvalidInputError(
                f"indptr must run from 0 to {self.values.size}, got {ends[:1]} .. {ends[-1:]}"
            )
        if (ends[1:] < ends[:-1]).any():
            raise InvalidInputError("indptr must not descend")

    @classmethod
    def pack(cls, lists: Sequence[Sequence[int]]) -> Ragged:
        """Flatten a list of lists. For tests, examples and small batches."""
        lists = [check_list(f"lists[{i}]", x) for i, x in enumerate(check_list("lists", lists))]
        indptr = np.zeros(len(lists) + 1, np.int64)
        np.cumsum([len(x) for x in lists], out=indptr[1:])
        return cls([v for x in lists for v in x], indptr)

    def __len__(self) -> int:
        return self.indptr.size - 1
