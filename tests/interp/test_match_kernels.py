"""The kernels of the match on the device, interpreted: against the host's match, and under the sanitizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from instruments.kvsan import sanitize
from kernel_cases import assert_same, run
from match_cases import (
    bind_match_case,
    expected_bind,
    expected_match,
    expected_update,
    match_case,
    update_mirror_case,
)

SMALL = {"inserts": 12}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few entries: edges, pages and updates then take several rounds or programs."""
    for name, size in (
        ("match._BLOCK", 16),
        ("match._HASH_BLOCK", 8),
        ("bind_match._BLOCK", 8),
        ("update_mirror._BLOCK", 16),
    ):
        monkeypatch.setattr(f"kvcache.kernels.{name}", size)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("bigram", [False, True], ids=["tokens", "bigram"])
@pytest.mark.parametrize("page_size", [1, 4, 16, 48, 64, 256])
def test_match(page_size: int, bigram: bool, dtype: Any) -> None:
    case, grown = match_case(
        page_size,
        num=4,
        page_size=page_size,
        bigram=bigram,
        dtype=dtype,
        aligned=page_size % 3 == 0,
        key_pages=6,
        **SMALL,
    )
    assert_same(run(case), expected_match(case, grown))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("bigram", [False, True], ids=["tokens", "bigram"])
@pytest.mark.parametrize("keep_pages", [0, 1, 2, 5])
@pytest.mark.parametrize("page_size", [1, 3, 4, 16, 20])
def test_match_small_blocks(page_size: int, keep_pages: int, bigram: bool) -> None:
    for seed in range(2):
        case, grown = match_case(
            seed, num=5, page_size=page_size, keep_pages=keep_pages, bigram=bigram, **SMALL
        )
        assert_same(run(case), expected_match(case, grown))


@pytest.mark.usefixtures("small_blocks")
def test_match_while_the_table_grows() -> None:
    """Entries on two levels: those that were not moved yet are found, and misses end on the older level."""
    growing = 0
    for seed in range(24):
        case, grown = match_case(
            seed, num=5, page_size=4, inserts=4 + 3 * (seed % 12), num_slots=200, first_level=4
        )
        mask, base = case.scalars["old_mask"], case.scalars["old_base"]
        table = case.arrays["table"]
        assert table is not None
        growing += mask > 0 and bool(table[base : base + mask + 1, 1].any())
        assert_same(run(case), expected_match(case, grown))
    assert growing >= 4


@pytest.mark.usefixtures("small_blocks")
def test_match_in_a_crowded_table() -> None:
    """A table in which every slot is probed: the compare decides, not the tag's place."""
    case, grown = match_case(4, num=6, page_size=4, inserts=25, num_slots=200)
    table, records = case.arrays["table"], case.arrays["records"]
    assert table is not None
    assert records is not None
    filled = table[table[:, 1] != 0]
    order = np.random.default_rng(0).permutation(len(filled))
    size = 1 << len(filled).bit_length()
    crowded = np.zeros((size, 2), np.int32)
    for tag, node in filled[order]:
        slot = int(tag) & (size - 1)
        while crowded[slot, 1] != 0:
            slot = (slot + 1) & (size - 1)
        crowded[slot] = tag, node
    want = expected_match(case, grown)["results"]
    case.arrays["table"] = crowded
    case.scalars.update(table_mask=size - 1, table_base=0, old_mask=0)
    np.testing.assert_array_equal(run(case)["results"], want)


