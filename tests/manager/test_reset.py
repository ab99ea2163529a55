"""Broken for good, reset, copies of time: what stands after a decode step that failed, and after reset()."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from by_hand import ByHand, run_of
from exact_world import World, pack, tokens
from instruments.fakedev import NAME, accelerator, no_host_sync

from kvcache import (
    BrokenError,
    ClosedError,
    ConcurrentCallError,
    DecodeStep,
    InvalidInputError,
    KeyBatch,
    ReceiptError,
    StaleMatchError,
)

KEY = run_of(1, 30)

BODIES: dict[str, Callable[[DecodeStep], None]] = {
    "raises before anything": lambda step: _fail(),
    "raises after half a step": lambda step: (step.before_forward(), _fail())[0],
    "runs nothing": lambda step: None,
    "runs half a step": lambda step: step.before_forward(),
    "runs twice": lambda step: _twice(lambda: _run(step)),
    "replays twice": lambda step: _twice(step.replayed),
}


def _fail() -> None:
    raise RuntimeError("the forward failed")


def _twice(call: Callable[[], None]) -> None:
    call()
    call()


def _run(step: DecodeStep) -> None:
    step.before_forward()
    step.after_forward()


def broken(body: str) -> tuple[ByHand, int, DecodeStep]:
    cache = ByHand(4, 8)
    row = cache.start(KEY)
    cache.compute(row, 20)
    cache.commit(row, KEY)
    step = DecodeStep(cache.m, ("page_table",))
    step.warm_up()
    with pytest.raises((RuntimeError, BrokenError)), step.running([row]):
        BODIES[body](step)
    return cache, row, step


@pytest.mark.parametrize("body", BODIES)
def test_after_a_body_that_failed_every_call_is_refused_until_reset(body: str) -> None:
    cache, row, step = broken(body)
    m = cache.m
    for call in (
        lambda: m.abort([row]),
        lambda: m.match(KeyBatch.pack([KEY])),
        lambda: m.extend([row], [24]),
        lambda: m.evict(1),
        lambda: m.flush(),
        lambda: m.capacity(),
        lambda: m.stats(),
        lambda: m.check(),
        lambda: m.namespace("a"),
        lambda: m.views.page_table([row]),
        lambda: step.warm_up(),
        lambda: step.running([row]).__enter__(),
    ):
        with pytest.raises(BrokenError, match=r"call reset\(\)"):
            call()
    m.reset()
    m.check()
    assert cache.match(KEY) == (0, 0, None)
    row = cache.start(KEY)
    cache.compute(row, 20)
    with step.running([row]):
        _run(step)
    m.check()
    cache.finish(row, KEY)
    cache.drain()


def test_a_broken_manager_can_be_closed() -> None:
    cache, _, _ = broken("runs nothing")
    cache.m.close()
    with pytest.raises(ClosedError):
        cache.m.reset()


@pytest.mark.parametrize("device", ["cpu", NAME])
def test_reset_ends_all_rows_and_frees_all_pages_on_host_and_device(device: str) -> None:
    """No kernel is run on the fake accelerator: nothing but reset itself makes its memory right."""
    with accelerator(run_kernels=False):
        _reset_frees_everything(World(device, False))


def _reset_frees_everything(w: World) -> None:
    m = w.m
    keys = pack(tokens(1, 33), tokens(2, 33), tokens(1, 33))
    row, ns = w.row, w.ns_cached
    stale = m.match(keys, [m.namespace(None), m.namespace(None), ns])
    assert stale.reuse_len.tolist() == [32, 32, 12]
    with no_host_sync() as seen:
        m.reset()
    assert (seen.uploads, seen.pinned) == (0, 0)
    m.check()
    stats = m.stats()
    assert (stats.full_pages_free, stats.swa_pages_free) == (
        m.config.full_pages,
        m.config.swa_pages,
    )
    assert stats.running_rows == stats.nodes == stats.locked_full_pages == 0
    with pytest.raises(ReceiptError):
        m.abort([row])
    assert m.match(keys).full_hit_len.tolist() == [0, 0, 0]
    assert m.match(keys, ns).full_hit_len.tolist() == [0, 0, 0], "the namespace's handle stands"
    for i in range(3):
        with pytest.raises(StaleMatchError):
            m.admit(stale, [i])


def test_a_handle_from_before_a_reset_never_reaches_the_request_that_has_its_row_now() -> None:
    cache = ByHand(4, 8)
    before = [cache.start(KEY), cache.start(run_of(2, 30))]
    cache.m.reset()
    after = [cache.start(KEY), cache.start(run_of(2, 30))]
    assert cache.m.index(after).tolist() == [0, 1]
    assert not set(before) & set(after)
    for row in before:
        with pytest.raises(ReceiptError, match="has ended"):
            cache.m.extend([row], [20])
    cache.compute(after[0], 20)
    cache.drain()


def test_reset_leaves_page_ids_as_in_a_new_cache() -> None:
    """Replicas that reset at the same point stay equal, to each other and to a new one."""
    caches = [ByHand(4, 8), ByHand(4, 8)]
    for n in range(3):
        caches[0].put(run_of(n, 50))
    caches[0].start(run_of(1, 50))
    caches[0].m.reset()
    rows = [cache.start(KEY) for cache in caches]
    for cache, row in zip(caches, rows, strict=True):
        cache.compute(row, 30)
    assert caches[0].pages(rows[0]) == caches[1].pages(rows[1])


def test_a_device_match_after_reset_sees_the_empty_tree() -> None:
    import torch

    from kvcache import DeviceKeys

    cache = ByHand(4, 8)
    cache.put(KEY)
    keys = DeviceKeys(torch.tensor(KEY, dtype=torch.int32), [0], [len(KEY)])
    assert cache.m.match(keys, on="device").fetch().full_hit_len.tolist() == [28]
    cache.m.reset()
    assert cache.m.match(keys, on="device").fetch().full_hit_len.tolist() == [0]


def test_reset_in_the_body_of_a_step_is_refused() -> None:
    cache = ByHand(4, 8)
    row = cache.start(KEY)
    cache.compute(row, 20)
    step = DecodeStep(cache.m)
    with step.running([row]):
        _run(step)
        with pytest.raises(InvalidInputError, match=r"until DecodeStep\.running is left"):
            cache.m.reset()
    cache.m.check()


def test_a_second_thread_inside_is_noticed() -> None:
    cache = ByHand(4, 8)
    row = cache.start(KEY)
    found: list[Any] = []
    real = cache.m.tree.evict

    def slow(*args: Any) -> Any:
        def other() -> None:
            try:
                cache.m.abort([row])
            except Exception as error:
                found.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return real(*args)

    cache.m.tree.evict = slow  # type: ignore[method-assign]
    cache.m.evict(1)
    (error,) = found
    assert isinstance(error, ConcurrentCallError)
    cache.m.abort(np.array([row]))
    cache.m.check()


def test_a_call_that_raises_lets_the_next_one_in() -> None:
    cache = ByHand(4, 8)
    for _ in range(2):
        with pytest.raises(InvalidInputError):
            cache.m.evict(-1)
