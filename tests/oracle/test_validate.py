"""`kvcache validate`: it finds nothing in the manager, and it finds what is planted."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

import pytest

from kvcache import rows
from kvcache.device import data_plane, plan
from kvcache.errors import IntegrityError, InvalidInputError
from kvcache.kernels import layout
from kvcache.tree import ranges
from kvcache.tree.radix_tree import RadixTree
from kvcache.validate import Driver, Failure, run
from kvcache.validate.bad_calls import BAD_CALLS
from kvcache.validate.cli import add_parser
from kvcache.validate.program import Program
from kvcache.validate.run import _LEGEND, _REFUSED, failure_of, random_program
from kvcache.validate.shrink import shrink

SIZES = {"page_size": 4, "window": 8, "full_pages": 32, "swa_pages": 24}
SIZES |= {"max_rows": 3, "max_len": 64}


def test_random_programs_find_nothing() -> None:
    lines: list[str] = []
    assert run(600, 0, programs=25, say=lines.append) == 0, "\n".join(lines)
    counts = [re.match(r"\s*(\S.*?)\s+(\d+)(\s|$)", line) for line in lines[1:]]
    seen = {count[1]: int(count[2]) for count in counts if count}
    rare = ("adopted", "branch_points", "early_releases", "evicted_full", "evicted_swa")
    rare += ("repointed", "retractions", "stored", "tombstoned", "trimmed")
    assert not [name for name in rare if seen[name] == 0]
    for refusal in ("admit StaleMatchError", "extend CapacityError", "step CapacityError"):
        assert any(line.strip().startswith(refusal) for line in lines)


@pytest.mark.parametrize("kind", BAD_CALLS)
def test_a_malformed_call_is_refused_and_changes_nothing(kind: str) -> None:
    driver = Driver(**SIZES)
    driver.match("m", [[None, list(range(20)), 16]])
    driver.admit("m", [0], ["r"])
    driver.extend(["r"], [16])
    driver.bad(kind)
    assert driver.refusals["bad InvalidInputError"] == 1


# planted faults: each must be found within a few programs


def narrow_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frontier keeps a token less than a window, on host and device alike."""
    host, device = rows.slide_rows, data_plane.slide_twin

    def slide_rows(state: Any, receipts: Any, row: Any, size: int, keep: int, *rest: Any) -> Any:
        return host(state, receipts, row, size, keep - 1, *rest)

    def slide_twin(*args: Any) -> None:
        device(*args[:-2], args[-2] - 1, args[-1])

    monkeypatch.setattr(rows, "slide_rows", slide_rows)
    monkeypatch.setattr(data_plane, "slide_twin", slide_twin)


def map_not_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sliding frees SWA pages and leaves their map entries."""
    original = data_plane.slide_twin

    def slide_twin(row: Any, page_table: Any, swa_map: Any, *rest: Any) -> None:
        before = swa_map.copy()
        original(row, page_table, swa_map, *rest)
        swa_map[:] = before

    monkeypatch.setattr(data_plane, "slide_twin", slide_twin)


def window_not_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recomputed window is freed, Full and SWA, instead of moving under the tree's pages."""
    original = plan.fill_plan

    def fill_plan(found: Any, *rest: Any) -> Any:
        found = found.copy()
        found[found[:, ranges.KIND] == ranges.ADOPT, ranges.KIND] = ranges.FREE_ROW_SWA
        return original(found, *rest)

    monkeypatch.setattr(plan, "fill_plan", fill_plan)


