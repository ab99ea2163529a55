"""A match that starts from an earlier one finds what a match without a hint finds, in every field."""

from __future__ import annotations

import pytest
from by_hand import ByHand, run_of

from kvcache import KeyBatch

PAGE, WINDOW = 4, 6
OTHER = run_of(9, 3 * PAGE)


def both(
    cache: ByHand, key: list[int], previous: list[int], change: list[int], touch: bool
) -> None:
    """Match `previous`, put `change`, then match `key` with and without the hint."""
    hint = cache.m.match(KeyBatch.pack([previous]), touch=touch)
    cache.put(change)
    keys = KeyBatch.pack([key])
    fresh = cache.m.match(keys, touch=False)
    again = cache.m.match(keys, previous=hint, touch=False)
    assert again.results.tolist() == fresh.results.tolist()
    (row,) = cache.m.admit(again)
    cache.m.check()
    cache.m.abort([row])


@pytest.mark.parametrize("touch", [True, False])
@pytest.mark.parametrize("known", range(7))
@pytest.mark.parametrize("fork", range(7))
def test_the_node_of_a_hint_was_split(known: int, fork: int, touch: bool) -> None:
    """Above, at or below the length that the hint knows; the key goes on along the old path or the new."""
    old = run_of(1, 8 * PAGE)
    new = old[: fork * PAGE] + OTHER
    for key in (old[: known * PAGE], old, old[: known * PAGE] + OTHER):
        cache = ByHand(PAGE, WINDOW)
        cache.put(old)
        both(cache, key, old[: known * PAGE], new, touch)


@pytest.mark.parametrize("known", range(1, 5))
def test_the_path_of_a_hint_grew(known: int) -> None:
    cache = ByHand(PAGE, WINDOW)
    old = run_of(1, 8 * PAGE)
    cache.put(old[: 2 * PAGE])
    both(cache, old, old[: known * PAGE], old[: 5 * PAGE], True)


@pytest.mark.parametrize("known", range(1, 5))
def test_a_hint_of_a_key_that_became_shorter(known: int) -> None:
    cache = ByHand(PAGE, WINDOW)
    old = run_of(1, 8 * PAGE)
    cache.put(old)
    both(cache, old[: known * PAGE], old, old[: 3 * PAGE] + OTHER, True)


def test_a_hint_whose_node_is_gone_is_left_out() -> None:
    cache = ByHand(PAGE, WINDOW)
    old = run_of(1, 8 * PAGE)
    cache.put(old)
    hint = cache.m.match(KeyBatch.pack([old]))
    cache.m.flush()
    cache.put(old[: 2 * PAGE])
    again = cache.m.match(KeyBatch.pack([old]), previous=hint)
    assert again.full_hit_len.tolist() == [2 * PAGE]
