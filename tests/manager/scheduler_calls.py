"""Every call of the scheduler API, on a batch of any size, brought to where it does its characteristic work.

Shared by the tests that count what a call costs and by perf/launches.py, which prints it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kvcache import CacheConfig, Hints, KeyBatch, KVCacheManager, MatchBatch, Ragged
from kvcache.device.decode_step import DecodeStep
from kvcache.device.device_match import DeviceKeys
from kvcache.policies.checkpoints import Branch

PAGE_SIZE = 4
WINDOW = 8  # two pages
LENGTH = 24  # tokens of a request: six pages
PAGES = LENGTH // PAGE_SIZE
Thunk = Callable[[], Any]


class Scene:
    """A manager and requests of a batch.

    Args:
        batch: requests.
        device: where the page ids live.
        pages: Full (and SWA) pages for each request of the batch.
    """

    def __init__(self, batch: int, device: str, pages: int = 4 * PAGES) -> None:
        self.batch = batch
        self.manager = KVCacheManager(
            CacheConfig(
                page_size=PAGE_SIZE,
                window=WINDOW,
                full_pages=pages * batch,
                swa_pages=pages * batch,
                max_rows=2 * batch,
                max_len=64,
                checkpoints=(Branch(), Hints()),
                max_namespaces=batch + 1,
                device=device,
            )
        )

    def keys(self, length: int = LENGTH, family: int = 0, common: int = LENGTH) -> KeyBatch:
        """A key of `length` tokens for each request; beyond `common` tokens families differ."""
        tokens = np.tile(np.arange(length, dtype=np.int32), (self.batch, 1))
        tokens[:, 0] = 1000 + np.arange(self.batch)
        tokens[:, common:] += 100 * family
        if common == 0:
            tokens[:, 0] += 1_000_000 * family
        return KeyBatch(tokens.reshape(-1), np.arange(self.batch) * length, [length] * self.batch)

    def hints(self) -> Ragged:
        """A checkpoint at half the length for each request."""
        return Ragged([LENGTH // 2] * self.batch, np.arange(self.batch + 1))

    def match(self, keys: KeyBatch, namespace: Any = None) -> MatchBatch:
        return self.manager.match(keys, namespace)

    def lens(self, length: int) -> list[int]:
        return [length] * self.batch

    def started(self, keys: KeyBatch, namespace: Any = None) -> Any:
        """Rows of requests that were admitted and have no pages of their own."""
        return self.manager.admit(self.match(keys, namespace))

    def running(self, keys: KeyBatch, length: int = LENGTH, namespace: Any = None) -> Any:
        """Rows of requests that have computed `length` tokens."""
        rows = self.started(keys, namespace)
        self.manager.extend(rows, self.lens(length))
        self.manager.advance(rows)
        return rows

    def cached(self, keys: KeyBatch, namespace: Any = None) -> None:
        """Requests that have come and gone: their last three pages are live, the others tombstones."""
        self.manager.finish(self.running(keys, namespace=namespace), keys)


def _match(scene: Scene) -> Thunk:
    keys = scene.keys()
    scene.cached(keys)
    return lambda: scene.manager.match(keys)


def _match_again(scene: Scene) -> Thunk:
    keys = scene.keys()
    scene.cached(keys)
    before = scene.match(scene.keys(LENGTH // 2))
    return lambda: scene.manager.match(keys, previous=before)


def _on_device(scene: Scene, keys: KeyBatch) -> DeviceKeys:
    """The keys as tokens that are on the device; makes the tree's copy there."""
    tokens = torch.from_numpy(keys.tokens.copy()).to(scene.manager.config.device)
    there = DeviceKeys(tokens, keys.starts, keys.lens)
    scene.manager.match(there, on="device")
    return there


def _match_on_device(scene: Scene) -> Thunk:
    scene.cached(scene.keys())
    keys = _on_device(scene, scene.keys())
    return lambda: scene.manager.match(keys, on="device")


def _match_on_device_changed(scene: Scene) -> Thunk:
    keys = _on_device(scene, scene.keys())
    scene.cached(scene.keys())
    return lambda: scene.manager.match(keys, on="device")


def _admit_from_device(scene: Scene) -> Thunk:
    scene.cached(scene.keys())
    found = scene.manager.match(_on_device(scene, scene.keys()), on="device")
    # what the kernel leaves; it may not run here
    found.results.copy_(torch.from_numpy(scene.match(scene.keys()).results))
    found.fetch()
    return lambda: scene.manager.admit(found)


def _namespace(scene: Scene) -> Thunk:
    return lambda: scene.manager.namespace("adapter")


def _all_in_use(scene: Scene) -> None:
    """As many namespaces as there may be, each with something cached and no row."""
    scene.cached(scene.keys(), scene.manager.namespaces(range(scene.batch)))


def _namespace_all_in_use(scene: Scene) -> Thunk:
    _all_in_use(scene)
    return lambda: scene.manager.namespace("adapter")


