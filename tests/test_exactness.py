"""A call that raises has changed nothing: every call, cut short by every error that it can raise.

State is compared whole, before and after: host arrays of rows and tree (recency that waits included), device
tensors, counts. On the fake accelerator the guard sees besides that nothing was launched or copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from instruments.fakedev import NAME, Seen, accelerator, no_host_sync
from snapshot import changes, snapshot

from kvcache import (
    CacheConfig,
    CapacityError,
    ClosedError,
    Hints,
    InvalidInputError,
    KeyBatch,
    KVCacheManager,
    Ragged,
    StaleMatchError,
)
from kvcache.checkpoints import Branch
from kvcache.decode_step import DecodeStep
from kvcache.errors import ReceiptError
from kvcache.views import Views

FULL_PAGES, SWA_PAGES, MAX_LEN = 48, 40, 60


def tokens(family: int, length: int) -> list[int]:
    """The tokens of a family of requests; families share the first eight."""
    return [*range(min(length, 8)), *range(100 * family + 8, 100 * family + length)]


def pack(*keys: list[int]) -> KeyBatch:
    return KeyBatch.pack(keys)


class World:
    """A manager in the middle of its work: every kind of thing that a call can get wrong is there."""

    def __init__(self, device: str, bigram: bool) -> None:
        self.device = device
        self.m = KVCacheManager(
            CacheConfig(
                page_size=4,
                window=8,
                full_pages=FULL_PAGES,
                swa_pages=SWA_PAGES,
                max_rows=6,
                max_len=MAX_LEN,
                bigram=bigram,
                checkpoints=(Branch(), Hints()),
                max_namespaces=3,
                device=device,
            )
        )
        self.ns_running, self.ns_dropped = self.m.namespace("a"), self.m.namespace("dropped")
        # a match whose prefix goes, in a namespace that stands and in one that goes
        self._serve(tokens(1, 21))
        self._serve(tokens(1, 21), self.ns_dropped)
        self.stale = self.m.match(pack(tokens(2, 9), tokens(1, 21)))
        self.of_dropped = self.m.match(pack(tokens(1, 21)), self.ns_dropped)
        assert self.stale.reuse_len[1] == self.of_dropped.reuse_len[0] == 20
        self.m.drop_namespace(self.ns_dropped)
        self.m.flush()
        # live windows, tombstones and a fork in the tree
        self._serve(tokens(1, 33))
        self._serve(tokens(2, 33))
        self.ns_cached = self.m.namespace("b")
        self._serve(tokens(1, 13), self.ns_cached)
        # two rows behind a cached prefix, one at max_len, one in a namespace, one that has ended
        self.key, self.other_key = tokens(1, 40), tokens(2, 40)
        self.row = self._start(self.key, 35)
        self.other = self._start(self.other_key, 37)
        self.full = self._start(tokens(3, MAX_LEN), MAX_LEN)
        self.in_namespace = self._start(tokens(1, 10), 9, self.ns_running)
        self.ended = self._start(tokens(4, 10), 9)
        self.m.abort([self.ended])
        self.m.slide([self.full])
        # token slots on the device
        self.one, self.two = (torch.zeros(n, dtype=torch.int64, device=device) for n in (1, 2))
        self.floats, self.int32 = self.one.float(), self.one.int()
        self.decode = DecodeStep(self.m, views=("token_slots",), num_lanes=3, max_slots=80)
        self.few_slots = Views(self.m, max_slots=40)
        # recency that waits
        self.found = self.m.match(pack(tokens(2, 30), tokens(1, 14), tokens(5, 14)))
        assert self.found.reuse_len.max() > 0

    def _start(self, key: list[int], length: int, namespace: int | None = None) -> int:
        (row,) = self.m.admit(self.m.match(pack(key[:-1]), namespace))
        self.m.extend([row], [length])
        self.m.advance([row])
        return int(row)

    def _serve(self, key: list[int], namespace: int | None = None) -> None:
        self.m.finish([self._start(key, len(key), namespace)], pack(key))


class Refusal(NamedTuple):
    """A call that cannot be right."""

    call: Callable[[World], Any]
    error: type[Exception]
    message: str  # what the error says, a regular expression


REFUSED: dict[str, Refusal] = {}


def refused(
    name: str,
    call: Callable[[World], Any],
    message: str,
    error: type[Exception] = InvalidInputError,
) -> None:
    assert name not in REFUSED
    REFUSED[name] = Refusal(call, error, message)


# -- rows: every call that takes them, with a good row before the bad one --------------------------

WITH_ROWS: dict[str, Callable[[World, Any], Any]] = {
    "extend": lambda w, rows: w.m.extend(rows, [40] * len(rows)),
    "step": lambda w, rows: w.m.step(rows),
    "advance": lambda w, rows: w.m.advance(rows),
    "advance to lens": lambda w, rows: w.m.advance(rows, [35] * len(rows)),
    "slide": lambda w, rows: w.m.slide(rows),
    "commit": lambda w, rows: w.m.commit(rows, pack(*[w.key] * len(rows))),
    "finish": lambda w, rows: w.m.finish(rows, pack(*[w.key] * len(rows))),
    "retract": lambda w, rows: w.m.retract(rows, pack(*[w.key] * len(rows))),
    "abort": lambda w, rows: w.m.abort(rows),
    "swa_page_table": lambda w, rows: w.m.swa_page_table(rows),
    "swa_indices": lambda w, rows: w.m.swa_indices(rows),
    "decode step": lambda w, rows: run_decode_step(w.decode, rows),
}
BAD_ROWS: dict[str, tuple[Callable[[World], Any], str]] = {
    "floats": (lambda w: [float(w.row)], "rows must hold integers, got float64"),
    "bools": (lambda w: np.array([True]), "rows must hold integers, got bool"),
    "words": (lambda w: ["0"], "rows must hold integers, got <U1"),
    "two dimensions": (lambda w: [[w.row]], r"rows must be 1-D, got shape \(1, 1\)"),
    "ragged": (lambda w: [[w.row], []], "rows must be 1-D and hold integers"),
    "none": (lambda w: [None], "rows must hold integers, got object"),
    "a negative row": (lambda w: [w.row, -1], r"rows\[1\] must be a running row, once; got -1"),
    "a row past the last": (lambda w: [w.row, 6], r"rows\[1\] must be a running row, once; got 6"),
    "a row that wraps": (lambda w: [w.row, w.other + 2**32], "rows must fit int32, got"),
    "a row that no request has": (lambda w: [w.row, 5], r"rows\[1\] must be a running row"),
    "an ended row": (lambda w: [w.row, w.ended], r"rows\[1\] must be a running row"),
    "a row twice": (lambda w: [w.row, w.other, w.row], r"rows\[2\] must be a running row, once"),
}
# accepted where the device is the host
ON_DEVICE = "of the device"
BAD_ROWS[ON_DEVICE] = (
    lambda w: w.one,
    "rows must be 1-D and hold integers, got a DeviceTensor",
)
for _call, _make in WITH_ROWS.items():
    for _name, (_rows, _message) in BAD_ROWS.items():
        refused(f"{_call}: rows: {_name}", lambda w, m=_make, r=_rows: m(w, r(w)), _message)

# -- namespaces, match, admit ----------------------------------------------------------------------

refused("namespace: too many", lambda w: w.m.namespace("c"), "max_namespaces", CapacityError)
refused("namespace: unhashable", lambda w: w.m.namespace(["a"]), "key must be hashable, got a list")
for _name, _handle, _message in (
    ("unknown", lambda w: 2**40 + 12345, "must be the handle of a standing namespace"),
    ("negative", lambda w: -1, "must be the handle of a standing namespace, got -1"),
    ("of no int64", lambda w: 2**70, "namespaces must hold integers, got object"),
    ("dropped", lambda w: w.ns_dropped, "must be the handle of a standing namespace"),
    ("a float", lambda w: 1.0, r"namespaces must be 1-D, got shape \(\)"),
    ("a word", lambda w: "a", r"namespaces must be 1-D, got shape \(\)"),
):
    refused(f"drop_namespace: {_name}", lambda w, h=_handle: w.m.drop_namespace(h(w)), _message)
    refused(f"match: namespace {_name}", lambda w, h=_handle: w.m.match(pack([1]), h(w)), _message)
refused(
    "drop_namespace: the default",
    lambda w: w.m.drop_namespace(w.m.namespace(None)),
    "handle must not be of the default namespace",
)
refused(
    "drop_namespace: in use",
    lambda w: w.m.drop_namespace(w.ns_running),
    "handle must be of a namespace that no row uses",
)
refused("match: no KeyBatch", lambda w: w.m.match([[1]]), "keys must be a KeyBatch, got list")
refused(
    "match: too many namespaces",
    lambda w: w.m.match(pack([1]), [w.ns_running] * 2),
    "namespaces must have 1 entries, got 2",
)
refused(
    "match: one bad namespace",
    lambda w: w.m.match(pack([1], [2]), [w.ns_running, 7]),
    r"namespaces\[1\] must be the handle of a standing namespace, got 7",
)
refused(
    "match: previous of no match",
    lambda w: w.m.match(pack([1]), previous=7),
    "previous must be a MatchBatch, got int",
)
refused(
    "match: previous of another size",
    lambda w: w.m.match(pack([1]), previous=w.found),
    "previous must be of the same batch",
)
refused(
    "match: previous of another namespace",
    lambda w: w.m.match(pack([1], [2], [3]), w.ns_running, previous=w.found),
    "previous must be of the same batch",
)
refused(
    "admit: no MatchBatch", lambda w: w.m.admit(None), "batch must be a MatchBatch, got NoneType"
)
refused("admit: index of floats", lambda w: w.m.admit(w.found, [0.5]), "index must hold integers")
refused("admit: index past it", lambda w: w.m.admit(w.found, [0, 3]), r"index must be in \[0, 3\)")
refused(
    "admit: negative index", lambda w: w.m.admit(w.found, [0, -1]), r"index must be in \[0, 3\)"
)
refused("admit: too many", lambda w: w.m.admit(w.found), "3 rows needed, 2 are free", CapacityError)
refused("admit: stale", lambda w: w.m.admit(w.stale), "request 1 must be matched", StaleMatchError)
refused(
    "admit: of a dropped namespace",
    lambda w: w.m.admit(w.of_dropped),
    "request 0 must be matched again",
    StaleMatchError,
)

# -- lengths and pages -----------------------------------------------------------------------------

refused(
    "extend: fewer lengths", lambda w: w.m.extend([w.row, w.other], [40]), "new_len must have 2"
)
refused("extend: floats", lambda w: w.m.extend([w.row], [40.0]), "new_len must hold integers")
refused("extend: wraps", lambda w: w.m.extend([w.row], [2**32 + 40]), "new_len must fit int32")
refused(
    "extend: below computed",
    lambda w: w.m.extend([w.row, w.other], [40, 36]),
    r"new_len\[1\] must be in \[37, 60\], got 36",
)
refused(
    "extend: negative",
    lambda w: w.m.extend([w.row, w.other], [40, -1]),
    r"new_len\[1\] must be in \[37, 60\], got -1",
)
refused(
    "extend: above max_len",
    lambda w: w.m.extend([w.row, w.other], [40, 61]),
    r"new_len\[1\] must be in \[37, 60\], got 61",
)
refused(
    "step: a row at max_len",
    lambda w: w.m.step([w.row, w.full]),
    r"rows\[1\] must stay within max_len \(60\)",
)
refused("advance: fewer lengths", lambda w: w.m.advance([w.row, w.other], [35]), "lens must have 2")
refused("advance: floats", lambda w: w.m.advance([w.row], [35.0]), "lens must hold integers")
refused(
    "advance: back",
    lambda w: w.m.advance([w.row, w.other], [35, 36]),
    r"lens\[1\] must be in \[37, 37\], got 36",
)
refused(
    "advance: beyond what is allocated",
    lambda w: w.m.advance([w.row, w.other], [35, 38]),
    r"lens\[1\] must be in \[37, 37\], got 38",
)

refused(
    "decode step: a row at max_len",
    lambda w: run_decode_step(w.decode, [w.row, w.full]),
    r"rows\[1\] must stay within max_len \(60\)",
)
refused(
    "decode step: too many rows",
    lambda w: run_decode_step(w.decode, [w.row, w.other, w.in_namespace, w.full]),
    r"rows must be at most num_lanes \(3\), got 4",
)
refused(
    "decode step: too many slots",
    lambda w: run_decode_step(w.decode, [w.row, w.other, w.in_namespace]),
    "rows must list at most 80 entries",
)
refused("decode step: an unknown view", lambda w: DecodeStep(w.m, ("table",)), "views must be of")
refused("decode step: no lane", lambda w: DecodeStep(w.m, num_lanes=0), "num_lanes must be in")
for _view in ("swa_page_table", "swa_indices"):
    refused(
        f"{_view}: fewer lengths",
        lambda w, v=_view: getattr(w.m, v)([w.row, w.other], [35]),
        "lens must have 2",
    )
    refused(
        f"{_view}: below computed",
        lambda w, v=_view: getattr(w.m, v)([w.row, w.other], [35, 36]),
        r"lens\[1\] must be in \[37, 37\], got 36",
    )
refused(
    "token_slots: floats",
    lambda w: w.m.views.token_slots([w.row], dtype=torch.float32),
    "dtype must be torch.int32 or torch.int64, got torch.float32",
)
refused(
    "token_slots: too many",
    lambda w: w.few_slots.token_slots([w.row, w.other]),
    r"rows must have at most 40 entries \(max_slots\), got 72",
)

# -- keys and hints --------------------------------------------------------------------------------

WITH_KEYS: dict[str, Callable[..., Any]] = {
    "commit": lambda w, rows, *rest: w.m.commit(rows, *rest),
    "finish": lambda w, rows, *rest: w.m.finish(rows, *rest),
    "retract": lambda w, rows, *rest: w.m.retract(rows, *rest),
}


def changed(key: list[int], at: int, token: int) -> list[int]:
    return [*key[:at], token, *key[at + 1 :]]


BAD_KEYS: dict[str, tuple[Callable[[World], tuple[Any, ...]], str]] = {
    "no KeyBatch": (lambda w: ([w.key, w.other_key],), "keys must be a KeyBatch, got list"),
    "fewer keys": (lambda w: (pack(w.key),), "keys must have 2 entries, got 1"),
    "more keys": (lambda w: (pack(w.key, w.other_key, w.key),), "keys must have 2 entries, got 3"),
    "too short": (
        lambda w: (pack(w.key, w.other_key[:36]),),
        r"keys\[1\] must have at least computed_len \(37\) tokens, got 36",
    ),
    "contradicts the prefix": (
        lambda w: (pack(w.key, changed(w.other_key, 20, 7)),),
        r"keys\[1\] must repeat the prefix of row 1",
    ),
    "contradicts its first token": (
        lambda w: (pack(w.key, changed(w.other_key, 0, 7)),),
        r"keys\[1\] must repeat the prefix of row 1",
    ),
    "a negative token": (
        lambda w: (pack(w.key, changed(w.other_key, 33, -1)),),
        r"keys\[1\] must .* hold tokens in \[0, 2\^31\)",
    ),
    "a token of 2^31": (
        lambda w: (pack(w.key, changed(w.other_key, 34, 2**31)),),
        r"keys\[1\] must .* hold tokens in \[0, 2\^31\)",
    ),
    "2^31 among zeros": (
        lambda w: (pack(w.key, [*w.other_key[:32], 0, 2**31, *[0] * 6]),),
        r"keys\[1\] must .* hold tokens in \[0, 2\^31\)",
    ),
    "a token that wraps into the prefix": (
        lambda w: (pack(w.key, changed(w.other_key, 20, w.other_key[20] + 2**32)),),
        r"keys\[1\] must repeat the prefix of row 1",
    ),
    "hints that are no Ragged": (
        lambda w: (pack(w.key, w.other_key), [[8], [8]]),
        "hints must be a Ragged, got list",
    ),
    "fewer hints": (
        lambda w: (pack(w.key, w.other_key), Ragged([8], [0, 1])),
        "hints must have 2 entries, got 1",
    ),
}
for _call, _make_keys in WITH_KEYS.items():
    for _name, (_args, _message) in BAD_KEYS.items():
        refused(
            f"{_call}: {_name}",
            lambda w, m=_make_keys, a=_args: m(w, [w.row, w.other], *a(w)),
            _message,
        )

# -- pools -----------------------------------------------------------------------------------------

refused("evict: negative", lambda w: w.m.evict(-1), "full_pages must be >= 0, got -1")
refused("evict: negative SWA", lambda w: w.m.evict(1, -1), "swa_pages must be >= 0, got -1")
refused("evict: half a page", lambda w: w.m.evict(0.5), "full_pages must be an int, got 0.5")
refused("evict: a bool", lambda w: w.m.evict(True), "full_pages must be an int, got True")
refused("translate: a list", lambda w: w.m.translate([4]), "slots must be a Tensor, got list")
refused(
    "translate: out is a list",
    lambda w: w.m.translate(w.one, out=[0]),
    "out must be a Tensor, got list",
)
refused(
    "translate: floats",
    lambda w: w.m.translate(w.floats),
    r"slots must be torch.int32 or torch.int64, got torch.float32",
)
refused(
    "translate: another device",
    lambda w: w.m.translate(torch.zeros(1, dtype=torch.int64, device="meta")),
    "slots must be on",
)
refused(
    "translate: out too short",
    lambda w: w.m.translate(w.two, out=w.one),
    r"out must be \(2,\), got \(1,\)",
)
refused(
    "translate: out of another dtype",
    lambda w: w.m.translate(w.one, out=w.int32),
    r"out must be torch.int64, got torch.int32",
)


WORLDS = {"cpu": ("cpu", False), "cpu_bigram": ("cpu", True), "accelerator": (NAME, False)}


@pytest.fixture(params=WORLDS, scope="module")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """One world for all refusals: none may change it."""
    with accelerator(run_kernels=False):
        yield World(*WORLDS[request.param])


def unchanged(
    manager: KVCacheManager, call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    """Make a call that is refused, and compare all state before and after."""
    before, stats = snapshot(manager), manager.stats()
    with no_host_sync() as seen, pytest.raises(error, match=message):
        call()
    assert changes(before, snapshot(manager)) == []
    assert manager.stats() == stats
    assert seen == Seen()


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_call_changes_nothing(name: str, world: World) -> None:
    if ON_DEVICE in name and world.device == "cpu":
        return
    refusal = REFUSED[name]
    unchanged(world.m, lambda: refusal.call(world), refusal.error, refusal.message)


def test_a_snapshot_sees_every_call_that_is_not_refused() -> None:
    """Even a match, whose recency only waits, and a call that does no device work."""
    calls: dict[str, Callable[[World], Any]] = {
        "namespace": lambda w: w.m.namespace("b"),
        "match": lambda w: w.m.match(pack(w.key)),
        "extend": lambda w: w.m.extend([w.row], [36]),
        "advance": lambda w: w.m.advance([w.row], [35]),
        "commit": lambda w: w.m.commit([w.row], pack(w.key)),
        "abort": lambda w: w.m.abort([w.other]),
        "evict": lambda w: w.m.evict(1),
    }
    same = {name for name, call in calls.items() if not _changes_state(call)}
    assert same == {"namespace"}  # "b" stands


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


def run_decode_step(decode: DecodeStep, rows: Any) -> None:
    with decode.running(rows):
        decode.before_forward()
        decode.after_forward()


def started(m: KVCacheManager, keys: list[list[int]], length: int | None = None) -> Any:
    """Rows that have computed their keys, or `length` tokens of each."""
    rows = m.admit(m.match(pack(*[key[:0] for key in keys])))
    m.extend(rows, [length or len(key) for key in keys])
    m.advance(rows)
    return rows


# -- receipts: below the manager, which never gets one wrong ---------------------------------------


@pytest.mark.parametrize("call", ["unlock", "release_swa"])
@pytest.mark.parametrize(
    "wrong",
    ["released", "twice", "of another generation", "negative", "out of range", "of a free lock"],
)
def test_a_wrong_receipt_changes_nothing(wrong: str, call: str) -> None:
    w = World("cpu", False)
    tree = w.m.tree
    good, other = (int(w.m.rows.receipts[row]) for row in (w.row, w.other))
    released = int(w.m.rows.receipts[w.in_namespace])
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


# -- a closed manager ------------------------------------------------------------------------------

CLOSED: dict[str, Callable[[World], Any]] = {
    **{call: lambda w, m=make: m(w, [w.row]) for call, make in WITH_ROWS.items()},
    "pools": lambda w: w.m.pools,
    "capacity": lambda w: w.m.capacity(),
    "stats": lambda w: w.m.stats(),
    "check": lambda w: w.m.check(),
    "namespace": lambda w: w.m.namespace("b"),
    "drop_namespace": lambda w: w.m.drop_namespace(w.ns_cached),
    "match": lambda w: w.m.match(pack([1])),
    "admit": lambda w: w.m.admit(w.found, [0]),
    "evict": lambda w: w.m.evict(1),
    "flush": lambda w: w.m.flush(),
    "translate": lambda w: w.m.translate(w.one),
    "views.page_table": lambda w: w.m.views.page_table([w.row]),
    "decode step, made": lambda w: DecodeStep(w.m),
    "decode step, warmed up": lambda w: w.decode.warm_up(),
}
# of what belongs to a manager, not its methods
CLOSED_PARTS = {"views.page_table", "decode step", "decode step, made", "decode step, warmed up"}


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
