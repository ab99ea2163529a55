"""Namespaces come and go: who makes room, whose handle is safe, and what it costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from by_hand import ByHand
from exact_world import unchanged

from kvcache import CapacityError, InvalidInputError, KeyBatch
from kvcache.tree import arrays as a
from kvcache.tree.radix_tree import RadixTree

KEY = list(range(9))


def cache_of(max_namespaces: int, **config: Any) -> ByHand:
    return ByHand(4, 8, max_namespaces=max_namespaces, **config)


def standing(cache: ByHand) -> list[Any]:
    """Names in use but the default, in the order in which they make room."""
    return [*cache.m._namespaces._handles]


def test_a_salt_for_each_request_is_served_for_ever() -> None:
    cache = cache_of(8, full_pages=40, swa_pages=40)
    for salt in range(100):
        assert cache.put(KEY, namespace=cache.m.namespace(salt)) == 0
        assert cache.put(KEY, namespace=cache.m.namespace(salt)) == 8
    stats = cache.m.stats()
    assert (stats.namespaces, stats.tree_full_pages) == (8, 7 * 2)
    assert (stats.evicted_full_pages, stats.evicted_swa_pages) == (93 * 2, 93 * 2)
    assert standing(cache) == [*range(93, 100)]
    cache.drain()


@pytest.mark.parametrize("one_by_one", [True, False], ids=["one_by_one", "at_once"])
def test_a_queue_of_too_many_is_refused_at_the_name_that_does_not_fit(one_by_one: bool) -> None:
    cache = cache_of(4)
    cache.put(KEY, namespace=cache.m.namespace("idle"))
    names = [("salt", i) for i in range(6)]
    if one_by_one:
        handles = [cache.m.namespace(name) for name in names[:3]]
        unchanged(cache.m, lambda: cache.m.namespace(names[3]), CapacityError, r"\('salt', 3\)$")
        assert standing(cache) == names[:3]
    else:
        unchanged(cache.m, lambda: cache.m.namespaces(names), CapacityError, r"\('salt', 3\)$")
        assert standing(cache) == ["idle"]
        handles = cache.m.namespaces(names[:3]).tolist()
    assert handles == [cache.m.namespace(name) for name in names[:3]]
    found = cache.m.match(KeyBatch.pack([KEY] * 3), np.array(handles))
    assert found.full_hit_len.tolist() == [0, 0, 0]
    # a match has used them: the rest of the queue may come
    assert len(cache.m.namespaces(names[3:])) == 3
    with pytest.raises(InvalidInputError, match="standing namespace"):
        cache.m.match(KeyBatch.pack([KEY]), handles[0])


def test_the_least_recently_looked_up_makes_room() -> None:
    cache = cache_of(4)
    for name in ("x", "y", "z", "x"):
        cache.put(KEY, namespace=cache.m.namespace(name))
    cache.m.namespace("new")
    assert standing(cache) == ["z", "x", "new"]
    # what is asked for stays, and becomes recent in the order of the call; twice is once
    cache.m.match(KeyBatch.pack([KEY]))
    handles = cache.m.namespaces(["z", "new", "other", "z", None])
    assert standing(cache) == ["new", "other", "z"]
    assert handles[0] == handles[3]
    assert cache.match(KEY, int(handles[0])) == (8, 8, None)
    assert cache.match(KEY, int(handles[2])) == (0, 0, None)


def test_rows_keep_their_namespace_and_the_default_stays() -> None:
    cache = cache_of(3)
    cache.put(KEY)
    row = cache.start(KEY, cache.m.namespace("runs"))
    cache.put(KEY, namespace=cache.m.namespace("idle"))
    cache.m.namespace("new")
    # met on the way to "idle", so it counts as looked up then
    assert standing(cache) == ["runs", "new"]
    cache.m.match(KeyBatch.pack([KEY]))
    cache.compute(row, 9)
    cache.finish(row, KEY)
    assert cache.match(KEY, cache.m.namespace("runs")) == (8, 8, None)
    assert cache.match(KEY) == (8, 8, None)
    both = [cache.start(KEY, int(handle)) for handle in cache.m.namespaces(["runs", "new"])]
    with pytest.raises(
        CapacityError, match=r"max_namespaces \(3, with the default one\) are in use"
    ):
        cache.m.namespace("more")
    cache.m.abort(both[1:])
    cache.m.namespace("more")
    assert standing(cache) == ["runs", "more"]
    cache.m.abort(both[:1])
    cache.drain()


def test_a_match_that_is_refused_uses_no_handle() -> None:
    cache = cache_of(2)
    handle = cache.m.namespace("first")
    keys = KeyBatch.pack([KEY])
    elsewhere = cache.m.match(keys, touch=False)
    handle = cache.m.namespace("first")
    with pytest.raises(InvalidInputError, match="namespaces differ"):
        cache.m.match(keys, handle, previous=elsewhere)
    with pytest.raises(CapacityError):
        cache.m.namespace("second")
    cache.m.match(keys, handle)
    cache.m.namespace("second")


def test_a_match_of_what_was_given_up_must_be_made_again() -> None:
    """Between match and admit the namespace may go; a hint of it says nothing, wherever its nodes are now."""
    cache = cache_of(2)
    cache.put(KEY, namespace=cache.m.namespace("mine"))
    found = cache.m.match(KeyBatch.pack([KEY]), cache.m.namespace("mine"))
    assert found.full_hit_len.tolist() == [8]
    other = cache.m.namespace("other")
    cache.put([*range(50, 59)], namespace=other)
    mine = cache.m.namespace("mine")
    cache.put([*range(70, 79)], namespace=mine)
    again = cache.m.match(KeyBatch.pack([KEY]), mine, previous=found)
    assert again.full_hit_len.tolist() == [0]
    cache.m.check()


def test_replicas_give_up_the_same_pages() -> None:
    caches = [cache_of(4, full_pages=30, swa_pages=30) for _ in range(2)]
    for cache in caches:
        for salt in range(30):
            handles = cache.m.namespaces([salt % 7, salt // 2])
            cache.put([*KEY, salt % 3, *KEY], namespace=int(handles[salt % 2]))
    one, other = (cache.m for cache in caches)
    for name, pool in vars(one.pools).items():
        assert (pool == getattr(other.pools, name)).all(), name
    assert standing(caches[0]) == standing(caches[1])


def test_namespaces_in_the_way_are_met_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows that run for long cost a look-up nothing: they are not gone through each time."""
    cache = cache_of(80, max_rows=60)
    names = [("long", i) for i in range(60)]
    cache.m.admit(cache.m.match(KeyBatch.pack([KEY] * 60), cache.m.namespaces(names)))
    for i in range(19):
        cache.m.namespace(i)
    cache.m.match(KeyBatch.pack([KEY]))
    looks = []
    is_locked = RadixTree.is_locked
    monkeypatch.setattr(
        RadixTree, "is_locked", lambda tree, handle: looks.append(handle) or is_locked(tree, handle)
    )
    for i in range(100):
        cache.m.namespace(("salt", i))
        cache.m.match(KeyBatch.pack([KEY]))
    # once around the running ones for every 19 others
    assert len(looks) <= 100 + 60 * (100 // 19 + 1)


def test_dropping_a_namespace_looks_at_its_own_nodes_only() -> None:
    cache = cache_of(4)
    for i in range(40):
        cache.put([*KEY[:4], *range(100 * i, 100 * i + 9)])
    small = cache.m.namespace("small")
    cache.put(KEY, namespace=small)
    nodes = cache.m.tree.nodes
    root = small & 0xFFFFFFFF
    own = {int(nodes[a.SPACE_NEXT, root]), int(nodes[a.SPACE_PREV, root])}
    used = np.arange(1, int(cache.m.tree.meta[a.M_BUMP]))
    others = [n for n in used.tolist() if nodes[a.PARENT, n] > 0 and n not in own]
    parents = nodes[a.PARENT, others].copy()
    assert len(others) > 40
    # whoever climbs from one of the others comes to the namespace that goes
    nodes[a.PARENT, others] = root
    assert cache.m.drop_namespace(small) == (2, 2)
    nodes[a.PARENT, others] = parents
    cache.drain()


def test_keys_of_a_queue_may_be_any_sequence_and_none() -> None:
    cache = cache_of(4)
    assert cache.m.namespaces([]).tolist() == []
    assert cache.m.namespaces([]).dtype == np.int64
    one, same, other = cache.m.namespaces((1, True, "1"))
    assert one == same != other
    assert cache.m.namespaces(np.array([1, 1])).tolist() == [one, one]
    assert cache.m.namespaces([None]).tolist() == [cache.m.namespace(None)]
