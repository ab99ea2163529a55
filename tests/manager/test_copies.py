"""What copies and pickles do: refused for what is one with its cache, whole for plain data."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvcache import (
    CacheConfig,
    DecodeStep,
    DeviceKeys,
    Every,
    KeyBatch,
    KVCacheManager,
    MatchBatch,
    Ragged,
)

TOKENS = np.arange(33, dtype=np.int32)


@pytest.fixture
def cache() -> KVCacheManager:
    cache = KVCacheManager(CacheConfig(4, 8, 64, 64, 8, 512))
    rows = cache.admit(cache.match(KeyBatch(TOKENS, [0], [32])))
    cache.extend(rows, [33])
    cache.advance(rows)
    cache.finish(rows, KeyBatch(TOKENS, [0], [33]))
    return cache


def device_match(cache: KVCacheManager) -> Any:
    return cache.match(DeviceKeys(torch.from_numpy(TOKENS), [0], [32]), on="device")


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickled}
# all that shares memory or counts with a cache
PARTS: dict[str, Callable[[KVCacheManager], Any]] = {
    "KVCacheManager": lambda cache: cache,
    "Views": lambda cache: cache.views,
    "DecodeStep": DecodeStep,
    "RadixTree": lambda cache: cache.tree,
    "DeviceMatch": device_match,
    "Rows": lambda cache: cache.rows,
    "Pools": lambda cache: cache.pools,
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("name", PARTS)
def test_what_belongs_to_a_cache_is_refused_with_the_reason(
    cache: KVCacheManager, name: str, way: str
) -> None:
    part = PARTS[name](cache)
    before = cache.stats()
    done = "pickled" if way == "pickle" else "copied"
    for value in (part, [part]) if way != "copy" else (part,):
        with pytest.raises(TypeError, match=f"^a {name} cannot be {done}: it belongs to one cache"):
            COPIES[way](value)
    assert cache.stats() == before


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_no_protocol_pickles_a_manager_or_a_match(cache: KVCacheManager, protocol: int) -> None:
    for value in (cache, cache.match(KeyBatch(TOKENS, [0], [32]))):
        with pytest.raises(TypeError, match=f"^a {type(value).__name__} cannot be pickled"):
            pickle.dumps(value, protocol)


@pytest.mark.parametrize("way", ["copy", "deepcopy"])
def test_a_copied_match_is_of_the_same_manager(cache: KVCacheManager, way: str) -> None:
    found = cache.match(KeyBatch(TOKENS, [0, 0], [32, 20]))
    other = COPIES[way](found)
    assert other is not found
    assert other.tree is found.tree
    assert np.array_equal(other.results, found.results)
    assert np.array_equal(other.namespaces, found.namespaces)
    assert np.shares_memory(other.results, found.results) == (way == "copy")
    assert np.shares_memory(other.namespaces, found.namespaces) == (way == "copy")
    # it is taken like the one that it is a copy of
    again = cache.match(KeyBatch(TOKENS, [0, 0], [32, 20]), previous=other)
    assert again.reuse_len.tolist() == other.reuse_len.tolist() == [32, 0]
    assert cache.admit(other).size == 2


def test_a_deep_copy_of_a_queue_keeps_its_matches_of_one_manager(cache: KVCacheManager) -> None:
    queue = copy.deepcopy([cache.match(KeyBatch(TOKENS, [0], [n])) for n in (32, 20)])
    assert MatchBatch.concatenate(queue).full_hit_len.tolist() == [32, 20]


@pytest.mark.parametrize("way", COPIES)
def test_plain_data_is_copied_whole(cache: KVCacheManager, way: str) -> None:
    config = CacheConfig(4, 8, 64, 64, 8, 512, checkpoints=(Every(64),))
    assert COPIES[way](config) == config
    assert COPIES[way](cache.stats()) == cache.stats()
    keys = COPIES[way](KeyBatch(TOKENS, [0, 3], [3, 2]))
    assert (keys.tokens.tolist(), keys.starts.tolist(), keys.lens.tolist()) == (
        TOKENS.tolist(),
        [0, 3],
        [3, 2],
    )
    lists = COPIES[way](Ragged([1, 2, 3], [0, 1, 3]))
    assert (lists.values.tolist(), lists.indptr.tolist()) == ([1, 2, 3], [0, 1, 3])
