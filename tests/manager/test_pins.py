"""Pins: what is pinned stays, within a budget, until it is released or its time is over."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache import (
    CacheConfig,
    CapacityError,
    InvalidInputError,
    KeyBatch,
    KVCacheManager,
    ReceiptError,
)
from tests.manager.snapshot import changes, snapshot

SYSTEM = [*range(100, 140)]  # 10 pages


def manager(**changed: object) -> KVCacheManager:
    sizes: dict[str, object] = {
        "page_size": 4,
        "window": 8,
        "full_pages": 64,
        "swa_pages": 32,
        "max_rows": 4,
        "max_len": 256,
        "pin_share": 0.5,
        "debug": True,
    }
    return KVCacheManager(CacheConfig(**{**sizes, **changed}))  # type: ignore[arg-type]


def serve(cache: KVCacheManager, tokens: list[int], namespace: int | None = None) -> None:
    """Compute a request and end it."""
    rows = cache.admit(cache.match(KeyBatch.pack([tokens[:-1]]), namespace))
    cache.extend(rows, [len(tokens)])
    cache.advance(rows)
    cache.finish(rows, KeyBatch.pack([tokens]))


def reuse(cache: KVCacheManager, tokens: list[int], namespace: int | None = None) -> int:
    return int(cache.match(KeyBatch.pack([tokens]), namespace, touch=False).reuse_len[0])


@pytest.mark.parametrize("window", [8, None])
def test_a_pinned_prefix_outlives_any_number_of_others(window: int | None) -> None:
    cache = manager(window=window, swa_pages=32 if window else 0)
    serve(cache, SYSTEM)
    pins, pinned = cache.pin(KeyBatch.pack([[*SYSTEM, 1, 2, 3]]))
    assert pinned.tolist() == [40]
    assert pins.dtype == np.int64
    for i in range(40):
        serve(cache, [1000 * i + j for j in range(100)])
    assert reuse(cache, SYSTEM) == 40
    cache.check()
    cache.unpin(pins)
    for i in range(40):
        serve(cache, [1000 * i + j + 500 for j in range(100)])
    assert reuse(cache, SYSTEM) == 0
    cache.check()


def test_a_pin_ends_with_the_admission_that_its_ttl_names() -> None:
    cache = manager()
    serve(cache, SYSTEM)
    pins, _ = cache.pin(KeyBatch.pack([SYSTEM]), ttl=3)
    for i in range(2):
        serve(cache, [7 + i] * 8)
        assert cache.stats().pins == 1
    serve(cache, [9] * 8)
    assert cache.stats().pins == 0
    with pytest.raises(ReceiptError, match=r"^pins\[0\] must be the receipt of a standing pin"):
        cache.unpin(pins)
    cache.flush()
    assert reuse(cache, SYSTEM) == 0


def test_the_ttl_counts_requests_not_calls() -> None:
    cache = manager()
    serve(cache, SYSTEM)
    cache.pin(KeyBatch.pack([SYSTEM, SYSTEM]), ttl=3)
    rows = cache.admit(cache.match(KeyBatch.pack([[1], [2], [3]])))
    assert cache.stats().pins == 0
    cache.abort(rows)


@pytest.mark.parametrize(
    ("share", "fits"), [(10 / 64, True), (9.9 / 64, False), (0, False), (1, True)]
)
def test_past_the_budget_it_is_refused_and_changes_nothing(share: float, fits: bool) -> None:
    cache = manager(pin_share=share)
    serve(cache, SYSTEM)
    before = snapshot(cache)
    if fits:
        cache.pin(KeyBatch.pack([SYSTEM]))
        return
    with pytest.raises(CapacityError, match=r"to pin: .* \(CacheConfig.pin_share\)"):
        cache.pin(KeyBatch.pack([SYSTEM]))
    assert not changes(before, snapshot(cache))


def test_the_swa_pool_has_a_budget_of_its_own() -> None:
    cache = manager(swa_pages=20, pin_share=0.25)
    others = [[i] * 8 for i in range(1, 4)]
    for key in others:
        serve(cache, key)
    cache.pin(KeyBatch.pack(others[:2]))  # 4 of 5 SWA pages
    with pytest.raises(
        CapacityError, match=r"^SWA pages to pin: 2 needed, 1 of the budget of 5 are left"
    ):
        cache.pin(KeyBatch.pack(others[2:]))


def test_pins_of_nothing_are_bounded_too() -> None:
    cache = manager(pin_share=4 / 64)
    cache.pin(KeyBatch.pack([[5]] * 4))
    with pytest.raises(CapacityError, match=r"^pins to pin: 1 needed, 0 of the budget of 4"):
        cache.pin(KeyBatch.pack([[5]]))


def test_what_is_pinned_is_not_there_to_be_had() -> None:
    cache = manager(swa_pages=64)
    serve(cache, SYSTEM)
    room = cache.capacity()
    pins, _ = cache.pin(KeyBatch.pack([SYSTEM]))
    assert cache.capacity() == (room.rows, room.full_pages - 10, room.swa_pages - 2)
    batch = cache.match(KeyBatch.pack([[1] * 8]))
    assert cache.admit_as_many(batch, [4 * 54]) == 1
    assert cache.admit_as_many(batch, [4 * 54 + 1]) == 0
    cache.unpin(pins)
    assert cache.capacity() == room


def test_a_namespace_with_a_pin_stays() -> None:
    cache = manager(max_namespaces=2)
    tenant = cache.namespace("tenant")
    serve(cache, SYSTEM, tenant)
    pins, _ = cache.pin(KeyBatch.pack([SYSTEM]), tenant)
    with pytest.raises(InvalidInputError, match="no pin keeps"):
        cache.drop_namespace(tenant)
    with pytest.raises(CapacityError):
        cache.namespace("another")
    cache.unpin(pins)
    assert cache.drop_namespace(tenant).full_pages == 10


def test_reset_ends_pins() -> None:
    cache = manager()
    serve(cache, SYSTEM)
    pins, _ = cache.pin(KeyBatch.pack([SYSTEM]))
    cache.reset()
    assert cache.stats().pins == 0
    with pytest.raises(ReceiptError):
        cache.unpin(pins)
    serve(cache, SYSTEM)
    cache.pin(KeyBatch.pack([SYSTEM] * 3))
    cache.check()


def test_wrong_arguments_change_nothing() -> None:
    cache = manager()
    serve(cache, SYSTEM)
    pins, _ = cache.pin(KeyBatch.pack([SYSTEM, SYSTEM]))
    before = snapshot(cache)
    key = KeyBatch.pack([SYSTEM])
    for wrong in (0, -1, 1.5):
        with pytest.raises(InvalidInputError, match=r"^ttl must be"):
            cache.pin(key, ttl=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match=r"^keys must be"):
        cache.pin([SYSTEM])  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="standing namespace"):
        cache.pin(key, 12345)
    with pytest.raises(ReceiptError, match=r"^pins\[1\] must be .* once; got"):
        cache.unpin([pins[0], pins[0]])
    with pytest.raises(ReceiptError, match=r"^pins\[1\]"):
        cache.unpin([pins[1], 77])
    assert not changes(before, snapshot(cache))
    for share in (-0.1, 1.1, "half", True):
        with pytest.raises(InvalidInputError, match=r"^pin_share must be a number in \[0, 1\]"):
            manager(pin_share=share)
