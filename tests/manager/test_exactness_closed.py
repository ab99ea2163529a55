"""A closed manager refuses every call; malformed input is refused when it is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from exact_refusals import WITH_ROWS
from exact_world import World, pack
from snapshot import changes, snapshot

from kvcache import (
    ClosedError,
    InvalidInputError,
    KeyBatch,
    KVCacheManager,
    Ragged,
)
from kvcache.device.decode_step import DecodeStep

# -- a closed manager ------------------------------------------------------------------------------

CLOSED: dict[str, Callable[[World], Any]] = {
    **{call: lambda w, m=make: m(w, [w.row]) for call, make in WITH_ROWS.items()},
    "pools": lambda w: w.m.pools,
    "capacity": lambda w: w.m.capacity(),
    "admit_as_many": lambda w: w.m.admit_as_many(w.stale, [9, 21]),
    "stats": lambda w: w.m.stats(),
    "check": lambda w: w.m.check(),
    "warm_up": lambda w: w.m.warm_up(),
    "namespace": lambda w: w.m.namespace("b"),
    "namespaces": lambda w: w.m.namespaces(["b"]),
    "drop_namespace": lambda w: w.m.drop_namespace(w.ns_cached),
    "match": lambda w: w.m.match(pack([1])),
    "admit": lambda w: w.m.admit(w.found, [0]),
    "pin": lambda w: w.m.pin(pack([1])),
    "unpin": lambda w: w.m.unpin([]),
    "evict": lambda w: w.m.evict(1),
    "flush": lambda w: w.m.flush(),
    "reset": lambda w: w.m.reset(),
    "index": lambda w: w.m.index([w.row]),
    "translate": lambda w: w.m.translate(w.one),
    "views.page_table": lambda w: w.m.views.page_table([w.row]),
    "decode step, made": lambda w: DecodeStep(w.m),
    "decode step, before": lambda w: w.decode.before_forward(),
    "decode step, after": lambda w: w.decode.after_forward(),
    "decode step, warmed up": lambda w: w.decode.warm_up(),
}
# of what belongs to a manager, not its methods
CLOSED_PARTS = {
    "views.page_table",
    "decode step",
    "decode step, made",
    "decode step, before",
    "decode step, after",
    "decode step, warmed up",
}


@pytest.fixture(scope="module")
def closed() -> World:
    world = World("cpu", False)
    world.m.close()
    return world


@pytest.mark.parametrize("call", CLOSED)
def test_a_closed_manager_refuses(call: str, closed: World) -> None:
    before = snapshot(closed.m)
    with pytest.raises(ClosedError, match="the manager was closed"):
        CLOSED[call](closed)
    assert changes(before, snapshot(closed.m)) == []


def test_every_call_is_refused_when_closed() -> None:
    public = {n for n in dir(KVCacheManager) if not n.startswith("_")} - {"close"}
    assert public == {call.removesuffix(" to lens") for call in CLOSED} - CLOSED_PARTS


def test_closing_again_changes_nothing(closed: World) -> None:
    before = snapshot(closed.m)
    closed.m.close()
    assert changes(before, snapshot(closed.m)) == []


# -- what a manager is given -----------------------------------------------------------------------

TOKENS = np.arange(6, dtype=np.int32)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KeyBatch([1, 2], [0], [2]), "tokens must be an int32 or int64 numpy array"),
        (lambda: KeyBatch(TOKENS.astype(np.int16), [0], [2]), "got int16"),
        (lambda: KeyBatch(TOKENS.astype(np.float32), [0], [2]), "got float32"),
        (lambda: KeyBatch(TOKENS.reshape(2, 3), [0], [2]), "tokens must be 1-D and contiguous"),
        (lambda: KeyBatch(TOKENS[::2], [0], [2]), "tokens must be 1-D and contiguous"),
        (lambda: KeyBatch(TOKENS, [0, 1], [2]), "lens must have 2 entries, got 1"),
        (lambda: KeyBatch(TOKENS, [0.0], [2]), "starts must hold integers"),
        (lambda: KeyBatch(TOKENS, [0], [2.0]), "lens must hold integers"),
        (lambda: KeyBatch(TOKENS, [-1], [2]), "starts and lens must be >= 0"),
        (lambda: KeyBatch(TOKENS, [0], [-2]), "starts and lens must be >= 0"),
        (lambda: KeyBatch(TOKENS, [0, 5], [6, 2]), "keys must end within tokens"),
        (lambda: KeyBatch(TOKENS, [7], [0]), "keys must end within tokens"),
        (lambda: KeyBatch(TOKENS, [2**63 - 1], [1]), "keys must end within tokens"),
        (lambda: KeyBatch(TOKENS, [1], [2**63 - 1]), "keys must end within tokens"),
        (lambda: KeyBatch.pack([[1], [2.5]]), r"keys\[1\] must hold integers"),
        (lambda: Ragged([1.5], [0, 1]), "values must hold integers"),
        (lambda: Ragged([1], [0, 2]), "indptr must run from 0 to 1"),
        (lambda: Ragged([1], [1, 1]), "indptr must run from 0 to 1"),
        (lambda: Ragged([1], []), "indptr must run from 0 to 1"),
        (lambda: Ragged([1, 2], [0, 2, 1, 2]), "indptr must not descend"),
        (lambda: Ragged.pack([[1], [2.5]]), "values must hold integers"),
    ],
)
def test_malformed_input_is_refused_when_made(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        make()
