"""The oracle itself: forks, order of eviction, locks; scenes of ../shared/faults.md."""

from __future__ import annotations

from typing import Any

import pytest
from reference_scene import Scene, run_of

from kvcache.errors import ReceiptError

# branching, hit rate, order of eviction


def test_a_fork_before_the_tail_is_won_back_by_the_branch_policy() -> None:  # D28
    scene = Scene(branch=True)
    a = run_of(1, 41)
    scene.serve(a, chunks=(17, 33), slide=True)
    assert scene.live(a) == "ttLLttLLLL"
    b, c = [*a[:26], *run_of(2, 15)], [*a[:26], *run_of(3, 15)]
    assert scene.match(b) == (24, 16, 24)
    scene.serve(b, slide=True)
    assert scene.match(c) == (24, 24, -1)


def test_without_the_branch_policy_every_fork_pays_again() -> None:  # D28
    scene = Scene()
    a = run_of(1, 41)
    scene.serve(a, chunks=(17, 33), slide=True)
    b, c = [*a[:26], *run_of(2, 15)], [*a[:26], *run_of(3, 15)]
    scene.serve(b, slide=True)
    assert scene.match(c) == (24, 16, 24)


@pytest.mark.parametrize(
    ("policy", "hints", "kept"),
    [
        ({}, [20], "ttttttttLL"),
        ({"hints": True}, [20], "tttLLtttLL"),
        ({"hints": True}, [23, 4, 0, 41], "LttLLtttLL"),
        ({"every": 12}, [], "tLLtLLtLLL"),
        ({"every": 6}, [], "LLLLLLLLLL"),
        ({"every": 18}, [], "ttLLtttLLL"),
        ({"hints": True, "every": 32}, [12], "tLLtttLLLL"),
    ],
)
def test_checkpoints_keep_their_windows(
    policy: dict[str, Any], hints: list[int], kept: str
) -> None:
    scene = Scene(**policy)
    key = run_of(1, 41)
    scene.start(0, key)
    scene.chunk(0, key, 41, hints)
    assert scene.live(key) == kept


def test_a_window_that_has_begun_to_slide_out_is_not_kept() -> None:
    scene = Scene(hints=True)
    key = run_of(1, 41)
    scene.start(0, key)
    scene.compute(0, 29)
    assert scene.slide(0) == 20
    scene.compute(0, 41)
    scene.commit(0, key, [24, 32])  # of [16, 24) only [20, 24) is left; [24, 32) is whole
    assert scene.live(key) == "ttttttLLLL"


def test_early_windows_go_before_what_was_used_later() -> None:  # D30
    scene = Scene()
    a, c = run_of(1, 81), run_of(2, 9)
    scene.serve(a, chunks=tuple(range(9, 81, 8)))
    scene.serve(c)
    scene.match(c, touch=True)
    scene.match(a, touch=True)
    scene.match(a, touch=True)
    assert scene.evict(swa=2) == (0, 2)
    assert scene.live(a) == "tt" + "L" * 18
    assert scene.match(c) == (8, 8, -1)


def test_a_hit_refreshes_the_swa_order() -> None:  # D31
    scene = Scene()
    a, b = run_of(1, 17), run_of(2, 17)
    scene.serve(a)
    scene.serve(b)
    scene.match(a, touch=True)
    assert scene.evict(swa=2) == (4, 2)  # with its window the leaf goes, and the tombstones above
    assert scene.match(a) == (16, 16, -1)
    assert scene.match(b) == (0, 0, -1)


def test_deleting_a_leaf_leaves_no_tombstone_leaf() -> None:  # D31, second part
    scene = Scene()
    a = run_of(1, 33)
    scene.serve(a)
    assert scene.live(a) == "ttttttLL"
    assert scene.evict(full=1) == (8, 2)
    assert scene.match(a) == (0, 0, -1)


