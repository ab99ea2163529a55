"""Match on the device: keys that are there already, results that stay there until the host wants them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvcache.checks import INT32, INT64, as_int_array, check_tensor, check_type
from kvcache.device import staging as staging_module
from kvcache.device.data_plane import NO_RANGES, DataPlane
from kvcache.device.tree_mirror import TreeMirror
from kvcache.errors import InvalidInputError
from kvcache.kernels.bind_match import bind_match, bind_match_twin
from kvcache.kernels.layout import (
    MATCH_BRANCH,
    MATCH_FIELDS,
    MATCH_FULL_HIT,
    MATCH_REUSE,
    MATCH_REUSE_NODE,
)
from kvcache.kernels.match import ALIGN, match
from kvcache.kernels.twin_of_match import match_twin
from kvcache.keys import check_spans
from kvcache.match_batch import MatchBatch
from kvcache.rows import Int32Array, Int64Array
from kvcache.tree.radix_tree import RadixTree
from kvcache.types import Lens
from kvcache.uncopied import Uncopied


class DeviceKeys:
    """The keys of a batch in one flat token buffer on the device, which is neither copied nor kept.

    Args:
        tokens: [num_tokens] int32 or int64 tensor, contiguous, on the cache's device; token ids in [0, 2^31).
        starts: [batch] ints, first token of each key. Where all are multiples of 4 (rows of a token pool
            whose width is one), keys are read 16 bytes at a time.
        lens: [batch] ints, tokens of each key.

    Raises:
        InvalidInputError: A wrong dtype or shape, or a key that leaves the buffer.
    """

    __slots__ = ("lens", "starts", "tokens")

    def __init__(self, tokens: torch.Tensor, starts: npt.ArrayLike, lens: Lens) -> None:
        check_type("tokens", tokens, torch.Tensor)
        if tokens.dtype not in (torch.int32, torch.int64):
            raise InvalidInputError(f"tokens must be int32 or int64, got {tokens.dtype}")
        check_tensor("tokens", tokens, ndim=1, dtype=tokens.dtype)
        starts = as_int_array("starts", starts, dtype=INT64)
        lens = as_int_array("lens", lens, dtype=INT32)
        check_spans(starts, lens, tokens.numel())
        self.tokens = tokens
        self.starts: Int64Array = starts
        self.lens: Int32Array = lens

    def __len__(self) -> int:
        return int(self.starts.size)


class DeviceMatch(Uncopied):
    """Results of `KVCacheManager.match(..., on="device")`: on the device, and for the host when it asks.

    As of the call: what is launched later sees the same lengths, whatever the host does meanwhile. `admit`
    takes it like a MatchBatch (and waits for the results if they are not there yet).

    Attributes:
        full_hit_len: [batch] int32 tensor, tokens; see MatchBatch.
        reuse_len: [batch] int32 tensor, tokens.
        branch_len: [batch] int32 tensor, tokens, -1 = none.
        anchor: [batch] int32 tensor, node that holds the last page of the reusable prefix.
        namespaces: [batch] int64 handles, on the host.
    """

    def __init__(
        self,
        matcher: DeviceMatcher,
        results: torch.Tensor,
        namespaces: Int64Array,
        key_lens: Int64Array,
        touch: bool,
    ) -> None:
        self.results = results
        self.namespaces = namespaces
        self._matcher = matcher
        self._key_lens = key_lens
        self._touch = touch
        self._host: torch.Tensor | None = None
        self._copied: Any = None
        self._batch: MatchBatch | None = None

    def __len__(self) -> int:
        return int(self.results.shape[1])

    @property
    def full_hit_len(self) -> torch.Tensor:
        """[batch] int32 tokens, on the device."""
        return self.results[MATCH_FULL_HIT]

    @property
    def reuse_len(self) -> torch.Tensor:
        """[batch] int32 tokens, on the device."""
        return self.results[MATCH_REUSE]

    @property
    def branch_len(self) -> torch.Tensor:
        """[batch] int32 tokens, -1 = none, on the device."""
        return self.results[MATCH_BRANCH]

    @property
    def anchor(self) -> torch.Tensor:
        """[batch] int32 nodes, on the device."""
        return self.results[MATCH_REUSE_NODE]

    def prefetch(self) -> None:
        """Start the copy to the host, so that a later `fetch` finds it done. Does not wait."""
        if self._host is None:
            if self.results.is_cpu:
                self._host = self.results
                return
            self._matcher.check_stream()
            host = staging_module.pinned_empty(self.results.numel()).view(self.results.shape)
            self._host = host.copy_(self.results, non_blocking=True)
            self._copied = staging_module.copy_event()
            self._copied.record()

    def is_of(self, tree: RadixTree) -> bool:
        """Return whether it matched against `tree`."""
        return self._matcher.tree is tree

    def fetch(self) -> MatchBatch:
        """Return the results for the host. Waits until the device has matched and copied them.

        If the match was asked to touch, what it found becomes the most recent now, except for a request whose
        full hit has lost a page since.
        """
        batch = self.wait()
        if self._touch:
            self._touch = False
            self._matcher.touch(batch.results)
        return batch

    def wait(self) -> MatchBatch:
        """Return the results for the host, as `fetch` does, and touch nothing yet."""
        if self._batch is None:
            self.prefetch()
            assert self._host is not None
            if self._copied is not None:
                self._copied.synchronize()
            results = self._host.numpy().copy()
            tree = self._matcher.tree
            self._batch = MatchBatch(results, self.namespaces, tree, self._key_lens)
        return self._batch


class DeviceMatcher(Uncopied):
    """Matches batches of keys on the device, and binds what they found; made at the first such match."""

    def __init__(self, tree: RadixTree, plane: DataPlane) -> None:
        self.tree = tree
        self._plane = plane
        self.mirror = TreeMirror(tree, plane)

    def match(self, keys: DeviceKeys, handles: Int64Array, *, touch: bool) -> DeviceMatch:
        """Match a batch: one upload, one launch, and one more where the tree changed. Does not wait."""
        plane, mirror, config = self._plane, self.mirror, self._plane.config
        device = plane.pools.tops.device
        num = len(keys)
        results = torch.empty((MATCH_FIELDS, num), dtype=torch.int32, device=device)
        found = DeviceMatch(self, results, handles, keys.lens.copy(), touch)
        if num == 0:
            return found
        placed = mirror.update(keys.starts, keys.lens, handles & 0xFFFFFFFF)
        plane.launches += 1
        levels = mirror.levels
        if plane.host is not None:
            match_twin(
                keys.tokens.numpy(),
                placed.starts,
                placed.lens,
                placed.roots,
                mirror.records.numpy(),
                mirror.table.numpy(),
                mirror.tokens.numpy(),
                mirror.hash_words.numpy(),
                results.numpy(),
                num,
                config.page_size,
                *levels,
                config.keep_pages,
                config.bigram,
            )
        else:
            match(
                keys.tokens,
                placed.starts,
                placed.lens,
                placed.roots,
                mirror.records,
                mirror.table,
                mirror.tokens,
                mirror.hash_words,
                results,
                num=num,
                page_size=config.page_size,
                table_mask=levels[0],
                table_base=levels[1],
                old_mask=levels[2],
                old_base=levels[3],
                keep_pages=config.keep_pages,
                bigram=config.bigram,
                aligned=not (keys.starts % ALIGN).any(),
            )
        return found

    def start_rows(
        self, found: DeviceMatch, index: Int64Array, rows: Int32Array, row_state: Int32Array
    ) -> None:
        """Set the lengths of rows and bind the reusable pages of requests `index` into them.

        One upload, two launches (one where nothing is reused). The match must have been fetched, and the
        prefixes must be locked.
        """
        plane, config = self._plane, self._plane.config
        num = rows.size
        most = int(found.fetch().reuse_len[index].max(initial=0))
        max_pages = most // config.page_size
        chosen = np.concatenate([index, rows], dtype=np.int32) if max_pages else None
        where = plane.apply(NO_RANGES, rows, states=rows, row_state=row_state, extra=chosen)
        if max_pages == 0:
            return
        plane.launches += 1
        if plane.host is not None:
            bind_match_twin(
                found.results.numpy(),
                index,
                rows,
                self.mirror.records.numpy(),
                plane.host["slab"],
                plane.host["page_table"],
                num,
                max_pages,
                config.page_size,
            )
        else:
            placed = plane.staging.device_part(where)
            bind_match(
                found.results,
                placed[:num],
                placed[num:],
                self.mirror.records,
                plane.pools.slab,
                plane.pools.page_table,
                num=num,
                max_pages=max_pages,
                page_size=config.page_size,
            )

    def check_stream(self) -> None:
        """Raise InvalidInputError where a copy would not come behind the match; see StreamGuard."""
        if self._plane.guard is not None:
            self._plane.guard.check()

    def touch(self, results: Int32Array) -> None:
        """Make what a match found the most recent, as far as it still stands."""
        self.tree.touch_matched(results)