def _namespaces_all_in_use(scene: Scene) -> Thunk:
    _all_in_use(scene)
    names = [("salt", i) for i in range(scene.batch)]
    return lambda: scene.manager.namespaces(names)


def _admit(scene: Scene) -> Thunk:
    found = scene.match(scene.keys())
    return lambda: scene.manager.admit(found)


def _admit_hit(scene: Scene) -> Thunk:
    scene.cached(scene.keys())
    found = scene.match(scene.keys())
    return lambda: scene.manager.admit(found)


def _admit_as_many(scene: Scene) -> Thunk:
    scene.cached(scene.keys())
    found = scene.match(scene.keys())
    return lambda: scene.manager.admit_as_many(found, scene.lens(LENGTH + PAGE_SIZE))


def _index(scene: Scene) -> Thunk:
    rows = scene.running(scene.keys())
    return lambda: scene.manager.index(rows)


def _capacity(scene: Scene) -> Thunk:
    scene.running(scene.keys())
    return scene.manager.capacity


def _stats(scene: Scene) -> Thunk:
    scene.running(scene.keys())
    return scene.manager.stats


def _extend(scene: Scene) -> Thunk:
    rows, lens = scene.started(scene.keys()), scene.lens(LENGTH)
    return lambda: scene.manager.extend(rows, lens)


def _extend_evicting(scene: Scene) -> Thunk:
    scene.cached(scene.keys())
    rows, lens = scene.started(scene.keys(family=1, common=0)), scene.lens(LENGTH)
    return lambda: scene.manager.extend(rows, lens)


def _step_same_rows(scene: Scene) -> Thunk:
    rows = scene.running(scene.keys())
    return lambda: scene.manager.step(rows)


def _step_other_rows(scene: Scene) -> Thunk:
    rows = scene.running(scene.keys())
    scene.manager.advance(scene.started(scene.keys(family=1, common=0)))
    return lambda: scene.manager.step(rows)


def _step_same_rows_evicting(scene: Scene) -> Thunk:
    scene.cached(scene.keys())
    rows = scene.running(scene.keys(family=1, common=0), length=PAGE_SIZE)
    return lambda: scene.manager.step(rows)


def _step_other_rows_evicting(scene: Scene) -> Thunk:
    scene.cached(scene.keys())
    rows = scene.running(scene.keys(family=1, common=0), length=PAGE_SIZE)
    scene.manager.advance(scene.started(scene.keys(family=2, common=0)))
    return lambda: scene.manager.step(rows)


def _advance(scene: Scene) -> Thunk:
    rows = scene.running(scene.keys())
    scene.manager.step(rows)
    return lambda: scene.manager.advance(rows)


def _advance_other_rows(scene: Scene) -> Thunk:
    rows = scene.started(scene.keys())
    scene.manager.extend(rows, scene.lens(LENGTH))
    return lambda: scene.manager.advance(rows)


def _advance_lens(scene: Scene) -> Thunk:
    rows, lens = scene.started(scene.keys()), scene.lens(LENGTH - 3)
    scene.manager.extend(rows, scene.lens(LENGTH))
    return lambda: scene.manager.advance(rows, lens)


def _commit_new(scene: Scene) -> Thunk:
    keys, hints = scene.keys(), scene.hints()
    rows = scene.running(keys)
    return lambda: scene.manager.commit(rows, keys, hints)


def _commit_known(scene: Scene) -> Thunk:
    keys = scene.keys()
    first, second = scene.started(keys), scene.started(keys)
    for rows in (first, second):
        scene.manager.extend(rows, scene.lens(LENGTH))
        scene.manager.advance(rows)
    scene.manager.finish(first, keys)
    return lambda: scene.manager.commit(second, keys)


def _commit_adopting(scene: Scene) -> Thunk:
    scene.cached(scene.keys())
    keys = scene.keys(family=1, common=LENGTH - WINDOW)
    rows = scene.running(keys)
    return lambda: scene.manager.commit(rows, keys)


def _commit_nothing(scene: Scene) -> Thunk:
    keys = scene.keys()
    rows = scene.running(keys)
    scene.manager.commit(rows, keys)
    return lambda: scene.manager.commit(rows, keys)


def _slide_same_rows(scene: Scene) -> Thunk:
    rows = scene.running(scene.keys())
    return lambda: scene.manager.slide(rows)


def _slide_other_rows(scene: Scene) -> Thunk:
    rows = scene.running(scene.keys())
    scene.manager.advance(scene.started(scene.keys(family=1, common=0)))
    return lambda: scene.manager.slide(rows)


def _ending(call: str) -> Callable[[Scene], Thunk]:
    def prepare(scene: Scene) -> Thunk:
        keys = scene.keys()
        rows = scene.running(keys)
        return lambda: getattr(scene.manager, call)(rows, keys)

    return prepare


def _abort(scene: Scene) -> Thunk:
    rows = scene.running(scene.keys())
    return lambda: scene.manager.abort(rows)


