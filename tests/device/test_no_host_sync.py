"""No call of the scheduler API waits for the device, and what a call costs does not depend on its batch.

On the fake accelerator, without running the kernels: the host cannot tell, since nothing flows back. (With
kernels that run: tests/interp and tests/native.)
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from instruments.fakedev import HostSync, Seen, accelerator, no_host_sync
from scheduler_calls import CALLS, prepared

from kvcache import KeyBatch

DEVICE = "kvdev"
BATCHES = (1, 7, 256)


class Cost(NamedTuple):
    """What one call does, whatever its batch."""

    launches: str = ""  # kernels, each as often as it is launched
    uploads: int = 0
    copies: int = 0  # from device to device
    views: int = 0  # torch operations that make views: host work
    results: int = 0  # tensors made for the caller


COSTS = {
    "namespace": Cost(),
    "namespace, all in use": Cost("apply", uploads=1, views=3),
    "namespaces, all in use": Cost("apply", uploads=1, views=3),
    "match": Cost(),
    "match, with a previous match": Cost(),
    "match on the device": Cost("match", uploads=1, views=6, results=1),
    "match on the device, the tree changed": Cost(
        "match update_mirror", uploads=1, views=18, results=1
    ),
    "admit, nothing cached": Cost("apply", uploads=1, views=3),
    "admit, all cached": Cost("apply", uploads=1, views=3),
    "admit, matched on the device": Cost("apply bind_match", uploads=1, views=6),
    "index": Cost(),
    "capacity": Cost(),
    "admit_as_many": Cost(),
    "stats": Cost(),
    "extend": Cost("extend", uploads=1, views=3),
    "extend, evicting": Cost("apply extend", uploads=1, views=5),
    "step, same rows": Cost("step"),
    "step, other rows": Cost("step", uploads=1, views=1),
    "step, same rows, evicting": Cost("apply step", uploads=1, views=3),
    "step, other rows, evicting": Cost("apply step", uploads=1, copies=1, views=5),
    "advance, same rows": Cost("advance"),
    "advance, other rows": Cost("advance", uploads=1, views=1),
    "advance, to given lengths": Cost("advance", uploads=1, views=3),
    "commit, all new": Cost("apply apply", uploads=1, views=5),
    "commit, all known": Cost("apply apply", uploads=1, views=5),
    "commit, adopting": Cost("apply apply apply", uploads=1, views=7),
    "commit, nothing to do": Cost(),
    "slide, same rows": Cost("slide"),
    "slide, other rows": Cost("slide", uploads=1, views=1),
    "finish": Cost("apply apply", uploads=1, views=5),
    "retract": Cost("apply apply", uploads=1, views=5),
    "abort": Cost("apply apply", uploads=1, views=5),
    "evict": Cost("apply", uploads=1, views=3),
    "evict, windows": Cost("apply", uploads=1, views=3),
    "evict, nothing": Cost(),
    "flush": Cost("apply", uploads=1, views=3),
    "drop_namespace": Cost("apply", uploads=1, views=3),
    "translate": Cost("translate"),
    "swa_page_table, same rows": Cost("fill_table", views=3),
    "swa_page_table, other rows": Cost("fill_table", uploads=1, views=4),
    "swa_page_table, to given lengths": Cost("fill_table", uploads=1, views=8),
    "swa_indices": Cost("fill_indices", views=4),
    "views.page_table": Cost("fill_table", views=3),
    "views.full_indices": Cost("fill_indices", views=4),
    "views.token_slots": Cost("fill_indices", views=4),
    "views.swa_token_slots": Cost("fill_indices", views=4),
    "decode step with two views, same rows": Cost("decode_slide decode_step fill_table fill_table"),
    "decode step with two views, other rows": Cost(
        "decode_slide decode_step fill_table fill_table", uploads=1, views=1
    ),
}


@pytest.fixture(autouse=True)
def fake_accelerator() -> Iterator[None]:
    with accelerator(run_kernels=False):
        yield


def cost_of(seen: Seen) -> Cost:
    """The cost of what was seen; fails for any other torch operation, an allocation say."""
    ops = dict(seen.ops)
    views = sum(ops.pop(f"aten.{op}", 0) for op in ("slice", "view", "detach"))
    copies = ops.pop("aten.copy_", 0) - seen.uploads
    results = ops.pop("aten.empty", 0)
    assert ops.pop("aten.fill_", 0) == results  # tests/conftest.py poisons what is made
    assert ops == {}
    assert seen.pinned == 0
    launches = [name.removeprefix("_").removesuffix("_kernel") for name in seen.launches.elements()]
    return Cost(" ".join(sorted(launches)), seen.uploads, copies, views, results)


def test_every_call_has_a_cost() -> None:
    assert set(COSTS) == set(CALLS)
    assert max(cost.uploads for cost in COSTS.values()) == 1


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: f"batch{batch}")
@pytest.mark.parametrize("call", CALLS)
def test_a_call_costs_the_same_at_any_batch_and_never_waits(call: str, batch: int) -> None:
    manager, make = prepared(call, batch, DEVICE)
    before = manager.stats()
    with no_host_sync() as seen:
        make()
    after = manager.stats()
    assert cost_of(seen) == COSTS[call]
    assert after.launches - before.launches == seen.launches.total()
    assert after.uploads - before.uploads == seen.uploads


def plant_in(call: str) -> str:
    """A function that `call` runs."""
    places = {
        "namespace": "kvcache.namespaces.Namespaces.known",
        "namespaces": "kvcache.namespaces.Namespaces.look_up",
        "match": "kvcache.tree.radix_tree.RadixTree.match",
        "match on the device": "kvcache.device.tree_mirror.TreeMirror.update",
        "admit": "kvcache.rows.Rows.take",
        "index": "kvcache.core.running_rows",
        "capacity": "kvcache.core.Capacity",
        "admit_as_many": "kvcache.tree.radix_tree.RadixTree.how_many_fit",
        "stats": "kvcache.core.Stats",
        "extend": "kvcache.device.data_plane.DataPlane.extend",
        "step": "kvcache.device.data_plane.DataPlane.step",
        "advance": "kvcache.device.data_plane.DataPlane.advance",
        "commit": "kvcache.tree.radix_tree.RadixTree.insert",
        "slide": "kvcache.device.data_plane.DataPlane.slide",
        "finish": "kvcache.rows.Rows.give_back",
        "retract": "kvcache.tree.radix_tree.RadixTree.prefix_hints",
        "abort": "kvcache.tree.radix_tree.RadixTree.unlock",
        "evict": "kvcache.tree.radix_tree.RadixTree.evict",
        "flush": "kvcache.device.data_plane.DataPlane.apply",
        "drop_namespace": "kvcache.tree.radix_tree.RadixTree.drop_roots",
        "translate": "kvcache.core.translate",
        "decode step with two views": "kvcache.state.CacheState.make_room",
    }
    return places.get(call.split(",")[0], "kvcache.device.views.running_rows")


WAITS: list[Callable[[torch.Tensor], Any]] = [
    lambda x: int(x[0]),
    lambda x: x.tolist(),
    lambda x: x.cpu(),
    lambda x: x[x > 0],
    lambda x: x.nonzero(),
    lambda x: x.unique(),
    lambda x: torch.from_numpy(np.zeros(2, np.int32)).to(x.device, non_blocking=True),
    lambda x: torch.tensor([1, 2], device=x.device),
    lambda x: 1 if x[0] > 0 else 2,
]


@pytest.mark.parametrize(("number", "call"), [*enumerate(CALLS)])
def test_a_wait_planted_in_a_call_is_caught(
    number: int, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, make = prepared(call, 2, DEVICE)
    place = plant_in(call)
    planted_in: Any = pkgutil.resolve_name(place)

    def waiting(*args: Any, **kwargs: Any) -> Any:
        WAITS[number % len(WAITS)](manager.pools.tops)
        return planted_in(*args, **kwargs)

    monkeypatch.setattr(place, waiting)
    with no_host_sync(), pytest.raises(HostSync):
        make()


@pytest.mark.parametrize("call", [name for name, cost in COSTS.items() if cost.uploads])
def test_pageable_staging_would_be_caught(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "kvcache.device.staging.pinned_empty", lambda words: torch.zeros(words, dtype=torch.int32)
    )
    _, make = prepared(call, 2, DEVICE)
    with no_host_sync(), pytest.raises(HostSync, match="pageable"):
        make()


def test_calls_on_nothing_cost_nothing() -> None:
    manager, _ = prepared("stats", 2, DEVICE)
    none, no_keys = np.zeros(0, np.int64), KeyBatch.pack([])
    slots = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    before = manager.stats()
    with no_host_sync() as seen:
        assert manager.admit(manager.match(no_keys)).size == 0
        manager.extend(none, none)
        manager.step(none)
        manager.advance(none)
        manager.advance(none, none)
        manager.commit(none, no_keys)
        manager.slide(none)
        manager.finish(none, no_keys)
        manager.retract(none, no_keys)
        manager.abort(none)
        manager.evict()
        manager.translate(slots, out=slots)
    assert cost_of(seen) == Cost()
    assert manager.stats() == before


def test_a_result_of_translate_is_the_only_allocation() -> None:
    manager, _ = prepared("translate", 2, DEVICE)
    slots = torch.zeros(5, dtype=torch.int32, device=DEVICE)
    with no_host_sync() as seen:
        assert manager.translate(slots).shape == slots.shape
    assert {op for op in seen.ops if "empty" in op} == {"aten.empty_like"}
    assert seen.launches == {"_translate_kernel": 1}
