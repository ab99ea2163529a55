"""The rows of a batch that is named again: what is kept of them must not outlive a request."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from kvcache import CacheConfig, InvalidInputError, KeyBatch, KVCacheManager, ReceiptError

TOKENS = np.arange(64, dtype=np.int32)


def started(num: int) -> tuple[KVCacheManager, Any]:
    cache = KVCacheManager(CacheConfig(4, 8, 64, 64, 4, 64))
    keys = KeyBatch(TOKENS, np.arange(num) * 16, np.full(num, 12))
    rows = cache.admit(cache.match(keys))
    cache.extend(rows, np.full(num, 12))
    return cache, rows


@pytest.mark.parametrize("ended", [0, 1, 2])
def test_a_batch_of_which_one_row_ended_is_refused(ended: int) -> None:
    cache, rows = started(3)
    cache.advance(rows)
    cache.advance(rows)
    cache.abort(rows[ended : ended + 1])
    with pytest.raises(ReceiptError, match=rf"rows\[{ended}\]"):
        cache.advance(rows)
    with pytest.raises(ReceiptError, match=rf"rows\[{ended}\]"):
        cache.step(rows)


def test_a_batch_after_reset_is_refused() -> None:
    cache, rows = started(2)
    cache.advance(rows)
    cache.reset()
    with pytest.raises(ReceiptError):
        cache.advance(rows)


def test_a_refused_batch_is_refused_again() -> None:
    cache, rows = started(2)
    for _ in range(2):
        with pytest.raises(InvalidInputError, match="named once"):
            cache.advance(np.array([rows[0], rows[1], rows[0]]))


def test_rows_written_by_the_caller_change_nothing() -> None:
    cache, rows = started(2)
    cache.advance(rows)
    index = cache.index(rows)
    index[:] = 3
    rows_again = rows.copy()
    rows[:] = 0  # the engine's own buffer
    assert cache.index(rows_again).tolist() == [0, 1]
    cache.advance(rows_again)
    cache.check()


def test_same_rows_in_another_order() -> None:
    cache, rows = started(2)
    cache.advance(rows)
    cache.step(rows[::-1])
    cache.advance(rows[::-1])
    assert cache.index(rows[::-1]).tolist() == [1, 0]
    cache.check()


def test_a_guarded_call_has_the_signature_and_defaults_of_its_method() -> None:
    for name in ("match", "advance", "commit", "evict", "extend", "admit", "translate"):
        method = getattr(KVCacheManager, name)
        wrapped = method.__wrapped__
        assert inspect.signature(method) == inspect.signature(wrapped)
        assert (method.__defaults__, method.__kwdefaults__) == (
            wrapped.__defaults__,
            wrapped.__kwdefaults__,
        )
        assert method.__doc__ == wrapped.__doc__
    cache, rows = started(1)
    with pytest.raises(TypeError, match="extend"):
        cache.extend(rows)  # type: ignore[call-arg]
