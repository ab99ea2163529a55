"""MatchBatch: what a match found, for every request of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvcache.checks import as_indices, check_type
from kvcache.errors import InvalidInputError
from kvcache.tree import match as m
from kvcache.uncopied import Uncopied

if TYPE_CHECKING:
    from kvcache.tree.radix_tree import RadixTree

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class MatchBatch(Uncopied):
    """Results of `KVCacheManager.match`; also the hint that lets the same requests be matched again.

    It holds no page: what it found can be evicted until `admit` locks it, and `admit` notices. A copy is of
    the same manager; pickle raises TypeError, since another process has no such tree.

    Attributes:
        full_hit_len: [batch] int32, tokens; longest page-aligned prefix whose Full KV the tree holds
            (SGLang: full_kv_hit_length).
        reuse_len: [batch] int32, tokens; longest page-aligned prefix that also has its whole SWA window.
        branch_len: [batch] int32, tokens; `full_hit_len` where it is longer than `reuse_len`, else -1: the
            fork at which a window is missing (SGLang: branching point).
        namespaces: [batch] int64 handles.
    """

    __slots__ = ("key_lens", "namespaces", "results", "tree")

    def __init__(
        self,
        results: Int32Array,
        namespaces: Int64Array,
        tree: RadixTree | None = None,
        key_lens: Int64Array | None = None,
    ) -> None:
        self.results = results
        self.namespaces = namespaces
        # tokens of each key
        self.key_lens = np.zeros(namespaces.size, np.int64) if key_lens is None else key_lens.copy()
        self.tree = tree  # whose nodes the results name; None: they name none

    def __len__(self) -> int:
        return int(self.results.shape[1])

    @property
    def full_hit_len(self) -> Int32Array:
        """[batch] int32 tokens."""
        return self.results[m.FULL_HIT]

    @property
    def reuse_len(self) -> Int32Array:
        """[batch] int32 tokens."""
        return self.results[m.REUSE]

    @property
    def branch_len(self) -> Int32Array:
        """[batch] int32 tokens, -1 = none."""
        return self.results[m.BRANCH]

    def select(self, index: npt.ArrayLike) -> MatchBatch:
        """Return the results of some requests, in the order of `index`; they are copied.

        Raises:
            InvalidInputError: `index` is not 1-D, holds no integers, or one of no request.
        """
        chosen = as_indices("index", index, len(self))
        return MatchBatch(
            np.ascontiguousarray(self.results[:, chosen]),
            self.namespaces[chosen].copy(),
            self.tree,
            self.key_lens[chosen],
        )

    def __copy__(self) -> MatchBatch:
        return MatchBatch(self.results, self.namespaces, self.tree, self.key_lens)

    def __deepcopy__(self, memo: dict[int, Any]) -> MatchBatch:
        return MatchBatch(self.results.copy(), self.namespaces.copy(), self.tree, self.key_lens)

    @staticmethod
    def concatenate(batches: list[MatchBatch]) -> MatchBatch:
        """Join batches, for instance the hints of a waiting queue.

        Raises:
            InvalidInputError: They are of different managers.
        """
        for i, batch in enumerate(batches):
            check_type(f"batches[{i}]", batch, MatchBatch)
        trees = {id(b.tree): b.tree for b in batches if len(b)}
        if len(trees) > 1:
            raise InvalidInputError("batches must be of one manager, got several")
        if not batches:
            return MatchBatch(np.zeros((m.NUM_RESULTS, 0), np.int32), np.zeros(0, np.int64))
        return MatchBatch(
            np.concatenate([b.results for b in batches], axis=1),
            np.concatenate([b.namespaces for b in batches]),
            next(iter(trees.values()), None),
            np.concatenate([b.key_lens for b in batches]),
        )

    def __repr__(self) -> str:
        return (
            f"MatchBatch(full_hit_len={self.full_hit_len.tolist()}, "
            f"reuse_len={self.reuse_len.tolist()}, branch_len={self.branch_len.tolist()})"
        )