def row_not_repointed(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a commit the row still names its own freed copies (faults D08)."""
    original = plan.fill_plan

    def fill_plan(found: Any, *rest: Any) -> Any:
        kinds = found[:, ranges.KIND]
        if (kinds != ranges.BIND).any():  # no admission: that binds, and does nothing else
            found = found[kinds != ranges.BIND]
        return original(found, *rest)

    monkeypatch.setattr(plan, "fill_plan", fill_plan)


def hit_not_refreshed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A match does not count as a use (faults D31)."""
    original = RadixTree.match

    def match(self: RadixTree, *args: Any, touch: bool = True) -> Any:
        return original(self, *args, touch=False)

    monkeypatch.setattr(RadixTree, "match", match)


def swa_lock_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SWA lock is not let go when the window leaves the prefix."""
    monkeypatch.setattr(RadixTree, "release_swa", lambda self, receipts: None)


def unlock_forgets_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several rows that end together the last stays locked."""
    original = RadixTree.unlock

    def unlock(self: RadixTree, receipts: Any) -> None:
        original(self, receipts[: max(1, receipts.size - 1)])

    monkeypatch.setattr(RadixTree, "unlock", unlock)


def swa_not_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eviction asks for Full pages only (faults D11)."""
    original = RadixTree.evict
    monkeypatch.setattr(RadixTree, "evict", lambda self, full, swa: original(self, full, 0))


def branch_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint at the fork is not kept."""
    from kvcache.tree import insert

    original = RadixTree.insert

    def without(self: RadixTree, keys: Any, requests: Any, *rest: Any) -> Any:
        requests[:, insert.BRANCH_AT] = -1
        return original(self, keys, requests, *rest)

    monkeypatch.setattr(RadixTree, "insert", without)


MUTANTS = [
    narrow_window,
    map_not_cleared,
    window_not_adopted,
    row_not_repointed,
    hit_not_refreshed,
    swa_lock_kept,
    unlock_forgets_the_last,
    swa_not_evicted,
    branch_forgotten,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_planted_fault_is_found(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    assert any(random_program(f"0/{number}").failure for number in range(60))


def test_a_failure_shrinks_to_a_script_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    map_not_cleared(monkeypatch)
    lines: list[str] = []
    assert run(600, 0, programs=60, say=lines.append) == 1
    script = lines[-1]
    calls = [line for line in script.splitlines() if line.startswith("d.")]
    # match, admit, extend, advance, slide
    assert len(calls) <= 6, script
    with pytest.raises((Failure, IntegrityError)):
        exec(compile(script, "script", "exec"), {})
    monkeypatch.undo()
    exec(compile(script, "script", "exec"), {})  # and it is silent once the fault is mended


# the parts


def test_shrinking_deletes_and_simplifies() -> None:
    program = Program(
        {"branch": True, "page_size": 4},
        [
            ("match", ["m1", [[None, [1, 2, 3, 4], 4], ["a", [5, 6], 1]], None, True]),
            ("evict", [3, 17]),
            ("flush", []),
            ("evict", [0, 1]),
        ],
    )

    def fails(candidate: Program) -> bool:
        large = any(name == "evict" and args[1] >= 5 for name, args in candidate.ops)
        return large and candidate.config["page_size"] == 4

    shortest = shrink(program, fails)
    assert shortest.ops == [("evict", [0, 5])]
    assert shortest.config == {"branch": False, "page_size": 4}
    assert shortest.script("why") == (
        "from kvcache.validate import Driver\n\n# why\n"
        "d = Driver(branch=False, page_size=4)\nd.evict(0, 5)\n"
    )


def test_a_program_is_a_function_of_its_seed() -> None:
    first, second = random_program("5/1"), random_program("5/1")
    assert first.program == second.program
    assert first.coverage == second.coverage
    assert failure_of(first.program) is None
    assert random_program("5/2").program != first.program


def test_a_crash_counts_as_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: Any) -> None:
        raise IndexError("boom")

    monkeypatch.setattr(RadixTree, "evict", crash)
    program = Program(SIZES, [("evict", [1, 0])])
    assert failure_of(program) == "IndexError: boom"


def test_a_refusal_that_changes_something_is_found() -> None:
    driver = Driver(**SIZES)
    driver.match("m", [[None, list(range(20)), 16]])
    driver.admit("m", [0], ["r"])
    driver.manager.rows.computed_len[0] = 3
    with pytest.raises(Failure, match="row 0: host lengths"):
        driver.bad("half a page")


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["validate", "--seconds", "60", "--programs", "1", "--seed", "3"])
    assert args.run(args) == 0
    head, *counts = capsys.readouterr().out.splitlines()
    assert head.startswith("1 programs, ")
    assert counts
    for line in counts:
        name, legend = line[2:34].strip(), line[45:]
        assert legend == (_REFUSED if name.endswith("Error") else _LEGEND[name])
    with pytest.raises(SystemExit):
        parser.parse_args(["validate", "--seconds", "0"])
    nowhere = parser.parse_args(["validate", "--device", "nowhere"])
    with pytest.raises(
        InvalidInputError, match="device must be cpu, cuda or cuda:N, got 'nowhere'"
    ):
        nowhere.run(nowhere)


def test_layout_rows_are_what_the_driver_compares() -> None:
    # observe() compares host and device lengths by position
    fields = (layout.COMPUTED, layout.ALLOCATED, layout.OWNED, layout.FRONTIER)
    assert fields == (0, 1, 2, 3)


def test_an_edge_that_grew_and_lost_its_end_disturbs_a_match() -> None:
    """Found by `validate`: what went behind the prefix had come after the match, on the same edge."""
    d = Driver(page_size=1, window=2, full_pages=8, swa_pages=8, max_rows=2, max_len=6)
    d.match("first", [[None, [0, 0, 0], 0], [None, [], 0]], None, True)
    d.admit("first", None, ["a", "b"])
    d.extend(["a"], [2])
    d.advance(["a"])
    d.retract("back", ["b", "a"], [0, 0])
    d.admit("first", [0], ["c"])
    d.match("prefix", [[None, [0], 1]], None, True)
    d.extend(["c"], [6])
    d.advance(["c"])
    d.commit(["c"], [-3])  # the edge grows by a page
    d.abort(["c"])
    d.admit("back", [1], ["d"])  # and is split where it ended before
    d.evict(0, 1)
    d.admit("prefix", [0], ["e"])
    assert d.refusals["admit StaleMatchError"] == 1
