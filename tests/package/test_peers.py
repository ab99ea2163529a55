"""perf/peers/ without SGLang: its goals, samples, agreement check and set-up; what stats() says of memory."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvcache import CacheConfig, KeyBatch, KVCacheManager
from kvcache.tree import arrays as a
from kvcache.tree.radix_tree import FIRST_LEVEL

PEERS = Path(__file__).parents[2] / "perf" / "peers"
MODULES = (
    "side",
    "timing",
    "report",
    "figures",
    "ours_side",
    "makers",
    "agree",
    "w_tree",
    "w_engine",
    "run",
)


@pytest.fixture(scope="module")
def peers() -> Iterator[SimpleNamespace]:
    """The modules of perf/peers/, by name; gone from sys.modules afterwards."""
    kept = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    sys.path.insert(0, str(PEERS))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    finally:
        sys.path.remove(str(PEERS))
        for name in MODULES:
            sys.modules.pop(name, None)
        sys.modules.update(kept)


def bench_of(peers: SimpleNamespace, **us: dict[str, list[float]]) -> Any:
    """Return a Bench (P = 64) with samples in CPU us: case -> side -> list."""
    bench = peers.timing.Bench(64, 128, quick=True, full=False)
    for case, sides in us.items():
        bench.samples[case] = {
            side: peers.timing.Samples(cpu=list(values), wall=list(values))
            for side, values in sides.items()
        }
    return bench


def found(peers: SimpleNamespace, bench: Any) -> dict[str, tuple[float, bool]]:
    return {what: (value, holds) for what, value, _, holds in peers.report.checks(bench)}


# -- goals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ours", "holds"), [(2.0, True), (2.1, False)])
def test_a_goal_is_a_ratio_of_medians(peers: SimpleNamespace, ours: float, holds: bool) -> None:
    case = "W1 match hot, batch 64"
    # medians 50 and `ours`; means and minima would say otherwise
    bench = bench_of(peers, **{case: {"SGLang Rust": [1, 50, 9000], "kvcache": [0.01, ours, 1000]}})
    assert found(peers, bench) == {case: (50 / ours, holds)}


def test_a_goal_without_a_peer_is_not_checked(peers: SimpleNamespace) -> None:
    bench = bench_of(peers, **{"W1 match hot, batch 64": {"kvcache": [1.0]}})
    assert found(peers, bench) == {}


def test_a_turn_is_the_sum_of_its_parts(peers: SimpleNamespace) -> None:
    parts = {
        f"W5 turn 30, {part}": {"SGLang Rust": [rust], "kvcache": [ours]}
        for part, rust, ours in (("match", 100, 1), ("admit", 20, 2), ("finish", 180, 7))
    }
    bench = bench_of(peers, **parts)
    assert peers.report.medians(bench)["W5 turn 30"] == {"SGLang Rust": 300, "kvcache": 10}
    assert found(peers, bench)["W5 turn 30"] == (30, True)
    del bench.samples["W5 turn 30, admit"]
    assert "W5 turn 30" not in peers.report.medians(bench)


def test_limits_that_need_no_peer(peers: SimpleNamespace) -> None:
    bench = bench_of(
        peers,
        **{
            "W3 evict one tail of 5,000": {"kvcache": [10.0]},
            "W3 evict one tail of 50,000": {"kvcache": [12.1]},
            "W8 re-match, queue of 1,000": {"kvcache": [0.35]},
        },
    )
    bench.notes["W6 hit rate, kvcache"], bench.notes["W6 hit rate, SGLang Rust"] = 0.5, 0.6
    bench.notes["memory, kvcache"] = {"tree_bytes": 4500, "cached_tokens": 1000, "nodes": 3}
    held = {what: holds for what, (_, holds) in found(peers, bench).items()}
    assert held == {
        "W3 evict one tail, 50,000 / 5,000 leaves": False,
        "W8 re-match, us": True,
        "W6 hit rate, ours / SGLang's": False,
        "memory, bytes per cached token beyond 4 + 128 a node": True,
    }


def test_a_case_without_a_goal_cannot_fall_short(peers: SimpleNamespace) -> None:
    sides = {"SGLang Rust": [2.0], "kvcache": [1.0]}
    bench = bench_of(
        peers, **{"W1 match cold, batch 64": sides, "W1 match cold, batch 1": dict(sides)}
    )
    assert found(peers, bench) == {"W1 match cold, batch 1": (2.0, False)}


def test_tables_name_what_falls_short(peers: SimpleNamespace) -> None:
    sides = {"SGLang Python": [900.0], "SGLang Rust": [240.0], "kvcache": [10.0]}
    bench = bench_of(peers, **{"W3 evict one tail": sides})
    assert "SHORT: W3 evict one tail: 24.00 (goal >= 25x Rust)" in peers.report.markdown(bench)


# -- figures ------------------------------------------------------------------------------------------------


@pytest.fixture
def three_runs(
    peers: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> dict[str, Any]:
    """A file of two runs at W = 128 and one at W = 4096: Rust is 24, 30 and 7 times slower; W5 20, 20, 20."""
    monkeypatch.setattr(peers.report, "version", lambda name: "0.5.20")
    whole: dict[str, Any] = {}
    for rust, window in ((240.0, 128), (70.0, 4096), (300.0, 128)):
        sides = {"SGLang Python": [900.0], "SGLang Rust": [rust], "kvcache": [10.0]}
        parts = {
            f"W5 turn 30, {part}": {"SGLang Rust": [200.0], "kvcache": [10.0]}
            for part in ("match", "admit", "finish")
        }
        bench = bench_of(peers, **{"W3 evict one tail": sides, **parts})
        bench.window = window
        new = peers.report.as_json([bench], {})
        whole = peers.report.write_json(tmp_path / "peers.json", new, append=True)
    return whole


def test_runs_are_added_to_a_file_and_ratios_become_ranges(
    peers: SimpleNamespace, three_runs: dict[str, Any]
) -> None:
    assert peers.figures.ranges(three_runs).splitlines()[2:] == [
        "| W3: evict one tail of 64 tokens |  | 7.0 to 30 |",
        "| W5: turn 30 of a conversation: match, admit, finish | 20 |  |",
    ]
    head, _, tail, turn = peers.figures.summary(three_runs).splitlines()
    assert head.endswith("| times faster than Rust | P = 64, W = 4096 |")
    assert tail == "| W3: evict one tail of 64 tokens | 900.00 | 270.00 | 10.00 | 24 to 30 | 7.0 |"
    assert turn.startswith("| W5: turn 30 of a conversation: match, admit, finish |  | 600.00 | 30")


def test_a_plot_is_drawn_from_the_file_alone(
    peers: SimpleNamespace, three_runs: dict[str, Any], tmp_path: Path
) -> None:
    peers.figures.plot(three_runs, tmp_path / "peers.png")
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")


def test_every_case_with_a_goal_is_shown(peers: SimpleNamespace) -> None:
    shown = {case for row in peers.figures.SHOWN for case in (row.many, row.one)}
    assert {goal.case for goal in peers.report.GOALS} <= shown


def test_time_is_per_request(peers: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = peers.timing.Bench(64, 128, quick=True, full=False)
    ticks = iter([0, 6000])
    monkeypatch.setattr(peers.timing.time, "thread_time_ns", lambda: next(ticks))
    calls: list[int] = []
    bench.time("case", SimpleNamespace(name="kvcache"), 3, calls.append, 7, calls=2)
    assert calls == [7, 7]
    assert bench.samples["case"]["kvcache"].cpu == [1.0]  # 6 us, 2 calls of 3 requests


# -- the agreement check ------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 16])
def test_two_of_ours_agree(peers: SimpleNamespace, page_size: int) -> None:
    def two(config: Any) -> list[Any]:
        return [peers.ours_side.OursSide(config), peers.ours_side.OursSide(config)]

    tally = peers.agree.check(two, page_size, 32, requests=60, seed=0)
    # the run has what the check is about
    assert tally.matches == 60
    assert tally.forks > 5
    assert tally.partial > 5
    assert tally.evictions > 0


@pytest.mark.parametrize("field", ["full_hit", "reuse", "branch"])
def test_a_planted_disagreement_is_caught(peers: SimpleNamespace, field: str) -> None:
    class Wrong(peers.ours_side.OursSide):  # type: ignore[misc, name-defined]
        def matched(self, ids: Any) -> Any:
            right = super().matched(ids)
            if 20 not in ids:
                return right
            return right._replace(**{field: getattr(right, field) + 16 * (ids == 20)})

    def two(config: Any) -> list[Any]:
        return [peers.ours_side.OursSide(config), Wrong(config)]

    with pytest.raises(peers.agree.Disagreement, match=field):
        peers.agree.check(two, 16, 32, requests=40, seed=0)


# -- the set-up ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("system", lambda: "Darwin", "Linux x86-64 only"),
        ("machine", lambda: "aarch64", "Linux x86-64 only"),
        ("libc_ver", lambda: ("glibc", "2.28"), "needs glibc 2.34"),
    ],
)
def test_where_sglang_cannot_run_it_says_so(
    peers: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    name: str,
    value: Any,
    says: str,
) -> None:
    monkeypatch.setattr(peers.run.platform, name, value)
    monkeypatch.setattr(peers.run, "STAMP", tmp_path / "none")
    monkeypatch.setattr(sys, "argv", ["run.py", "--pip-args=", "--", "--quick"])
    peers.run.main()  # returns: status 0
    out = capsys.readouterr().out
    assert out.startswith("bench-peers skipped: ")
    assert says in out


def test_a_failed_install_is_a_skip(
    peers: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(peers.run, "STAMP", tmp_path / "none")
    monkeypatch.setattr(peers.run, "interpreter", lambda: "/bin/false")
    with pytest.raises(peers.run.CannotRun, match="failed with status 1"):
        peers.run.install([])


def test_the_environment_is_renewed_when_its_inputs_change(
    peers: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stamp, pins = tmp_path / "stamp", tmp_path / "requirements.txt"
    pins.write_text("a==1")
    monkeypatch.setattr(peers.run, "STAMP", stamp)
    monkeypatch.setattr(peers.run, "INPUTS", (pins,))
    monkeypatch.setattr(peers.run, "interpreter", lambda: "/bin/false")
    stamp.write_text(peers.run.digest())
    assert peers.run.install([]) == peers.run.VENV / "bin" / "python"
    pins.write_text("a==2")
    with pytest.raises(peers.run.CannotRun):
        peers.run.install([])


# -- memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page_size", "most"), [(1, 5.0), (64, 0.5)])
def test_host_bytes_are_what_the_arrays_hold(page_size: int, most: float) -> None:
    length, num = 2048, 256
    pages = num * length // page_size
    cache = KVCacheManager(
        CacheConfig(
            page_size=page_size,
            window=128,
            full_pages=pages + 64,
            swa_pages=pages + 64,
            max_rows=8,
            max_len=length,
        )
    )
    tokens = np.random.default_rng(0).integers(0, 2**30, num * length).astype(np.int32)
    starts = np.arange(num) * length
    for first in range(0, num, 2):
        keys = KeyBatch(tokens, starts[first : first + 2], np.full(2, length))
        rows = cache.admit(cache.match(keys))
        cache.extend(rows, keys.lens)
        cache.advance(rows)
        cache.finish(rows, keys)
    stats, tree = cache.stats(), cache.tree
    cached = stats.tree_full_pages * page_size
    assert cached == num * length
    records = int(tree.meta[a.M_BUMP])
    arrays = [x for x in vars(tree).values() if isinstance(x, np.ndarray)]
    whole = sum(x.nbytes for x in arrays)
    level = int(tree.meta[a.M_TABLE_MASK]) + 1
    assert level == FIRST_LEVEL  # else the level before it counts as well
    untouched = tree.nodes.nbytes + tree.tokens.nbytes + tree.table.nbytes
    in_use = whole - untouched + records * a.NUM_FIELDS * 4 + cached * 4 + level * 8
    assert stats.host_bytes == in_use
    assert not tree.nodes[:, records:].any()  # what is not counted was never written
    assert not tree.tokens[cached:].any()
    page_ids = 4 * stats.tree_full_pages
    beyond = stats.host_bytes + page_ids - 4 * cached - 128 * stats.nodes
    assert beyond / cached <= most
