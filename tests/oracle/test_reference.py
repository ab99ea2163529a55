"""The oracle itself: small scenes of ../shared/faults.md, with the right outcome written out."""

from __future__ import annotations

from typing import Any

import pytest
from reference_scene import Scene, letters, run_of

from kvcache.errors import (
    CapacityError,
    IntegrityError,
    InvalidInputError,
    ReceiptError,
    StaleMatchError,
)
from kvcache.oracle.manager import Disagreement
from kvcache.oracle.state import check_rules

# ownership


def test_an_adopted_window_moves_under_the_trees_full_page() -> None:  # D01
    scene = Scene()
    a, b = run_of(1, 33), run_of(1, 25)
    scene.serve(a)
    assert scene.live(a) == "ttttttLL"
    scene.start(0, b)
    scene.compute(0, 25)
    tree_pages = set(scene.oracle.state().tree)
    mine = scene.oracle.rows[0].own[:6]
    free_before = set(scene.oracle.free_full)
    scene.commit(0, b)
    assert scene.live(a) == "ttttLLLL"
    path = scene.oracle.rows[0].path
    assert {page.full_id for page in path} <= tree_pages
    assert [page.swa_id for page in path[4:]] == [swa_id for _, swa_id in mine[4:]]
    assert scene.oracle.free_full == free_before | {full_id for full_id, _ in mine}
    state = scene.oracle.state()
    assert not any(full_id in state.swa_map for full_id, _ in mine)
    scene.finish(0, b)
    scene.assert_empty()


@pytest.mark.parametrize(("drafted", "accepted"), [(14, 11), (12, 11), (16, 12), (16, 10)])
def test_rejected_draft_pages_go_back_once(drafted: int, accepted: int) -> None:  # D02
    scene = Scene()
    key = run_of(1, 16)
    scene.start(0, key[:9])
    scene.chunk(0, key, 10)
    scene.oracle.extend([0], [drafted], scene.take)
    scene.oracle.advance([0], [accepted])
    assert scene.finish(0, key) == accepted // 4 * 4
    assert len(scene.oracle.free_full) == 64 - accepted // 4
    scene.assert_empty()


def test_slid_pages_become_tombstones_and_are_not_counted_live() -> None:  # D05
    scene = Scene()
    key = run_of(1, 33)
    scene.start(0, key)
    scene.compute(0, 33)
    assert scene.slide(0) == 24
    scene.commit(0, key)
    assert scene.live(key) == "ttttttLL"
    assert scene.match(key) == (32, 32, -1)
    scene.finish(0, key)
    assert scene.oracle.unlocked() == (8, 2)


def test_a_recomputed_window_is_adopted_below_anothers_lock() -> None:  # D06
    scene = Scene()
    key = run_of(1, 20)
    scene.start(0, key[:16])
    scene.chunk(0, key, 17)
    scene.compute(0, 29)  # 29 tokens: the frontier reaches 20, the lock on [8, 16) goes early
    scene.slide(0)
    scene.evict(swa=2)
    assert scene.live(key) == "tttt"
    row0 = [page.full_id for page in scene.oracle.rows[0].path]
    scene.start(1, key)
    scene.compute(1, 21)
    assert scene.slide(1) == 12
    scene.commit(1, key)
    assert scene.match(key) == (20, 20, -1)
    assert scene.live(key) == "tttLL"
    assert [page.full_id for page in scene.oracle.rows[0].path] == row0
    assert [page.full_id for page in scene.oracle.rows[1].path[:4]] == row0
    scene.finish(1, key)
    scene.finish(0, [*key[:16], *run_of(2, 13)])
    scene.assert_empty()


def test_full_pages_outside_the_window_are_kept() -> None:  # D07
    scene = Scene(window=4)
    key = run_of(1, 17)
    scene.serve(key)
    scene.evict(swa=1)  # the leaf's window: the leaf goes with it, the tombstones above it too
    assert scene.match(key) == (0, 0, -1)
    scene.start(0, [*key, *run_of(2, 4)])
    scene.chunk(0, [*key, *run_of(2, 4)], 17)
    scene.compute(0, 21)
    scene.slide(0)  # the SWA lock on [12, 16) is let go
    scene.evict(swa=1)
    assert scene.match(key) == (16, 0, 16)


def test_the_second_of_two_equal_prefills_names_the_firsts_pages() -> None:  # D08
    scene = Scene()
    key = run_of(1, 16)
    scene.start(0, key)
    scene.start(1, key)
    scene.compute(0, 16)
    scene.compute(1, 16)
    second = [full_id for full_id, _ in scene.oracle.rows[1].own]
    assert scene.oracle.commit([0, 1], [key, key], [[], []]) == [(16, 0), (16, 16)]
    scene.oracle.check()
    state = scene.oracle.state()
    assert state.rows[1].pages == state.rows[0].pages
    assert set(second) <= state.free_full


