"""One device and one stream for all that a cache launches: anything else is refused, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from instruments.fakedev import NAME, FakeGraph, accelerator, no_host_sync, on
from scheduler_calls import CALLS, Scene, prepared
from snapshot import changes, snapshot

from kvcache import CacheConfig, DecodeStep, InvalidInputError, KeyBatch, KVCacheManager
from kvcache.device.staging import Staging

# calls that only read what the host knows
HOST_ONLY = {
    "namespace",
    "match",
    "match, with a previous match",
    "capacity",
    "admit_as_many",
    "index",
    "stats",
}
OTHER_DEVICE = f"current device must be {NAME}:1, where the cache is, got {NAME}:0"
OTHER_STREAM = r"stream must be that of the cache's first launch \(0x3\), got 0x5"


@pytest.fixture(autouse=True)
def fake_accelerator() -> Iterator[None]:
    with accelerator(run_kernels=False):
        yield


def cache_on(device: str) -> KVCacheManager:
    sizes = {"full_pages": 64, "swa_pages": 64, "max_rows": 4, "max_len": 64}
    return KVCacheManager(CacheConfig(page_size=4, window=8, device=device, **sizes))


def keys() -> KeyBatch:
    return KeyBatch(np.arange(20, dtype=np.int32), [0], [19])


@pytest.mark.parametrize(
    ("device", "stream", "message"),
    [(0, 0, OTHER_DEVICE), (0, 3, OTHER_DEVICE), (1, 5, OTHER_STREAM)],
    ids=["other_device", "other_device_same_stream", "other_stream"],
)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_elsewhere_is_refused_and_changes_nothing(
    call: str, device: int, stream: int, message: str
) -> None:
    with on(1, stream=3):
        manager, make = prepared(call, 2, f"{NAME}:1")
        manager.evict()  # so that this stream is the first one, whatever the call
        before = snapshot(manager)
        if call not in HOST_ONLY:
            with on(device, stream), no_host_sync() as seen:
                with pytest.raises(InvalidInputError, match=message):
                    make()
                assert not seen.ops
                assert not seen.launches
            assert changes(before, snapshot(manager)) == []
            make()  # where it belongs it is good
    if call in HOST_ONLY:
        with on(device, stream):
            make()


def test_the_first_launch_decides_on_the_stream_not_what_the_host_did_before() -> None:
    cache = cache_on(f"{NAME}:1")
    with on(1, stream=4):
        cache.namespace("adapter")
        batch = cache.match(keys())
        cache.capacity()
    with on(1, stream=6):
        rows = cache.admit(batch)
    with on(1, stream=4), pytest.raises(InvalidInputError, match=r"\(0x6\), got 0x4"):
        cache.extend(rows, [20])


def test_the_first_launch_is_refused_on_another_device() -> None:
    cache = cache_on(f"{NAME}:1")
    batch = cache.match(keys())
    with pytest.raises(InvalidInputError, match=OTHER_DEVICE):
        cache.admit(batch)
    with on(1):
        cache.admit(batch)


def test_a_device_without_an_index_is_the_one_that_was_current_at_construction() -> None:
    with on(1):
        cache = cache_on(NAME)
    assert cache.config.device == f"{NAME}:1"
    assert str(cache.pools.tops.device) == f"{NAME}:1"
    batch = cache.match(keys())
    with pytest.raises(InvalidInputError, match=OTHER_DEVICE):
        cache.admit(batch)


def test_two_caches_have_a_device_and_a_stream_each() -> None:
    first, second = cache_on(f"{NAME}:0"), cache_on(f"{NAME}:1")
    for _ in range(2):
        with on(0, stream=1):
            first.abort(first.admit(first.match(keys())))
        with on(1, stream=2):
            second.abort(second.admit(second.match(keys())))


def test_a_cpu_cache_asks_for_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> tuple[int, int]:
        raise AssertionError("a device was asked for")

    monkeypatch.setattr("kvcache.device.stream.current", never)
    cache = cache_on("cpu")
    rows = cache.admit(cache.match(keys()))
    cache.extend(rows, [20])
    cache.abort(rows)


# -- results that are copied to the host -------------------------------------------------------------------


def test_a_match_is_not_fetched_from_another_stream() -> None:
    """The copy would not wait for the match."""
    with on(1, stream=3):
        manager, make = prepared("match on the device", 2, f"{NAME}:1")
        found = make()
        with on(1, stream=5), pytest.raises(InvalidInputError, match=OTHER_STREAM):
            found.prefetch()
        with on(1, stream=5), pytest.raises(InvalidInputError, match=OTHER_STREAM):
            manager.admit(found)
        found.prefetch()
    with on(1, stream=5):
        found.wait()  # it is only waited for


# -- graphs ------------------------------------------------------------------------------------------------


def test_a_step_is_captured_on_the_stream_of_the_capture() -> None:
    scene = Scene(2, f"{NAME}:1")
    with on(1, stream=3):
        rows = scene.running(scene.keys())
        decode = DecodeStep(scene.manager)
        decode.warm_up()
        graph = FakeGraph()
        with graph.capture(stream=9):
            decode.before_forward()
            decode.after_forward()
        assert graph.seen.launches.total() == 4
        with decode.running(rows):
            decode.replayed()  # by a runner of the engine's own
    with on(1, stream=9):  # the same stream without a capture
        with pytest.raises(InvalidInputError, match=r"\(0x3\), got 0x9"):
            decode.before_forward()
        with pytest.raises(InvalidInputError, match=r"\(0x3\), got 0x9"):
            decode.after_forward()


def test_a_capture_is_not_the_first_launch() -> None:
    with on(1, stream=3):
        cache = cache_on(f"{NAME}:1")
        decode = DecodeStep(cache)
        with FakeGraph().capture(stream=9):
            decode.before_forward()
            decode.after_forward()
        cache.admit(cache.match(keys()))


def test_a_capture_on_another_device_is_refused() -> None:
    with on(1, stream=3):
        decode = DecodeStep(cache_on(f"{NAME}:1"))
    with FakeGraph().capture(), pytest.raises(InvalidInputError, match=OTHER_DEVICE):
        decode.before_forward()


def test_other_calls_are_refused_in_a_capture() -> None:
    """A graph would repeat their uploads and grids."""
    scene = Scene(2, f"{NAME}:0")
    rows = scene.running(scene.keys())
    with FakeGraph().capture(), pytest.raises(InvalidInputError, match="current stream must be"):
        scene.manager.step(rows)


# -- why -----------------------------------------------------------------------------------------------------


def test_with_another_device_current_a_buffer_would_be_written_during_its_copy() -> None:
    """Its event is recorded on the current device, and is done there at once."""
    with accelerator(run_kernels=False, lag=3):
        with on(1):
            staging = Staging(f"{NAME}:1", 64)

        def send(value: int) -> None:
            staging.begin()
            where = staging.part(1)
            staging.host_part(where)[:] = value
            staging.upload()

        with on(1):
            for i in range(5):
                send(i)
        send(6)
        with pytest.raises(AssertionError, match="pinned memory was written"):
            send(7)