def _evict(scene: Scene) -> Thunk:
    scene.cached(scene.keys())
    return lambda: scene.manager.evict(PAGES * scene.batch // 2, 0)


def _evict_windows(scene: Scene) -> Thunk:
    rows = scene.running(scene.keys())
    scene.manager.commit(rows, scene.keys(), scene.hints())
    scene.manager.abort(rows)
    return lambda: scene.manager.evict(0, scene.batch)


def _evict_nothing(scene: Scene) -> Thunk:
    scene.running(scene.keys())
    return lambda: scene.manager.evict(3, 3)


def _flush(scene: Scene) -> Thunk:
    scene.cached(scene.keys())
    return scene.manager.flush


def _drop_namespace(scene: Scene) -> Thunk:
    handle = scene.manager.namespace("adapter")
    scene.cached(scene.keys(), handle)
    return lambda: scene.manager.drop_namespace(handle)


def _translate(scene: Scene) -> Thunk:
    slots = torch.zeros(scene.batch, LENGTH, dtype=torch.int64, device=scene.manager.config.device)
    out = torch.zeros_like(slots)
    return lambda: scene.manager.translate(slots, out=out)


def _view(name: str, *, other_rows: bool = False, lens: bool = False) -> Callable[[Scene], Thunk]:
    """A view, whose buffers are made at its first call."""

    def prepare(scene: Scene) -> Thunk:
        rows = scene.running(scene.keys())
        given = (scene.lens(LENGTH),) if lens else ()
        getattr(scene.manager.views, name)(rows, *given)
        if other_rows:
            scene.manager.advance(scene.started(scene.keys(family=1, common=0)))
        return lambda: getattr(scene.manager.views, name)(rows, *given)

    return prepare


def _decode_step(scene: Scene, other_rows: bool = False) -> Thunk:
    step = DecodeStep(scene.manager)
    step.warm_up()
    rows = scene.running(scene.keys())
    if other_rows:
        scene.manager.advance(scene.started(scene.keys(family=1, common=0)))

    def make() -> None:
        with step.running(rows):
            step.before_forward()
            step.after_forward()

    return make


# pages for each request of the batch where the pool must be full
_TIGHT = {
    "extend, evicting": PAGES + 1,
    "step, same rows, evicting": PAGES + 1,
    "step, other rows, evicting": PAGES + 1,
}
CALLS: dict[str, Callable[[Scene], Thunk]] = {
    "namespace": _namespace,
    "namespace, all in use": _namespace_all_in_use,
    "namespaces, all in use": _namespaces_all_in_use,
    "match": _match,
    "match, with a previous match": _match_again,
    "match on the device": _match_on_device,
    "match on the device, the tree changed": _match_on_device_changed,
    "admit, nothing cached": _admit,
    "admit, all cached": _admit_hit,
    "admit, matched on the device": _admit_from_device,
    "index": _index,
    "capacity": _capacity,
    "admit_as_many": _admit_as_many,
    "stats": _stats,
    "extend": _extend,
    "extend, evicting": _extend_evicting,
    "step, same rows": _step_same_rows,
    "step, other rows": _step_other_rows,
    "step, same rows, evicting": _step_same_rows_evicting,
    "step, other rows, evicting": _step_other_rows_evicting,
    "advance, same rows": _advance,
    "advance, other rows": _advance_other_rows,
    "advance, to given lengths": _advance_lens,
    "commit, all new": _commit_new,
    "commit, all known": _commit_known,
    "commit, adopting": _commit_adopting,
    "commit, nothing to do": _commit_nothing,
    "slide, same rows": _slide_same_rows,
    "slide, other rows": _slide_other_rows,
    "finish": _ending("finish"),
    "retract": _ending("retract"),
    "abort": _abort,
    "evict": _evict,
    "evict, windows": _evict_windows,
    "evict, nothing": _evict_nothing,
    "flush": _flush,
    "drop_namespace": _drop_namespace,
    "translate": _translate,
    "swa_page_table, same rows": _view("swa_page_table"),
    "swa_page_table, other rows": _view("swa_page_table", other_rows=True),
    "swa_page_table, to given lengths": _view("swa_page_table", lens=True),
    "swa_indices": _view("swa_indices"),
    "views.page_table": _view("page_table"),
    "views.full_indices": _view("full_indices"),
    "views.token_slots": _view("token_slots"),
    "views.swa_token_slots": _view("swa_token_slots"),
    "decode step with two views, same rows": _decode_step,
    "decode step with two views, other rows": lambda scene: _decode_step(scene, other_rows=True),
}


def prepared(call: str, batch: int, device: str) -> tuple[KVCacheManager, Thunk]:
    """Bring a manager to where `call` can be made; return both."""
    scene = Scene(batch, device, pages=_TIGHT.get(call, 4 * PAGES))
    return scene.manager, CALLS[call](scene)
