"""match(..., on="device"): the host's results bit for bit over the life of a cache, and what it costs."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from kvcache import (
    CacheConfig,
    CapacityError,
    Every,
    InvalidInputError,
    KeyBatch,
    KVCacheManager,
    StaleMatchError,
)
from kvcache.device.device_match import DeviceKeys
from kvcache.kernels import layout
from kvcache.tree import arrays as a
from kvcache.tree import match as tree_match


def cache_of(**changes: Any) -> KVCacheManager:
    sizes: dict[str, Any] = {
        "page_size": 4,
        "window": 6,
        "full_pages": 60,
        "swa_pages": 30,
        "max_rows": 4,
        "max_len": 100,
    }
    return KVCacheManager(CacheConfig(**{**sizes, **changes}))


def on_device(keys: KeyBatch) -> DeviceKeys:
    return DeviceKeys(torch.from_numpy(keys.tokens.copy()), keys.starts, keys.lens)


def serve(cache: KVCacheManager, tokens: Any, namespace: int | None = None) -> None:
    """One request from match to finish."""
    keys = KeyBatch(tokens, [0], [tokens.size])
    row = cache.admit(cache.match(KeyBatch(tokens, [0], [tokens.size - 1]), namespace))
    cache.extend(row, [tokens.size])
    cache.advance(row)
    cache.slide(row)
    cache.finish(row, keys)


class Life:
    """Requests of three namespaces that begin with parts of earlier ones; a pool that is always too small."""

    def __init__(self, seed: int, cache: KVCacheManager) -> None:
        self.rng = random.Random(seed)
        self.cache = cache
        self.past = [np.zeros(0, np.int32)]

    def key(self) -> Any:
        base = self.rng.choice(self.past)
        own = [self.rng.randrange(2) for _ in range(self.rng.randint(1, 30))]
        return np.append(base[: self.rng.randint(0, base.size)], own).astype(np.int32)[:99]

    def namespace(self) -> int:
        return self.cache.namespace(self.rng.choice([None, "a", "b"]))

    def act(self) -> None:
        kind = self.rng.random()
        if kind < 0.7:
            key = self.key()
            try:
                serve(self.cache, key, self.namespace())
            except CapacityError:
                self.cache.evict(5, 5)
            else:
                self.past = [*self.past, key][-10:]
        elif kind < 0.9:
            self.cache.evict(self.rng.randint(0, 6), self.rng.randint(0, 6))
        elif kind < 0.95:
            handle = self.namespace()
            if handle != self.cache.namespace(None):
                self.cache.drop_namespace(handle)
        else:
            self.cache.flush()

    def batch(self) -> tuple[KeyBatch, Any]:
        keys = KeyBatch.pack([self.key() for _ in range(self.rng.randint(0, 6))])
        handles = np.array([self.namespace() for _ in range(len(keys))], np.int64)
        return keys, handles


def test_layout_of_results_and_hash_words_is_that_of_the_tree() -> None:
    for name in ("FULL_HIT", "REUSE", "BRANCH", "FULL_NODE", "FULL_GEN", "REUSE_NODE", "ROOT"):
        assert getattr(layout, f"MATCH_{name}") == getattr(tree_match, name)
    assert layout.MATCH_FIELDS == tree_match.NUM_RESULTS
    assert (layout.ENTRY_TAG, layout.ENTRY_NODE) == (a.TAG, a.NODE)
    words = ("MULTIPLIER", "ADDEND", "ODD_FACTOR", "HEAD_KEY", "HEAD_FACTOR", "TOKEN_KEYS")
    names = [a.M_HASH_MULTIPLIER, a.M_HASH_ADDEND, a.M_ODD_FACTOR, a.M_HEAD_KEY]
    names += [a.M_HEAD_FACTOR, a.M_TOKEN_KEYS]
    for name, place in zip(words, names, strict=True):
        assert getattr(layout, f"HASH_{name}") == place - a.M_HASH_MULTIPLIER


@pytest.mark.parametrize("seed", range(2), ids=lambda s: f"seed{s}")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"page_size": 1, "window": 3, "full_pages": 200, "swa_pages": 90},
        {"page_size": 3, "window": 10, "bigram": True},
        {"window": None, "swa_pages": 0},
        {"checkpoints": (Every(8),), "window_slack": 1},
    ],
    ids=["page4", "page1", "bigram", "full_only", "every"],
)
def test_same_results_as_on_the_host(changes: dict[str, Any], seed: int) -> None:
    cache = cache_of(**changes)
    life = Life(seed, cache)
    hits = forks = 0
    for i in range(150):
        life.act()
        if i % 3:  # several changes between two matches
            continue
        keys, handles = life.batch()
        got = cache.match(on_device(keys), handles, on="device", touch=False)
        want = cache.match(keys, handles, touch=False)
        np.testing.assert_array_equal(got.results.numpy(), want.results)
        np.testing.assert_array_equal(got.fetch().results, want.results)
        hits += int((want.full_hit_len > 0).sum())
        forks += int((want.branch_len > 0).sum())
    cache.check()
    assert hits > 30
    assert forks > 5 or cache.config.window is None


def test_admit_binds_what_the_device_found() -> None:
    """The same life with rows admitted from the host's and from the device's match: all state is equal."""
    lives = [Life(5, cache_of()) for _ in range(2)]
    bound = 0
    for _ in range(80):
        for which, life in enumerate(lives):
            life.act()
            keys, handles = life.batch()
            keys = KeyBatch(keys.tokens, keys.starts[:4], keys.lens[:4])
            handles = handles[:4]
            cache = life.cache
            if which:
                found: Any = cache.match(on_device(keys), handles, on="device")
                found.fetch()
            else:
                found = cache.match(keys, handles)
            index = [i for i in range(len(keys)) if life.rng.random() < 0.8]
            if life.rng.random() < 0.3:
                cache.evict(2, 2)
            try:
                rows = cache.admit(found, index)
            except StaleMatchError:
                continue
            bound += int(cache.rows.computed_len[cache.index(rows)].sum())
            cache.check()
            life.cells = [  # type: ignore[attr-defined]
                cache.pools.page_table[r, : cache.rows.computed_len[r] // 4].tolist()
                for r in cache.index(rows)
            ]
            cache.abort(rows)
        first, second = (life.cache for life in lives)
        assert lives[0].__dict__.get("cells") == lives[1].__dict__.get("cells")
        for name, x in vars(first.pools).items():
            if name != "page_table":  # cells beyond a row's pages mean nothing
                assert torch.equal(x, getattr(second.pools, name)), name
    assert bound > 200


def test_a_match_touches_when_it_is_fetched() -> None:
    """Recency decides what is evicted: the device's match counts from its fetch on."""
    prompts = [np.arange(8, dtype=np.int32) + 100 * i for i in range(3)]
    for fetches in (False, True):
        cache = cache_of(window=None, swa_pages=0)
        for tokens in prompts:
            serve(cache, tokens)
        found = cache.match(on_device(KeyBatch(prompts[0], [0], [8])), on="device")
        if fetches:
            found.fetch()
        cache.evict(2)
        left = cache.match(KeyBatch.pack(prompts), touch=False).full_hit_len.tolist()
        assert left == ([8, 0, 8] if fetches else [0, 8, 8])


