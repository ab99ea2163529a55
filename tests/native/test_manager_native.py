"""A manager whose kernels run natively against one on the CPU twins, call by call.

On the fake accelerator, so that every call is watched besides: it neither waits nor costs more than it may.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from instruments.fakedev import NAME, FakeGraph, accelerator, no_host_sync
from operation_log import CONFIGS, assert_same, digests, record, replay, replay_watched
from scheduler_calls import LENGTH, Scene

from kvcache import KeyBatch

# every lane is unrolled on the CPU, so the blocks are smaller than on a GPU
BLOCKS = {
    "extend._BLOCK": 32,
    "step._BLOCK": 32,
    "advance._BLOCK": 32,
    "slide._BLOCK_ROWS": 16,
    "slide._BLOCK_PAGES": 4,
    "apply._BLOCK": 32,
}
CALLS = 400


@pytest.fixture(autouse=True, scope="module")
def native() -> Iterator[None]:
    from instruments.cpu_driver import CpuDriver
    from instruments.recording import driven_by

    with pytest.MonkeyPatch.context() as patch, driven_by(CpuDriver()):
        for name, size in BLOCKS.items():
            patch.setattr(f"kvcache.kernels.{name}", size)
        yield


@pytest.mark.parametrize("name", CONFIGS)
def test_kernels_and_twins_come_to_the_same_state(name: str) -> None:
    log = record(f"native/{name}", CONFIGS[name], CALLS)
    assert_same(log, replay_watched(log, lag=2), replay(log))


def serve(scene: Scene) -> None:
    """A whole batch comes, decodes, shares, is evicted and goes."""
    m, keys = scene.manager, scene.keys()
    rows = scene.running(keys)
    m.commit(rows, keys, scene.hints())
    for _ in range(6):
        m.step(rows)
        m.advance(rows)
        m.slide(rows)
    m.finish(rows, scene.keys(LENGTH + 6))
    again = scene.keys(family=1, common=LENGTH - 8)
    more = scene.running(again)
    m.finish(more[::2], half_of_the_keys(scene))
    m.abort(more[1::2])
    m.evict(scene.batch, scene.batch // 2)
    new = scene.keys(family=2, common=0)
    m.commit(scene.running(new), new)


def half_of_the_keys(scene: Scene) -> KeyBatch:
    keys = scene.keys(family=1, common=LENGTH - 8)
    return KeyBatch(keys.tokens, keys.starts[::2], keys.lens[::2])


@pytest.mark.parametrize("batch", [1, 7, 256])
def test_a_batch_is_served_alike_by_kernels_and_twins(batch: int) -> None:
    twins = Scene(batch, "cpu", pages=10)
    serve(twins)
    twins.manager.check()
    with accelerator(lag=3):
        kernels = Scene(batch, NAME, pages=10)
        with no_host_sync() as seen:
            serve(kernels)
        assert digests(kernels.manager) == digests(twins.manager)
        kernels.manager.check()
    assert seen.launches.total() == twins.manager.stats().launches
    assert np.all(twins.manager.rows.frontier >= 0)


def test_a_captured_step_does_what_the_call_did() -> None:
    """Launches are replayed with their tensors; DecodeStep is what an engine would capture."""
    with accelerator():
        captured, eager = Scene(7, NAME), Scene(7, NAME)
        rows = captured.running(captured.keys())
        assert rows.tolist() == eager.running(eager.keys()).tolist()

        def step(scene: Scene) -> None:
            scene.manager.step(rows)
            scene.manager.advance(rows)
            scene.manager.slide(rows)

        step(captured)
        graph = FakeGraph()
        with graph.capture(stream=0) as seen:
            step(captured)
        assert seen.launches == {"_step_kernel": 1, "_advance_kernel": 1, "_slide_kernel": 1}
        assert seen.ops == {}
        for _ in range(9):
            graph.replay()
        for _ in range(11):
            step(eager)
        for name, tensor in vars(eager.manager.pools).items():
            assert torch.equal(getattr(captured.manager.pools, name), tensor), name
        assert eager.manager.pools.row_state[0, 0].item() == LENGTH + 11
