"""A call that raises has changed nothing: every call, cut short by every error that it can raise.

State is compared whole, before and after: host arrays of rows and tree (recency that waits included), device
tensors, counts. On the fake accelerator the guard sees besides that nothing was launched or copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from exact_refusals import ON_DEVICE, REFUSED, WITH_ROWS
from exact_world import World, pack, run_decode_step, started, tokens, unchanged
from instruments.fakedev import NAME, accelerator
from snapshot import changes, snapshot

from kvcache import (
    CacheConfig,
    CapacityError,
    InvalidInputError,
    KVCacheManager,
)
from kvcache.device.decode_step import DecodeStep
from kvcache.errors import ReceiptError

WORLDS = {"cpu": ("cpu", False), "cpu_bigram": ("cpu", True), "accelerator": (NAME, False)}


@pytest.fixture(params=WORLDS, scope="module")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """One world for all refusals: none may change it."""
    with accelerator(run_kernels=False):
        yield World(*WORLDS[request.param])


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_call_changes_nothing(name: str, world: World) -> None:
    if ON_DEVICE in name and world.device == "cpu":
        return
    refusal = REFUSED[name]
    unchanged(world.m, lambda: refusal.call(world), refusal.error, refusal.message)


def test_a_snapshot_sees_every_call_that_is_not_refused() -> None:
    """Even a match, whose recency only waits, and a call that does no device work."""
    calls: dict[str, Callable[[World], Any]] = {
        "namespace": lambda w: w.m.namespace(None),
        "a namespace that is not the most recent": lambda w: w.m.namespace("a"),
        "match": lambda w: w.m.match(pack(w.key)),
        "extend": lambda w: w.m.extend([w.row], [36]),
        "advance": lambda w: w.m.advance([w.row], [35]),
        "commit": lambda w: w.m.commit([w.row], pack(w.key)),
        "abort": lambda w: w.m.abort([w.other]),
        "evict": lambda w: w.m.evict(1),
    }
    same = {name for name, call in calls.items() if not _changes_state(call)}
    assert same == {"namespace"}  # the default has no place in the order


def _changes_state(call: Callable[[World], Any]) -> bool:
    world = World("cpu", False)
    before = snapshot(world.m)
    call(world)
    return changes(before, snapshot(world.m)) != []


# -- lack of pages: some could be evicted, too few -------------------------------------------------


@pytest.mark.parametrize("call", ["extend", "step", "decode step"])
@pytest.mark.parametrize(
    ("full_pages", "swa_pages", "message"),
    [(20, 40, "Full pages needed"), (40, 20, "SWA pages needed"), (20, 20, "pages needed")],
    ids=["Full", "SWA", "both"],
)
@pytest.mark.parametrize("device", ["cpu", NAME])
def test_a_lack_of_pages_changes_nothing(
    device: str, full_pages: int, swa_pages: int, message: str, call: str
) -> None:
    with accelerator(run_kernels=False):
        m = KVCacheManager(
            CacheConfig(
                page_size=4,
                window=8,
                full_pages=full_pages,
                swa_pages=swa_pages,
                max_rows=20,
                max_len=80,
                device=device,
            )
        )
        m.finish(started(m, [tokens(9, 8)]), pack(tokens(9, 8)))
        keys = [tokens(i, 5)[::-1] for i in range(1, 5)]
        rows = started(m, [[i, *key] for i, key in enumerate(keys)], length=4)
        filler = started(m, [[500 + i] for i in range(14)], length=4)
        decode = DecodeStep(m, views=())
        calls: dict[str, Callable[[Any], None]] = {
            "extend": lambda some: m.extend(some, [5] * len(some)),
            "step": m.step,
            "decode step": lambda some: run_decode_step(decode, some),
        }
        # recency that waits
        assert m.match(pack(tokens(9, 8))).reuse_len.tolist() == [8]
        # each of the four rows needs a page; two could be had by eviction
        assert min(m.capacity()[1:]) == m.stats().tree_full_pages == 2
        unchanged(m, lambda: calls[call](rows), CapacityError, message)
        calls[call](rows[:2])
        assert m.stats().evicted_full_pages == 2
        m.abort(filler)


# -- receipts: below the manager, which never gets one wrong ---------------------------------------


@pytest.mark.parametrize("call", ["unlock", "release_swa"])
@pytest.mark.parametrize(
    "wrong",
    ["released", "twice", "of another generation", "negative", "out of range", "of a free lock"],
)
def test_a_wrong_receipt_changes_nothing(wrong: str, call: str) -> None:
    w = World("cpu", False)
    tree = w.m.tree
    good, other = w.m.rows.receipts[w.m.index([w.row, w.other])].tolist()
    released = int(w.m.rows.receipts[w.m.index([w.in_namespace])[0]])
    w.m.abort([w.in_namespace])
    receipts = {
        "released": [good, released],
        "twice": [good, other, good],
        "of another generation": [good, other + (2 << 32)],
        "negative": [good, -1],
        "out of range": [good, tree.locks.shape[1]],
        "of a free lock": [good, 5],
    }[wrong]
    w.m.match(pack(w.key))
    unchanged(
        w.m,
        lambda: getattr(tree, call)(np.array(receipts, np.int64)),
        ReceiptError,
        rf"receipts\[{len(receipts) - 1}\] must be the receipt of a standing lock, once",
    )
    w.m.check()


# -- in a decode step ------------------------------------------------------------------------------

IN_A_STEP: dict[str, Callable[[World], Any]] = {
    **{call: lambda w, m=make: m(w, [w.other]) for call, make in WITH_ROWS.items()},
    "admit": lambda w: w.m.admit(w.found, [0]),
    "namespace": lambda w: w.m.namespace("d"),
    "namespaces": lambda w: w.m.namespaces(["d"]),
    "drop_namespace": lambda w: w.m.drop_namespace(w.ns_cached),
    "evict": lambda w: w.m.evict(1),
    "flush": lambda w: w.m.flush(),
    "match on the device": lambda w: w.m.match(w.device_keys, on="device"),
    "warm_up": lambda w: w.decode.warm_up(),
}


@pytest.mark.parametrize("call", IN_A_STEP)
def test_a_call_in_the_body_of_a_decode_step_changes_nothing(call: str) -> None:
    """The host's counts move when the step ends; before, a call would take the step's pages again."""
    w = World("cpu", False)
    with w.decode.running([w.row]):
        w.decode.before_forward()
        w.decode.after_forward()
        unchanged(
            w.m, lambda: IN_A_STEP[call](w), InvalidInputError, "until DecodeStep.running is left"
        )
    w.m.check()
    w.m.extend([w.other], [40])
    w.m.check()


def test_a_decode_step_refuses_rows_that_hold_pages_of_drafts() -> None:
    """It would count tokens as computed that never were."""
    w = World("cpu", False)
    w.m.extend([w.other], [39])
    unchanged(
        w.m,
        lambda: run_decode_step(w.decode, [w.row, w.other]),
        InvalidInputError,
        r"rows\[1\] must hold pages for one token more than are computed, .* with 39 and 37",
    )
    w.m.advance([w.other], [38])
    run_decode_step(w.decode, [w.row, w.other])
    w.m.check()