def test_what_was_evicted_since_is_not_touched() -> None:
    cache = cache_of(window=None, swa_pages=0)
    tokens = np.arange(8, dtype=np.int32)
    serve(cache, tokens)
    found = cache.match(on_device(KeyBatch(tokens, [0], [8])), on="device")
    cache.flush()
    assert found.fetch().full_hit_len.tolist() == [8]  # as of the match
    with pytest.raises(StaleMatchError):
        cache.admit(found)
    serve(cache, tokens)
    cache.check()


def test_more_changes_than_the_log_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.device.tree_mirror._LOG_ROOM", 5)
    test_same_results_as_on_the_host({}, 3)


def test_more_words_than_an_upload_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.device.tree_mirror._MOST_WORDS", 40)
    test_same_results_as_on_the_host({}, 4)


def test_a_child_table_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.tree.radix_tree.FIRST_LEVEL", 16)
    cache = cache_of(page_size=1, window=None, full_pages=3000, swa_pages=0)
    rng = np.random.default_rng(0)
    levels = set()
    for _ in range(80):
        for _ in range(8):
            serve(cache, rng.integers(0, 30, 8).astype(np.int32))
        keys = KeyBatch(rng.integers(0, 30, 80).astype(np.int32), np.arange(8) * 10, [10] * 8)
        before = cache.stats().uploads
        got = cache.match(on_device(keys), on="device", touch=False)
        assert cache.stats().uploads - before == 1 or not levels  # the first one copies all
        want = cache.match(keys, touch=False)
        np.testing.assert_array_equal(got.results.numpy(), want.results)
        assert cache._matcher is not None
        np.testing.assert_array_equal(cache._matcher.mirror.table.numpy(), cache.tree.table)
        levels.add(cache._matcher.mirror.levels)
    assert len({mask for mask, *_ in levels}) >= 4
    assert len({old for _, _, old, _ in levels}) >= 4


