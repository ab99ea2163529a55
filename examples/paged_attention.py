"""Attention over paged KV: an engine's attention backend at toy size.

It computes no page id and knows none: what rows hold comes from the manager's views. Real backends take the
same views as they are (docs/attention_backends.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from hybrid_model import FULL, SLIDING, ModelConfig, attention, visible_keys
from torch import Tensor

from kvcache import CacheConfig, KVCacheManager
from kvcache.device.views import PageIndices, PageTable


class PagedKV:
    """Keys and values of all layers. Slot `page * P + offset`; page 0 of each pool is a sink for padding."""

    def __init__(self, model: ModelConfig, cache: CacheConfig) -> None:
        kinds = model.layer_kinds
        num_sliding = kinds.count(SLIDING)

        def pool(layers: int, pages: int) -> Tensor:
            slots = (pages + 1) * cache.page_size
            shape = (layers, 2, slots, model.num_heads, model.head_dim)
            return torch.zeros(shape, dtype=model.dtype, device=cache.device)

        self.full = pool(len(kinds) - num_sliding, cache.full_pages)
        self.sliding = pool(num_sliding, cache.swa_pages)
        # [2, slots, num_heads, head_dim] of each layer
        full, sliding = iter(self.full), iter(self.sliding)
        self.layers = [next(sliding if kind == SLIDING else full) for kind in kinds]


class Tokens(NamedTuple):
    """Tokens that queries may read: consecutive positions, the first at the start of a page."""

    slots: Tensor  # [..., num_tokens] int64 slots of the pool
    positions: Tensor  # [..., num_tokens]


class Group(NamedTuple):
    """Queries that are computed together, with what each of them may read."""

    queries: Tensor  # [chunk] positions of one row's chunk, or [rows, 1] in decode
    tokens: Tokens  # [num_tokens] or [rows, num_tokens]

    def new_slots(self) -> Tensor:
        """Return the slots of the queries' own tokens, in their order."""
        first, last = self.queries[..., :1], self.queries[..., -1:]
        own = (self.tokens.positions >= first) & (self.tokens.positions <= last)
        return self.tokens.slots[own]


class PagedAttention:
    """Attention of one forward: row i computes positions [starts[i], ends[i]).

    The rows must hold the pages already (`extend`, `step`), and `advance` must come later: a view is of the
    queries from `computed_len` on. Where each row computes one token (decode), all rows are one group, by
    padded page tables; chunks are groups of their own, by index lists.
    """

    def __init__(
        self,
        model: ModelConfig,
        kv: PagedKV,
        cache: KVCacheManager,
        rows: np.ndarray,
        starts: Sequence[int],
        ends: Sequence[int],
    ) -> None:
        self.model, self.kv = model, kv
        self.page_size = cache.config.page_size
        device = cache.pools.page_table.device
        self.queries = [
            torch.arange(*span, device=device) for span in zip(starts, ends, strict=True)
        ]
        # lengths need saying only where rows hold more than this forward fills
        lens = None if np.array_equal(cache.rows.allocated_len[cache.index(rows)], ends) else ends
        views, has_swa = cache.views, cache.config.has_swa
        if all(len(of_row) == 1 for of_row in self.queries):
            self.groups = {FULL: self._batch(views.page_table(rows, lens))}
            if has_swa:
                self.groups[SLIDING] = self._batch(views.swa_page_table(rows, lens))
        else:
            self.groups = {FULL: self._row_by_row(views.full_indices(rows, lens))}
            if has_swa:
                self.groups[SLIDING] = self._row_by_row(views.swa_indices(rows, lens))
        self.written = {
            kind: torch.cat([group.new_slots() for group in groups])
            for kind, groups in self.groups.items()
        }

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kind = self.model.layer_kinds[layer]
        window = self.model.window if kind == SLIDING else None
        keys, values = self.kv.layers[layer]
        keys[self.written[kind]], values[self.written[kind]] = k, v
        parts = []
        for queries, (slots, positions) in self.groups[kind]:
            part, q = q.split((queries.numel(), len(q) - queries.numel()))
            visible = visible_keys(queries, positions, window)
            # what nobody sees may hold anything, NaN too, and 0 * NaN is NaN
            seen = visible.any(-2)[..., None, None]
            k, v = (torch.where(seen, x[slots], 0.0) for x in (keys, values))
            out = attention(part.unflatten(0, queries.shape), k, v, visible)
            parts.append(out.flatten(0, -3))
        return torch.cat(parts)

    def _batch(self, view: PageTable) -> list[Group]:
        tokens = _tokens(view.page_table, view.window_start, self.page_size)
        return [Group(torch.stack(self.queries), tokens)]

    def _row_by_row(self, view: PageIndices) -> list[Group]:
        spans = pairwise(view.indptr.tolist())
        return [
            Group(queries, _tokens(view.indices[first:end], start, self.page_size))
            for queries, (first, end), start in zip(
                self.queries, spans, view.window_start, strict=True
            )
        ]


def _tokens(pages: Tensor, first: Tensor, page_size: int) -> Tokens:
    """Return the tokens of `pages` [..., num_pages], which begin at position `first` [...]."""
    offsets = torch.arange(page_size, device=pages.device)
    slots = (pages.long().unsqueeze(-1) * page_size + offsets).flatten(-2)
    count = torch.arange(slots.shape[-1], device=pages.device)
    return Tokens(slots, first.unsqueeze(-1) + count)
