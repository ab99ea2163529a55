"""A captured decode step, replayed over a long life, is the same as eager calls; on the fake accelerator.

The kernels run natively on the CPU; the capture freezes pointers, grids and host numbers as a CUDA graph
does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from decode_life import Decode, DecodeLife, eager, state_of
from instruments.fakedev import FakeGraph, accelerator, no_host_sync

from kvcache import CacheConfig, IntegrityError, InvalidInputError, KeyBatch, KVCacheManager
from kvcache.device.decode_step import DecodeStep

BLOCKS = {
    "extend._BLOCK": 16,
    "step._BLOCK": 16,
    "advance._BLOCK": 16,
    "slide._BLOCK_ROWS": 16,
    "slide._BLOCK_PAGES": 4,
    "apply._BLOCK": 16,
    "fill_table._BLOCK": 32,
    "fill_indices._BLOCK": 32,
    "fill_indices._BLOCK_ROWS": 16,
    "decode_step._BLOCK": 16,
    "decode_slide._BLOCK_ROWS": 16,
    "decode_slide._BLOCK_PAGES": 4,
}
VIEWS = (
    "page_table",
    "swa_page_table",
    "full_indices",
    "swa_indices",
    "token_slots",
    "swa_token_slots",
)


@pytest.fixture(autouse=True, scope="module")
def fake_accelerator() -> Iterator[None]:
    from instruments.cpu_driver import CpuDriver
    from instruments.recording import driven_by

    with pytest.MonkeyPatch.context() as patch, driven_by(CpuDriver()), accelerator(lag=3):
        for name, size in BLOCKS.items():
            patch.setattr(f"kvcache.kernels.{name}", size)
        yield


def config(device: str, **changes: Any) -> CacheConfig:
    sizes: dict[str, Any] = {
        "page_size": 4,
        "window": 10,
        "full_pages": 120,
        "swa_pages": 60,
        "max_rows": 20,
        "max_len": 96,
    }
    return CacheConfig(**{**sizes, **changes}, device=device)


class Replayed:
    """Decode by replaying one captured graph."""

    def __init__(self, cache: KVCacheManager, views: tuple[str, ...]) -> None:
        self.graph = FakeGraph()
        self.step = DecodeStep(cache, views)
        self.step.warm_up()
        with self.graph.capture():
            self.step.before_forward()
            self.step.after_forward()
        # the capture ran the step for no rows, which changes nothing

    def __call__(self, cache: KVCacheManager, rows: list[int]) -> None:
        uploads = cache.stats().uploads
        same = getattr(self, "rows", None) == rows
        with no_host_sync() as seen, self.step.running(rows):
            self.step.replay(self.graph)
        self.rows = list(rows)
        self.free_uploads = same and cache.stats().uploads == uploads
        assert not seen.pinned


def check_views(step: DecodeStep, cache: KVCacheManager, rows: list[int], twin: Any) -> None:
    """Compare the views of a step in lanes of rows with views that the twin filled eagerly before it."""
    n, lanes = len(rows), step.num_lanes
    for name, got in step.views.items():
        want = twin[name]
        for field, line, eager_line in zip(got._fields, got, want, strict=True):
            a, b = torch.tensor(line.tolist()), eager_line
            if field == "page_table":
                assert torch.equal(a[:n, : b.shape[1]], b), name
                assert not a[n:].any(), name
                assert not a[:, b.shape[1] :].any(), name
            elif field == "indices":
                assert torch.equal(a[: b.numel()], b), name
            elif field == "indptr":
                assert torch.equal(a[: n + 1], b), name
                assert (a[n:] == b[-1]).all(), name
            else:
                assert torch.equal(a[:n], b), f"{name}.{field}"
                assert not a[n:lanes].any(), f"{name}.{field}"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"page_size": 1, "window": 3, "full_pages": 300, "swa_pages": 100},
        {"bigram": True, "window_slack": 1, "page_size": 8, "window": 20},
        {"window": None, "swa_pages": 0},
    ],
    ids=["page4", "page1", "bigram", "full_only"],
)
def test_replay_is_the_same_as_eager_over_a_long_life(changes: dict[str, Any]) -> None:
    views = VIEWS if not changes else VIEWS[:2]
    if "window" in changes and changes["window"] is None:
        views = ("page_table", "full_indices")
    seen: dict[str, Any] = {}

    def eager_with_views(cache: KVCacheManager) -> Decode:
        def decode(cache: KVCacheManager, rows: list[int]) -> None:
            cache.step(rows)
            # clones: what a view holds is overwritten by the next one
            seen.update({v: [x.clone() for x in getattr(cache.views, v)(rows)] for v in views})
            cache.advance(rows)
            cache.slide(rows)

        return decode

    replayed = DecodeLife(7, config("kvdev", **changes), lambda c: Replayed(c, views))
    plain = DecodeLife(7, config("cpu", **changes), eager_with_views)
    kept_batch = 0
    for i in range(1500):
        steps = plain.steps
        kinds = replayed.act(), plain.act()
        assert kinds[0] == kinds[1]
        assert replayed.batch == plain.batch
        if plain.steps > steps:
            step = replayed.decode.step  # type: ignore[attr-defined]
            if i % 10 == 0:
                check_views(step, replayed.cache, plain.batch, seen)
            kept_batch += replayed.decode.free_uploads  # type: ignore[attr-defined]
        if i % 10 == 0 or kinds[0] != "decode":
            assert state_of(replayed.cache) == state_of(plain.cache)
    replayed.decode.step.check_error()  # type: ignore[attr-defined]
    replayed.cache.check()
    assert plain.steps > 900
    assert plain.changes > 100
    assert kept_batch > 200, "steps of an unchanged batch upload nothing"


def test_a_step_is_at_most_four_launches_and_nothing_else() -> None:
    cache = KVCacheManager(config("kvdev"))
    decode = Replayed(cache, ("page_table", "swa_page_table"))
    assert decode.graph.seen.launches == {
        "_decode_step_kernel": 1,
        "_fill_table_kernel": 2,
        "_decode_slide_kernel": 1,
    }
    assert not decode.graph.seen.uploads
    assert not [op for op in decode.graph.seen.ops if op not in ("aten.slice", "aten.view")]


def test_the_instrument_sees_a_batch_that_is_baked_in() -> None:
    """The eager `step`, captured, steps as many rows as there were at its capture."""
    life = DecodeLife(1, config("kvdev"), eager)
    while len(life.batch) < 3:
        life.act()
    rows = life.batch
    graph = FakeGraph()
    with graph.capture(stream=0):
        life.cache.step(rows[:2])
    life.cache.advance(rows)
    graph.replay()
    computed, allocated, *_ = life.cache.pools.row_state.tolist()
    grown = [allocated[i] - computed[i] for i in life.cache.index(rows)]
    assert grown == [1, 1] + [0] * (len(rows) - 2)


def test_a_step_outside_of_running_ends_in_an_error_word_not_in_a_bad_page() -> None:
    life = DecodeLife(3, config("kvdev", full_pages=30, swa_pages=12), eager)
    while len(life.batch) < 2:
        life.act()
    step = DecodeStep(life.cache, ())
    rows = life.batch
    with step.running(rows):
        step.before_forward()
        step.after_forward()
    step.check_error()
    for _ in range(200):
        step.before_forward()
        step.after_forward()
    # the pages ran out or a row came to its end; nothing was popped below 0, no page has two owners
    with pytest.raises(IntegrityError, match="a decode step stopped at row"):
        step.check_error()
    pools = life.cache.pools
    tops = pools.tops.tolist()
    assert min(tops) >= 0
    held = [
        page
        for i in life.cache.index(rows)
        for page in pools.page_table.tolist()[i][: -(-pools.row_state.tolist()[1][i] // 4)]
    ]
    free = pools.full_stack.tolist()[: tops[0]]
    assert not set(held) & set(free)
    assert max(map(held.count, held)) <= len(rows)


def test_refuses_what_cannot_run() -> None:
    cache = KVCacheManager(config("cpu", max_rows=4))
    tokens = torch.arange(40, dtype=torch.int32).numpy()
    rows = cache.admit(cache.match(KeyBatch(tokens, [0, 0], [20, 30])))
    cache.extend(rows, [20, 30])
    cache.advance(rows)
    with pytest.raises(InvalidInputError, match="views must be of"):
        DecodeStep(cache, ("pages",))
    with pytest.raises(InvalidInputError, match=r"num_lanes must be in \[1, 4\]"):
        DecodeStep(cache, num_lanes=5)
    narrow = DecodeStep(cache, num_lanes=1)
    with (
        pytest.raises(InvalidInputError, match=r"at most num_lanes \(1\), got 2"),
        narrow.running(rows),
    ):
        pass
    small = DecodeStep(cache, ("token_slots",), max_slots=51)
    before = state_of(cache)
    with (
        pytest.raises(InvalidInputError, match=r"at most 51 entries \(max_slots\), got 52"),
        small.running(rows),
    ):
        pass
    assert state_of(cache) == before
