"""Faults planted in the manager, one at a time, and the scenario whose logits show each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from model_scenarios import PAGE_SIZE

import kvcache.device.data_plane
import kvcache.device.view_buffers
import kvcache.manager
import kvcache.rows
from kvcache import CacheConfig, KVCacheManager
from kvcache.device.data_plane import DataPlane
from kvcache.kernels import layout
from kvcache.tree import insert as tree_insert
from kvcache.tree import match as tree_match
from kvcache.tree import ranges as tree_ranges
from kvcache.tree.radix_tree import RadixTree


class Mutant(NamedTuple):
    """A fault."""

    plant: Callable[[pytest.MonkeyPatch], None]
    scenario: str


def _frontier_one_page_far(patch: pytest.MonkeyPatch) -> None:
    """`slide` frees a page that the next query still reads, on host and device alike."""
    rows, plane = kvcache.rows.slide_rows, kvcache.device.data_plane.slide_twin

    def slide_rows(state: Any, receipts: Any, r: Any, page: int, keep: int, *rest: Any) -> Any:
        return rows(state, receipts, r, page, keep - page, *rest)

    def slide_twin(*args: Any) -> None:
        *front, page, keep, bigram = args
        plane(*front, page, keep - page, bigram)

    patch.setattr(kvcache.rows, "slide_rows", slide_rows)
    patch.setattr(kvcache.device.data_plane, "slide_twin", slide_twin)


def _kept_windows_one_page_short(patch: pytest.MonkeyPatch) -> None:
    """Commit, match and lock agree on windows that lack their first page."""
    whole = CacheConfig.keep_pages.fget
    assert whole is not None
    patch.setattr(CacheConfig, "keep_pages", property(lambda self: whole(self) - 1))


def _reuse_one_page_long(patch: pytest.MonkeyPatch) -> None:
    """Match says that one page more than a whole window backs can be reused, and admit believes it."""
    match = RadixTree.match

    def longer(self: RadixTree, *args: Any, **kwargs: Any) -> Any:
        results = match(self, *args, **kwargs)
        more = results[tree_match.FULL_HIT] > results[tree_match.REUSE]
        results[tree_match.REUSE, more] += PAGE_SIZE
        results[tree_match.REUSE_NODE, more] = results[tree_match.FULL_NODE, more]
        return results

    patch.setattr(RadixTree, "match", longer)
    patch.setattr(RadixTree, "still_holds", lambda *_: -1)


def _adopted_pages_crossed(patch: pytest.MonkeyPatch) -> None:
    """Of two pages adopted together, each gets the other's SWA page."""

    def cross(desc: Any, pools: dict[str, Any]) -> None:
        for op, n, _, _, slot, *_ in desc.T.tolist():
            if op == layout.ADOPT:
                pages = pools["slab"][slot : slot + n]
                pools["swa_map"][pages] = pools["swa_map"][pages[::-1]]

    _after_apply(patch, cross)


def _adopted_pages_forgotten(patch: pytest.MonkeyPatch) -> None:
    """The tree takes an adopted page for live, but its map entry stays 0."""

    def forget(desc: Any, pools: dict[str, Any]) -> None:
        for op, n, _, _, slot, *_ in desc.T.tolist():
            if op == layout.ADOPT:
                pools["swa_map"][pools["slab"][slot : slot + n]] = 0

    _after_apply(patch, forget)


def _after_apply(patch: pytest.MonkeyPatch, then: Callable[[Any, dict[str, Any]], None]) -> None:
    twin = kvcache.device.data_plane.apply_twin

    def apply_twin(desc: Any, table: Any, slab: Any, swa_map: Any, *rest: Any) -> None:
        twin(desc, table, slab, swa_map, *rest)
        start, num = rest[4:6]
        then(desc[:, start : start + num], {"slab": slab, "swa_map": swa_map})

    patch.setattr(kvcache.device.data_plane, "apply_twin", apply_twin)


def _duplicates_not_repointed(patch: pytest.MonkeyPatch) -> None:
    """Commit frees what the tree already had, and the row goes on naming the freed pages."""
    apply = DataPlane.apply

    def without_bind(self: DataPlane, ranges: Any, *args: Any, **kwargs: Any) -> None:
        kinds = ranges[:, tree_ranges.KIND]
        if (kinds != tree_ranges.BIND).any():
            ranges = ranges[kinds != tree_ranges.BIND]
        apply(self, ranges, *args, **kwargs)

    patch.setattr(DataPlane, "apply", without_bind)


def _namespaces_ignored(patch: pytest.MonkeyPatch) -> None:
    """All requests share the default namespace."""
    look_up = KVCacheManager.namespaces
    patch.setattr(
        KVCacheManager, "namespaces", lambda self, keys: look_up(self, [None for _ in keys])
    )


def _commits_what_is_allocated(patch: pytest.MonkeyPatch) -> None:
    """Commit goes by the scheduled length: KV of rejected drafts enters the tree."""
    requests_of = kvcache.manager.insert_requests

    def requests(
        config: Any, rows: Any, tree: Any, given: Any, keys: Any, *rest: Any, **options: Any
    ) -> Any:
        out = requests_of(config, rows, tree, given, keys, *rest, **options)
        scheduled = np.minimum(rows.allocated_len[given], keys.lens)
        out[:, tree_insert.INSERT_END] = scheduled // config.page_size
        return out

    patch.setattr(kvcache.manager, "insert_requests", requests)


def _swa_lock_released_at_once(patch: pytest.MonkeyPatch) -> None:
    """A running request doesn't protect the window that it was admitted with."""
    admit = KVCacheManager.admit

    def released(self: KVCacheManager, *args: Any, **kwargs: Any) -> Any:
        rows = admit(self, *args, **kwargs)
        index = self.index(rows)
        self.rows.state[kvcache.rows.SWA_HELD, index] = 0
        self.tree.release_swa(self.rows.receipts[index])
        return rows

    patch.setattr(KVCacheManager, "admit", released)


def _swa_view_one_token_short(patch: pytest.MonkeyPatch) -> None:
    """The page table of the window leaves out the oldest token that the next query reads."""
    twin = kvcache.device.view_buffers.fill_table_twin

    def shorter(*args: Any) -> None:
        *front, window = args
        twin(*front, window - 1 if window else 0)

    patch.setattr(kvcache.device.view_buffers, "fill_table_twin", shorter)


MUTANTS = {
    "frontier_one_page_far": Mutant(_frontier_one_page_far, "long_decode"),
    "kept_windows_one_page_short": Mutant(_kept_windows_one_page_short, "branching"),
    "reuse_one_page_long": Mutant(_reuse_one_page_long, "branching"),
    "adopted_pages_crossed": Mutant(_adopted_pages_crossed, "adoption"),
    "adopted_pages_forgotten": Mutant(_adopted_pages_forgotten, "adoption"),
    "duplicates_not_repointed": Mutant(_duplicates_not_repointed, "same_prefix_at_once"),
    "namespaces_ignored": Mutant(_namespaces_ignored, "adapters"),
    "commits_what_is_allocated": Mutant(_commits_what_is_allocated, "rejected_drafts"),
    "swa_view_one_token_short": Mutant(_swa_view_one_token_short, "long_decode"),
    "swa_lock_released_at_once": Mutant(_swa_lock_released_at_once, "eviction_beside_a_reader"),
}