def test_costs_one_upload_and_two_launches_at_most() -> None:
    cache = cache_of()
    tokens = np.arange(40, dtype=np.int32)
    serve(cache, tokens)
    keys = on_device(KeyBatch(tokens, [0, 4, 8], [39, 20, 9]))
    cache.match(keys, on="device")
    before = cache.stats()
    cache.match(keys, on="device")
    unchanged = cache.stats()
    assert (unchanged.launches - before.launches, unchanged.uploads - before.uploads) == (1, 1)
    serve(cache, tokens[10:30].copy())
    before = cache.stats()
    cache.match(keys, on="device")
    changed = cache.stats()
    assert (changed.launches - before.launches, changed.uploads - before.uploads) == (2, 1)
    # records, entries and five pages of tokens, with room to spare
    assert changed.upload_bytes - before.upload_bytes < 600


def test_refuses_what_does_not_fit() -> None:
    cache, other = cache_of(), cache_of()
    tokens = torch.arange(10, dtype=torch.int32)
    keys = DeviceKeys(tokens, [0], [9])
    with pytest.raises(InvalidInputError, match="keys must be a DeviceKeys, got KeyBatch"):
        cache.match(KeyBatch.pack([[1]]), on="device")  # type: ignore[call-overload]
    with pytest.raises(InvalidInputError, match="keys must be a KeyBatch, got DeviceKeys"):
        cache.match(keys)  # type: ignore[call-overload]
    with pytest.raises(InvalidInputError, match="on must be 'host' or 'device', got 'gpu'"):
        cache.match(keys, on="gpu")  # type: ignore[call-overload]
    found = cache.match(keys, on="device")
    with pytest.raises(InvalidInputError, match="batch must be of this manager"):
        other.admit(found)
    with pytest.raises(InvalidInputError, match="previous must be None"):
        cache.match(keys, previous=found.fetch(), on="device")  # type: ignore[call-overload]
    with pytest.raises(InvalidInputError, match="keys must end within tokens"):
        DeviceKeys(tokens, [5], [6])
    with pytest.raises(
        InvalidInputError, match=r"keys must end within tokens \(10\), got keys\[1\]"
    ):
        DeviceKeys(tokens, [0, 2**63 - 1], [1, 1])  # starts + lens wraps
    with pytest.raises(InvalidInputError, match=r"tokens must be int32 or int64, got torch\.int16"):
        DeviceKeys(tokens.short(), [5], [5])
    with pytest.raises(InvalidInputError, match="starts and lens must be >= 0"):
        DeviceKeys(tokens, [-1], [5])


@pytest.mark.parametrize("index", [[5], [0, 0, 0, 0, 0]], ids=["past it", "more than rows"])
def test_a_refused_admission_touches_nothing(index: list[int]) -> None:
    """Whether a lack of rows came up first must not show in what is evicted next."""
    cache = cache_of(page_size=4, window=None, swa_pages=0, max_rows=4)
    old, new = np.arange(16, dtype=np.int32), np.arange(100, 116, dtype=np.int32)
    serve(cache, old)
    serve(cache, new)
    found = cache.match(on_device(KeyBatch(old, [0], [16])), on="device")
    with pytest.raises((CapacityError, InvalidInputError)):
        cache.admit(found, index)
    cache.evict(4)
    assert cache.match(KeyBatch(old, [0], [16])).full_hit_len.tolist() == [0]
    assert cache.match(KeyBatch(new, [0], [16])).full_hit_len.tolist() == [16]