@pytest.mark.parametrize("bigram", [False, True], ids=["tokens", "bigram"])
def test_match_of_equal_tags(bigram: bool) -> None:
    """Entries that carry the tag of another child come first, so the probe goes on.

    They are siblings, whose tokens differ, and nodes that begin with the very same page: children of other
    nodes, or of the same root but with another first token.
    """
    case, grown = match_case(6, num=6, page_size=4, inserts=25, num_slots=200, bigram=bigram)
    want = expected_match(case, grown)["results"]
    table, records = case.arrays["table"], case.arrays["records"]
    assert table is not None
    tokens = case.arrays["tokens"]
    assert records is not None
    assert tokens is not None
    size = 8 * table.shape[0]
    entries = [(int(t), int(n)) for t, n in table if n != 0]
    siblings: dict[int, list[int]] = {}
    for _, node in entries:
        siblings.setdefault(int(records[node, 0]), []).append(node)
    first_pages = {node: tokens[4 * records[node, 1] :][:4].tolist() for _, node in entries}
    planted = np.zeros((size, 2), np.int32)
    num_strangers = 0
    for tag, node in entries:
        slot = int(tag) & (size - 1)
        others = [n for n in siblings[int(records[node, 0])] if n != node]
        strangers = [n for _, n in entries if first_pages[n] == first_pages[node] and n != node]
        num_strangers += len(strangers)
        strangers.sort(key=lambda n: records[n, 0] != records[node, 0])
        for other in [*strangers[:4], *others[:2], node]:
            while planted[slot, 1] != 0:
                slot = (slot + 1) & (size - 1)
            planted[slot] = tag, other
    assert num_strangers > 10
    case.arrays["table"] = planted
    case.scalars.update(table_mask=size - 1, table_base=0, old_mask=0)
    np.testing.assert_array_equal(run(case)["results"], want)


@pytest.mark.parametrize("num", [0, 1, 5])
@pytest.mark.parametrize("page_size", [1, 4, 48])
def test_bind(num: int, page_size: int) -> None:
    for seed in range(3):
        case = bind_match_case(seed, num=num, page_size=page_size, **SMALL)
        assert_same(run(case), expected_bind(case))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("key_pages", [7, 8, 9, 80])
def test_bind_small_blocks(key_pages: int) -> None:
    case = bind_match_case(
        key_pages, num=3, page_size=2, key_pages=key_pages, num_slots=300, inserts=6
    )
    assert_same(run(case), expected_bind(case))


@pytest.mark.parametrize("page_size", [1, 4, 48, 64])
@pytest.mark.parametrize(
    "num", [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (64, 256, 8), (65, 255, 11)], ids=str
)
def test_update(num: tuple[int, int, int], page_size: int) -> None:
    case = update_mirror_case(sum(num), num=num, page_size=page_size)
    assert_same(run(case), expected_update(case))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "mode",
    [{}, {"order": 1}, {"interleave": 1}],
    ids=["in_order", "shuffled", "interleaved"],
)
@pytest.mark.parametrize("bigram", [False, True], ids=["tokens", "bigram"])
def test_no_fault_and_the_same_result_in_any_order(bigram: bool, mode: dict[str, int]) -> None:
    case, grown = match_case(3, num=4, page_size=4, bigram=bigram, inserts=8)
    bind = bind_match_case(4, num=4, page_size=4, bigram=bigram, inserts=8)
    update = update_mirror_case(5, num=(9, 20, 9), page_size=4)
    with sanitize(**mode):
        got = run(case), run(bind), run(update)
    assert_same(got[0], expected_match(case, grown))
    assert_same(got[1], expected_bind(bind))
    assert_same(got[2], expected_update(update))


def test_the_cases_reach_every_outcome() -> None:
    seen = set()
    for seed in range(8):
        case, grown = match_case(seed, num=12, page_size=4, bigram=seed % 2 == 1)
        full, reuse, branch = expected_match(case, grown)["results"][:3]
        seen |= {("miss", bool(x)) for x in full == 0}
        seen |= {("fork", bool(x)) for x in branch > 0}
        seen |= {("window", bool(x)) for x in (reuse > 0) & (reuse < full)}
        seen |= {("whole key", bool(x)) for x in full >= case.arrays["lens"] // 4 * 4}
    assert len(seen) == 8