def test_deleting_a_leaf_stops_at_a_window() -> None:
    scene = Scene()
    a = run_of(1, 33)
    scene.serve(a, chunks=(17,))
    assert scene.live(a) == "ttLLttLL"
    assert scene.evict(full=1) == (4, 2)
    assert scene.match(a) == (16, 16, -1)


def test_every_session_hits_its_old_prefix_in_a_large_pool() -> None:  # D32
    scene = Scene(full_pages=8 * 12 * 4, swa_pages=8 * 2 * 4)
    sessions = [run_of(i, 49) for i in range(8)]
    for key in sessions:
        scene.serve(key, chunks=(17, 33), slide=True)
    for i, key in enumerate(sessions):
        assert scene.serve([*key, *run_of(100 + i, 5)], slide=True).reuse == 48


def test_a_partial_hit_refreshes_only_what_it_matched() -> None:  # D33
    scene = Scene()
    a, c = run_of(1, 17), run_of(2, 9)
    scene.serve(a, chunks=(9,))
    scene.serve(c)
    scene.match(a[:8], touch=True)
    assert scene.evict(full=2) == (2, 2)
    assert scene.match(a) == (8, 8, -1)
    assert scene.match(c) == (8, 8, -1)


def test_a_read_counts_and_so_does_a_birth() -> None:  # D35
    scene = Scene(window=None, swa_pages=0)
    y, x = run_of(1, 4), run_of(2, 4)
    scene.serve(y)
    scene.match(y, touch=True)
    scene.serve(x)
    scene.evict(full=1)
    assert (scene.match(y)[0], scene.match(x)[0]) == (0, 4)


def test_an_inner_page_outlives_its_children() -> None:
    scene = Scene(window=None, swa_pages=0)
    stem = run_of(1, 4)
    a, b = [*stem, *run_of(2, 4)], [*stem, *run_of(3, 4)]
    scene.serve(a)
    scene.serve(b)
    assert scene.evict(full=1) == (1, 0)
    assert (scene.match(a)[0], scene.match(b)[0]) == (4, 8)
    assert scene.evict(full=2) == (2, 0)
    scene.assert_empty()


# locks


def test_two_locks_on_one_path_are_counted_apart() -> None:  # D42
    scene = Scene()
    key = run_of(1, 65)
    scene.serve(key, chunks=(33,))
    scene.start(0, key)
    scene.start(1, key[:32])
    swa_locks = [page.swa_locks for page in scene.oracle.rows[0].path]
    assert swa_locks == [0] * 6 + [1, 1] + [0] * 6 + [1, 1]
    path = scene.oracle.rows[0].path
    scene.oracle.abort([0])
    scene.oracle.check()
    assert [page.swa_locks for page in path] == [0] * 6 + [1, 1] + [0] * 8
    assert [page.full_locks for page in path] == [1] * 8 + [0] * 8
    with pytest.raises(ReceiptError):
        scene.oracle.abort([0])
    assert [page.full_locks for page in path] == [1] * 8 + [0] * 8


def test_releasing_early_releases_once() -> None:  # D46
    scene = Scene()
    key = run_of(1, 97)
    scene.serve(key[:65])
    scene.start(0, key)
    path = [*scene.oracle.rows[0].path]
    scene.compute(0, 81)
    assert scene.slide(0) == 72
    assert [page.swa_locks for page in path] == [0] * 16
    assert [page.full_locks for page in path] == [1] * 16
    scene.commit(0, key)
    scene.compute(0, 97)
    scene.finish(0, key)
    assert {page.full_locks for _, page in scene.oracle.pages()} == {0}
    assert {page.swa_locks for _, page in scene.oracle.pages()} == {0}


def test_a_lock_pins_one_window_of_a_long_path() -> None:  # D47
    scene = Scene(full_pages=300, swa_pages=300, max_len=1024, every=8)
    key = run_of(1, 1024)
    scene.serve(key)
    scene.start(0, key)
    assert scene.oracle.state().counts["locked_swa_pages"] == 2
    assert scene.oracle.unlocked() == (0, 254)