def test_two_owners_are_seen_where_sums_balance() -> None:  # D09
    scene = Scene()
    scene.start(0, run_of(1, 8))
    scene.start(1, run_of(2, 8))
    scene.compute(0, 8)
    scene.compute(1, 8)
    lost = scene.oracle.rows[1].own[0]
    scene.oracle.rows[1].own[0] = scene.oracle.rows[0].own[0]
    assert len(scene.oracle.free_full) == 60  # the sum is right
    with pytest.raises(IntegrityError, match="Full pages with two owners"):
        scene.oracle.check()
    scene.oracle.rows[1].own[0] = lost
    scene.oracle.check()


def test_swa_pressure_evicts_no_full_page() -> None:  # D11
    scene = Scene(window=4, swa_pages=8)
    key, more = run_of(1, 16), run_of(2, 12)
    scene.serve(key, chunks=(4, 8, 12))
    scene.serve([*key[:8], *run_of(3, 4)])  # the branch keeps [0, 8) an inner path
    assert scene.live(key) == "LLLL"
    assert scene.evict(swa=2) == (0, 2)
    assert scene.match(key)[0] == 16
    scene.serve(more)


def test_a_commit_with_nothing_new_changes_nothing() -> None:  # D13
    scene = Scene()
    key = run_of(1, 18)
    scene.start(0, key)
    scene.chunk(0, key, 18)
    before = scene.oracle.state()
    assert scene.commit(0, key) == 16
    assert scene.oracle.state() == before


def test_only_computed_tokens_are_committed() -> None:  # D14, D16
    scene = Scene()
    key = run_of(1, 32)
    scene.start(0, key)
    scene.chunk(0, key, 16)
    scene.oracle.extend([0], [32], scene.take)
    assert scene.oracle.retract([0], [key], [[]])[0].full_hit == 16
    scene.oracle.check()
    assert scene.match(key) == (16, 16, -1)
    scene.assert_empty()


# frontier, alignment, bigram keys


@pytest.mark.parametrize("length", range(19, 24))
def test_a_page_larger_than_the_window_keeps_its_page(length: int) -> None:  # D17
    scene = Scene(page_size=8, window=2)
    key = run_of(1, length)
    scene.start(0, key)
    scene.compute(0, length)
    assert scene.slide(0) == 8
    assert scene.commit(0, key) == 16
    assert scene.live(key) == "tL"
    assert scene.match(key) == (16, 16, -1)


def test_the_frontier_of_a_page_twice_the_window() -> None:  # D17, second part
    scene = Scene(page_size=256, window=128, max_len=1024)
    assert (scene.oracle.frontier(712), scene.oracle.end(712)) == (256, 512)


def test_a_window_that_is_no_multiple_of_the_page_is_kept_whole() -> None:  # D18
    scene = Scene(window=6)
    key = run_of(1, 27)
    scene.start(0, key)
    scene.compute(0, 27)
    assert scene.slide(0) == 16
    assert scene.commit(0, key) == 24
    assert scene.match(key) == (24, 24, -1)


