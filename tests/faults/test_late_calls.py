"""Late calls of requests that have ended: their handles mean nothing any more, whoever has the row now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from by_hand import ByHand, run_of
from snapshot import changes, snapshot

from kvcache import DecodeStep, InvalidInputError, KeyBatch, ReceiptError

A, B = run_of(1, 33), run_of(2, 33)

LATE: dict[str, Callable[[ByHand, Any], Any]] = {
    "advance": lambda c, row: c.m.advance([row]),
    "advance to a length": lambda c, row: c.m.advance([row], [1]),
    "extend": lambda c, row: c.m.extend([row], [20]),
    "step": lambda c, row: c.m.step([row]),
    "slide": lambda c, row: c.m.slide([row]),
    "commit": lambda c, row: c.m.commit([row], KeyBatch.pack([A])),
    "finish": lambda c, row: c.m.finish([row], KeyBatch.pack([A])),
    "retract": lambda c, row: c.m.retract([row], KeyBatch.pack([A])),
    "abort": lambda c, row: c.m.abort([row]),
    "index": lambda c, row: c.m.index([row]),
    "page_table": lambda c, row: c.m.views.page_table([row]),
    "swa_indices": lambda c, row: c.m.swa_indices([row]),
    "decode step": lambda c, row: DecodeStep(c.m).running([row]).__enter__(),
}


@pytest.mark.parametrize("call", LATE)
def test_a_late_call_of_an_ended_request_never_reaches_the_next_one_in_its_row(call: str) -> None:
    cache = ByHand(4, 8, max_rows=1)
    ended = cache.start(A)
    cache.compute(ended, 32)
    cache.m.abort([ended])
    running = cache.start(B)
    cache.m.extend([running], [16])
    assert cache.index(running) == 0
    before = snapshot(cache.m)
    with pytest.raises(
        ReceiptError, match=rf"got {ended}: its request, number 1 in row 0, has ended"
    ):
        LATE[call](cache, ended)
    assert not changes(before, snapshot(cache.m))
    cache.commit(running, B)
    assert cache.match(B) == (0, 0, None)  # nothing of B is computed


def test_handles_of_all_that_ever_ran_are_different() -> None:
    cache = ByHand(4, 8, max_rows=2)
    seen: set[int] = set()
    for i in range(20):
        rows = [cache.start(run_of(i, 9)) for _ in range(1 + i % 2)]
        assert not seen & set(rows)
        seen |= set(rows)
        assert sorted(cache.m.index(rows).tolist()) == list(range(len(rows)))
        cache.m.abort(rows[::-1])  # the row freed last is taken next


@pytest.mark.parametrize("given", [0, 1, -1, 2**62, -(2**63)])
def test_an_index_is_no_handle(given: int) -> None:
    cache = ByHand(4, 8)
    cache.start(A)
    with pytest.raises(ReceiptError, match="it was never given out"):
        cache.m.step([given])


def test_one_handle_twice_is_no_late_call() -> None:
    cache = ByHand(4, 8)
    row = cache.start(A)
    with pytest.raises(InvalidInputError, match=r"rows\[1\] must be named once"):
        cache.m.abort([row, row])
    cache.m.abort([row])


def test_a_generation_comes_to_its_end_and_begins_again() -> None:
    """2^31 - 1 requests later a row's generation is 1 again, never 0 or negative."""
    cache = ByHand(4, 8, max_rows=1)
    cache.m.rows.generation[0] = 2**31 - 1
    row = cache.start(A)
    assert row == (2**31 - 1) << 32
    cache.m.abort([row])
    assert cache.start(A) == 1 << 32
    with pytest.raises(ReceiptError):
        cache.m.abort([row])


def test_index_gives_places_in_an_engine_s_own_arrays() -> None:
    cache = ByHand(4, 8)
    rows = np.array([cache.start(A), cache.start(B)])
    index = cache.m.index(rows[::-1])
    assert index.dtype == np.int32
    assert index.tolist() == [1, 0]
