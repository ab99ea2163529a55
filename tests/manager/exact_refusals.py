"""Calls that are refused: every call of the manager, with every kind of input that cannot be right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from exact_world import World, pack, run_decode_step

from kvcache import (
    CapacityError,
    InvalidInputError,
    KeyBatch,
    KVCacheManager,
    MatchBatch,
    Ragged,
    ReceiptError,
    StaleMatchError,
)
from kvcache.device.decode_step import DecodeStep
from kvcache.device.device_match import DeviceKeys
from kvcache.device.views import Views
from kvcache.policies.checkpoints import Every


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
    "a handle that wraps": (
        lambda w: [w.row, 2**64 + w.other],
        "rows must hold integers, got object",
    ),
    "a row twice": (lambda w: [w.row, w.other, w.row], r"rows\[2\] must be named once, got"),
}
_NEVER = r"rows\[1\] must be the handle of a running request, got .*: it was never given out"
BAD_HANDLES: dict[str, tuple[Callable[[World], Any], str]] = {
    "a negative handle": (lambda w: [w.row, -1], _NEVER),
    "an index": (lambda w: [w.row, 1], _NEVER),
    "a row past the last": (lambda w: [w.row, (1 << 32) + 6], _NEVER),
    "a row that no request has": (lambda w: [w.row, (1 << 32) + 5], _NEVER),
    "a generation to come": (lambda w: [w.row, w.other + 2**32], _NEVER),
    "an ended row": (lambda w: [w.row, w.ended], r"rows\[1\] .* has ended"),
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

    for _name, (_rows, _message) in BAD_HANDLES.items():
        refused(
            f"{_call}: rows: {_name}",
            lambda w, m=_make, r=_rows: m(w, r(w)),
            _message,
            ReceiptError,
        )

# -- namespaces, match, admit ----------------------------------------------------------------------

refused("namespace: too many", lambda w: w.m.namespace("c"), "max_namespaces", CapacityError)
refused(
    "namespaces: one too many",
    lambda w: w.m.namespaces(["b", "a", None, ("salt", 7)]),
    r"max_namespaces \(3, with the default one\) are in use, .* a further one: keys\[3\] = \('salt', 7\)",
    CapacityError,
)
refused("namespaces: letters", lambda w: w.m.namespaces("ab"), "must be a sequence of keys")
refused("namespaces: a number", lambda w: w.m.namespaces(7), "must be a sequence of keys, got 7")
refused(
    "namespaces: a list in it",
    lambda w: w.m.namespaces(["a", ["b"]]),
    r"keys\[1\] must be hashable, got \['b'\]",
)
refused("namespace: a list", lambda w: w.m.namespace(["a"]), r"key must be hashable, got \['a'\]")
refused(
    "namespace: a list in it",
    lambda w: w.m.namespace(("a", [1])),
    r"key must be hashable, got \('a', ",
)
for _name, _handle, _message in (
    ("unknown", lambda w: 2**40 + 12345, "must be the handle of a standing namespace"),
    ("negative", lambda w: -1, "must be the handle of a standing namespace, got -1"),
    ("1, as an adapter has", lambda w: 1, "must be the handle of a standing namespace, got 1"),
    ("7, as an adapter has", lambda w: 7, "must be the handle of a standing namespace, got 7"),
    (
        "of a record that was never used",
        lambda w: (1 << 32) + 60,
        "must be the handle of a standing namespace",
    ),
    ("of no int64", lambda w: 2**70, "must hold integers, got object"),
    ("dropped", lambda w: w.ns_dropped, "must be the handle of a standing namespace"),
    ("a float", lambda w: 1.0, r"must be 1-D, got shape \(\)"),
    ("a word", lambda w: "a", r"must be 1-D, got shape \(\)"),
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
refused(
    "match: previous of another manager",
    lambda w: w.m.match(pack([1], [2], [3]), previous=w.of_another),
    "previous must be of this manager, got a match of another one",
)
refused(
    "admit: of another manager",
    lambda w: w.m.admit(w.of_another, [0]),
    "batch must be of this manager, got a match of another one",
)
refused(
    "admit: of another manager, on the device",
    lambda w: w.m.admit(w.of_another_on_device, [0]),
    "batch must be of this manager, got a match of another one",
)
refused(
    "concatenate: of two managers",
    lambda w: MatchBatch.concatenate([w.found, w.of_another]),
    "batches must be of one manager, got several",
)
for _name, _index, _message in (
    ("a mask", [False, True, True], "index must hold integers, got bool"),
    ("floats", [0.5], "index must hold integers"),
    ("past it", [0, 3], r"index must be in \[0, 3\)"),
    ("negative", [-1], r"index must be in \[0, 3\)"),
    ("two dimensions", [[0]], "index must be 1-D"),
    ("a scalar", 0, "index must be 1-D"),
):
    refused(f"select: {_name}", lambda w, i=_index: w.found.select(i), _message)
refused("checkpoints: a length past int32", lambda w: Every(2**70), "tokens must be in")
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

for _name, _call, _message in (
    (
        "a KeyBatch",
        lambda w: w.m.match(pack([1]), on="device"),
        "keys must be a DeviceKeys, got KeyBatch",
    ),
    (
        "nowhere",
        lambda w: w.m.match(w.device_keys, on="gpu"),
        "on must be 'host' or 'device', got 'gpu'",
    ),
    ("on the host", lambda w: w.m.match(w.device_keys), "keys must be a KeyBatch, got DeviceKeys"),
    (
        "with a hint",
        lambda w: w.m.match(w.device_keys, previous=w.found, on="device"),
        "previous must be None for a match on the device",
    ),
    (
        "a dropped namespace",
        lambda w: w.m.match(w.device_keys, w.ns_dropped, on="device"),
        "must be the handle of a standing namespace",
    ),
    (
        "keys on another device",
        lambda w: w.m.match(
            DeviceKeys(torch.zeros(1, dtype=torch.int64, device="meta"), [0], [1]), on="device"
        ),
        "tokens must be on",
    ),
):
    refused(f"match on the device: {_name}", _call, _message)

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
refused(
    "decode step: slots below 0", lambda w: DecodeStep(w.m, max_slots=-1), "max_slots must be in"
)
refused(
    "decode step: slots of a word",
    lambda w: DecodeStep(w.m, max_slots="x"),
    "max_slots must be an int",
)
refused("views: slots below 0", lambda w: Views(w.m, max_slots=-1), "max_slots must be in")
refused(
    "decode step: of no manager", lambda w: DecodeStep(3), "cache must be a KVCacheManager, got int"
)
refused("pack: a number", lambda w: KeyBatch.pack(5), "keys must be a list, got int")
refused(
    "pack: hints of a number", lambda w: Ragged.pack([5]), r"lists\[0\] must be a list, got int"
)
refused(
    "concatenate: a number",
    lambda w: MatchBatch.concatenate([3]),
    r"batches\[0\] must be a MatchBatch",
)
refused(
    "a manager of no config", lambda w: KVCacheManager(3), "config must be a CacheConfig, got int"
)
for _device in ("tpu", "cuda:99", "", None):
    refused(
        f"config: device {_device!r}",
        lambda w, d=_device: replace(w.m.config, device=d),
        f"device must be .* got {_device!r}",
    )
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