@pytest.mark.parametrize("page_size", [1, 3, 4, 8, 64, 256])
@pytest.mark.parametrize("window", [1, 2, 6, 8, 13, 64])
def test_sliding_never_loses_the_commits_window(
    page_size: int, window: int
) -> None:  # D18, widened
    for length in range(page_size, page_size * 3 + window + 2, max(1, page_size // 4)):
        scene = Scene(page_size=page_size, window=window, full_pages=512, swa_pages=512)
        scene.oracle.max_len = length
        key = run_of(1, length)
        scene.start(0, key)
        scene.compute(0, length)
        scene.slide(0)
        end = length // page_size * page_size
        assert scene.commit(0, key) == end
        assert scene.match(key) == (end, end, -1)


def test_bigram_keys_keep_a_page_more_of_the_tail() -> None:  # D19
    scene = Scene(window=7, bigram=True)
    key = run_of(1, 32)
    scene.start(0, key)
    scene.compute(0, 32)
    assert scene.slide(0) == 20
    assert scene.commit(0, key) == 28
    assert scene.match(key) == (28, 28, -1)
    assert scene.live(key) == "tttttLL"


@pytest.mark.parametrize(("tokens", "cached"), [(0, 0), (1, 0), (64, 0), (65, 64), (128, 64)])
def test_short_bigram_keys(tokens: int, cached: int) -> None:  # D20
    scene = Scene(page_size=64, window=64, bigram=True)
    key = run_of(1, tokens)
    scene.start(0, key)
    assert scene.chunk(0, key, tokens) == cached
    assert scene.match(key)[0] == cached


@pytest.mark.parametrize(("bigram", "hit"), [(False, 4), (True, 3)])
def test_a_bigram_unit_depends_on_the_token_after_it(bigram: bool, hit: int) -> None:  # D21
    scene = Scene(page_size=1, window=None, swa_pages=0, bigram=bigram)
    scene.serve(letters("abcde"))
    assert scene.match(letters("abcdf"))[0] == hit


def test_a_tombstone_breaks_a_run_of_live_pages() -> None:  # D22
    scene = Scene()
    key = run_of(1, 20)
    scene.serve(key)
    for page, is_live in zip(scene.find(key).path, [1, 1, 0, 1, 0], strict=True):
        scene.oracle.drop_swa(page)
        if is_live:
            page.swa_id = min(scene.oracle.free_swa)
            scene.oracle.free_swa.remove(page.swa_id)
    assert scene.live(key) == "LLtLt"
    assert scene.match(key) == (20, 8, 20)


def test_nothing_in_the_window_of_the_computed_tokens_is_freed() -> None:  # D26
    scene = Scene()
    key = run_of(1, 40)
    scene.start(0, key)
    for computed, frontier in [(16, 4), (17, 8), (32, 20), (33, 24), (36, 24), (37, 28), (40, 28)]:
        scene.compute(0, computed)
        assert scene.slide(0) == frontier
        assert frontier <= computed - 8


def test_window_slack_keeps_one_token_less() -> None:
    scene = Scene(window=9, window_slack=1)
    key = run_of(1, 33)
    scene.start(0, key)
    scene.compute(0, 33)
    assert scene.slide(0) == 24


# admission, refusals, namespaces


def test_a_match_goes_stale_with_what_it_would_reuse() -> None:
    scene = Scene()
    key = run_of(1, 16)
    scene.serve(key)
    found = scene.find(key)
    scene.evict(full=1)
    before = scene.oracle.state()
    with pytest.raises(StaleMatchError):
        scene.oracle.admit([found], [0])
    assert scene.oracle.state() == before


def test_extend_refuses_whole() -> None:
    scene = Scene(full_pages=8, swa_pages=6)
    scene.serve(run_of(1, 16))
    scene.start(0, run_of(2, 20))
    scene.start(1, run_of(3, 20))
    before = scene.oracle.state()
    with pytest.raises(CapacityError):
        scene.oracle.extend([0, 1], [12, 16], scene.take)
    assert scene.oracle.state() == before
    scene.oracle.extend([0, 1], [12, 12], scene.take)
    scene.oracle.check()


def test_step_takes_a_page_where_one_begins() -> None:
    scene = Scene()
    key = run_of(1, 16)
    scene.start(0, key)
    scene.compute(0, 7)
    held = []
    for _ in range(3):
        scene.oracle.step([0], scene.take)
        scene.oracle.advance([0])
        held.append((scene.oracle.rows[0].computed, len(scene.oracle.rows[0].own)))
    assert held == [(8, 2), (9, 3), (10, 3)]


def test_namespaces_share_nothing() -> None:  # D59
    scene = Scene()
    scene.oracle.namespace("other", 1)
    key = run_of(1, 16)
    scene.serve(key)
    assert scene.find(key, namespace=1).full_hit == 0
    scene.start(0, key, namespace=1)
    scene.chunk(0, key, 16)
    with pytest.raises(InvalidInputError):
        scene.oracle.drop_namespace(1)
    scene.finish(0, key)
    scene.oracle.drop_namespace(1)
    scene.oracle.check()
    assert scene.match(key)[0] == 16
    assert len(scene.oracle.free_full) == 60


@pytest.mark.parametrize(
    "call",
    [
        lambda o, take: o.extend([0], [3], take),  # below computed
        lambda o, take: o.extend([0], [257], take),
        lambda o, take: o.extend([0, 0], [8, 8], take),
        lambda o, take: o.extend([3], [8], take),
        lambda o, take: o.step([5], take),
        lambda o, take: o.advance([0], [13]),
        lambda o, take: o.advance([0], [7]),
        lambda o, take: o.commit([0], [run_of(9, 16)], [[]]),  # not the row's prefix
        lambda o, take: o.finish([0, 0], [run_of(1, 12)] * 2, [[], []]),
        lambda o, take: o.slide([1]),
        lambda o, take: o.match([(9, [1])]),
    ],
)
def test_a_refused_call_changes_nothing(call: Any) -> None:
    scene = Scene()
    key = run_of(1, 16)
    scene.start(0, key)
    scene.chunk(0, key, 8)
    scene.oracle.extend([0], [12], scene.take)
    before = scene.oracle.state()
    with pytest.raises((InvalidInputError, ReceiptError)):
        call(scene.oracle, scene.take)
    assert scene.oracle.state() == before


def test_a_page_that_was_not_free_is_reported() -> None:
    scene = Scene()
    scene.start(0, run_of(1, 8))
    scene.start(1, run_of(2, 8))
    scene.compute(0, 4)
    held = scene.oracle.rows[0].own[0]
    with pytest.raises(Disagreement, match="row 1 got a free page, not"):
        scene.oracle.extend([1], [4], lambda row, page: held)


def test_the_rules_see_a_map_entry_of_a_free_page() -> None:
    scene = Scene()
    scene.serve(run_of(1, 8))
    state = scene.oracle.state()
    state.swa_map[min(state.free_full)] = 1
    with pytest.raises(IntegrityError, match="a free Full page has no map entry"):
        check_rules(state, scene.oracle.all_full, scene.oracle.all_swa, 4)
