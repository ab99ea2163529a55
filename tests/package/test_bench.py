"""`kvcache bench`: every kernel runs, wrong versions are found out before anything is timed, figures."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcache.bench import (
    advance,
    apply,
    bind_match,
    cli,
    decode,
    decode_slide,
    decode_step,
    extend,
    fill_indices,
    fill_table,
    match,
    report,
    slide,
    step,
    timing,
    translate,
    update_mirror,
)
from kvcache.bench.case import (
    OURS,
    Bench,
    Case,
    MismatchError,
    Run,
    Size,
    Version,
    check_equal,
    outputs,
)
from kvcache.bench.measure import Row, count_operations, measure
from kvcache.cli import main

ROOT = Path(__file__).parents[2]
BENCHES = cli.load([])
SMALL = ("--quick", "--device", "cpu", "--tokens", "80")


def ids(bench: Bench) -> str:
    return bench.name


class TestCommand:
    def test_measures_every_kernel(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        path = tmp_path / "bench.json"
        assert main(["bench", *SMALL, "--batch", "1", "3", "--json", str(path)]) == 0
        out = capsys.readouterr().out
        found = json.loads(path.read_text())
        for bench in BENCHES:
            assert f"\n{bench.name}: {bench.title} [CPU twin, no GPU here]\n" in out
        assert found["label"] == "CPU twin, no GPU here"
        assert {"cpu", "cores", "memory_gib", "system", "device"} <= found["machine"].keys()
        assert {"python", "torch", "numba", "triton", "kvcache"} <= found["versions"].keys()
        assert found["command"]
        assert found["copy_gb_per_s"] > 0
        assert found["modes"].keys() == {"cpu"}
        cases = {(row["bench"], row["batch"]) for row in found["rows"] if row["version"] == OURS}
        assert cases == {(bench.name, batch) for bench in BENCHES for batch in (1, 3)}
        for row in found["rows"]:
            assert row["min_bytes"] > 0
            assert row["launches"] > 0
            assert row["us"] > 0
            expected = row["min_bytes"] / row["us"] / 1e3
            assert row["gb_per_s"] == pytest.approx(expected, rel=1e-2, abs=1e-4)
            timing = row["timings"]["cpu"]
            assert 0 < timing["best_us"] <= timing["us"]
            assert timing["repeats"] >= 2

    def test_draws_a_plot_for_each_benchmark(self, tmp_path: Path) -> None:
        assert main(["bench", "advance", "apply", *SMALL, "--out", str(tmp_path / "new")]) == 0
        names = {path.name for path in (tmp_path / "new").iterdir()}
        assert names == {"bench.json", "advance.png", "apply_bind.png", "apply_free.png"}
        for path in (tmp_path / "new").glob("*.png"):
            assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"

    def test_stops_at_a_wrong_kernel(
        self,
        capsys: pytest.CaptureFixture[str],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        right = step.step

        def wrong(*args: Any, **kwargs: Any) -> None:
            right(*args, **kwargs)
            args[-1][0] += 1  # tops

        monkeypatch.setattr(step, "step", wrong)
        path = tmp_path / "bench.json"
        assert main(["bench", "step", *SMALL, "--json", str(path)]) == 1
        out, err = capsys.readouterr()
        assert err == (
            "kvcache bench: step, P = 16, B = 1: torch and ours differ in tops; it was not timed\n"
        )
        assert "ours us" not in out
        assert not path.exists()

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["nothing"], "KERNEL must be one of extend, step, .*, got 'nothing'"),
            (["--batch", "0"], r"--batch must be in \[1, 65536\], got 0"),
            (["--batch", "x"], "argument --batch: invalid int value: 'x'"),
            (["--page-size", "5000"], r"--page-size must be in \[1, 4096\], got 5000"),
            (["--tokens", "-1"], r"--tokens must be in \[1, 1048576\], got -1"),
            (["--device", "abacus"], "--device must be cpu, cuda or cuda:N, got 'abacus'"),
            (["--device", "meta"], "--device must be cpu, cuda or cuda:N, got 'meta'"),
            (
                ["--device", "cuda:99"],
                "--device must be there, got 'cuda:99': . CUDA devices",
            ),
            (["--json", "/nowhere/at/all.json"], "--json: .*: there is no folder /nowhere/at"),
            (["--out", __file__], "--out: .*: is not a folder"),
        ],
    )
    def test_refuses_bad_input(
        self, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
    ) -> None:
        try:
            status = main(["bench", *argv])
        except SystemExit as stop:  # argparse
            status = int(str(stop.code))
        out, err = capsys.readouterr()
        assert status == 2
        assert out == ""
        assert re.search(message, err)


def test_every_device_operation_has_a_file() -> None:
    operations = {path.stem for path in (ROOT / "kernels").glob("*.py")}
    operations -= {"launch", "layout", "twin_of_match"}
    assert operations | {"decode"} == set(cli.KERNELS)
    assert {bench.kernel for bench in BENCHES} == set(cli.KERNELS)
    assert len({bench.name for bench in BENCHES}) == len(BENCHES)


@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
@pytest.mark.parametrize("bench", BENCHES, ids=ids)
def test_versions_agree(bench: Bench, page_size: int) -> None:
    case = bench.make(Size(7, page_size, 300, "cpu"))
    check_equal(case)
    # the state is as before
    check_equal(case)


@pytest.mark.parametrize("bench", BENCHES, ids=ids)
def test_one_wrong_number_in_any_result_is_found(bench: Bench) -> None:
    case = bench.make(Size(3, 16, 80, "cpu"))
    for version in case.versions[1:]:
        for name in version.read(case.state):

            def off_by_one(state: Any, version: Version = version, name: str = name) -> Any:
                found = {key: x.clone() for key, x in version.read(state).items()}
                found[name].view(-1)[-1] += 1
                return found

            wrong = dataclasses.replace(version, read=off_by_one)
            with pytest.raises(MismatchError, match=f"{version.name} and ours differ in {name}"):
                check_equal(Case(case.state, (case.versions[0], wrong), 1))


@pytest.mark.parametrize("bench", BENCHES, ids=ids)
def test_a_version_that_does_nothing_is_found(bench: Bench) -> None:
    case = bench.make(Size(2, 16, 80, "cpu"))
    idle = dataclasses.replace(case.versions[0], run=lambda state: None)
    with pytest.raises(MismatchError, match="ours changes nothing"):
        check_equal(Case(case.state, (idle,), 1))


def test_nothing_is_timed_where_versions_differ() -> None:
    class Timer(timing.CpuTimer):
        def time(self, run: Run) -> dict[str, timing.Timing]:
            pytest.fail("timed")

    def make(size: Size) -> Case:
        state = {"x": torch.zeros(2)}
        versions = tuple(
            Version(name, lambda s, n=n: s["x"].fill_(n), outputs("x"), ("x",))
            for n, name in enumerate((OURS, "torch"), start=1)
        )
        return Case(state, versions, 8)

    bench = Bench("x", "", "x", make)
    with pytest.raises(MismatchError, match="x, P = 4, B = 2: torch and ours differ in x"):
        measure([bench], [Size(2, 4, 8, "cpu")], Timer(1.0))


# rows, pages, ... -> bytes, put together from the words that the job needs
@pytest.mark.parametrize(
    ("found", "words"),
    [
        # two rows, three pages: 5 fields and 1 length a row, 4 words a page, 2 tops
        (extend.min_bytes(2, 3), 2 * 6 + 3 * 4 + 2),
        # three rows, one new page: id, 2 lengths, 1 written; 2 pops, cell, map; 2 tops twice
        (step.min_bytes(3, 1), 3 * 4 + 4 + 4),
        (decode_step.min_bytes(3, 1), 3 * 4 + 4 + 4 + 2),
        (advance.min_bytes(5), 5 * 3),
        # two rows, three pages: id, 3 lengths, frontier; cell, map twice, push; top twice
        (slide.min_bytes(2, 3), 2 * 5 + 3 * 4 + 2),
        (decode_slide.min_bytes(2, 3), 2 * 6 + 3 * 4 + 2 + 2),
        # two ranges of two rows that share 4 pages and have 1 each: 10 bound, 6 distinct
        (apply.min_bytes_bind(4, 10, 6), 4 * 7 + 10 + 6 + 2),
        # one range of 3 tombstones, one of 2 live pages
        (apply.min_bytes_free(2, 5, 2), 2 * 7 + 5 * 2 + 2 * 3 + 2),
        # ten int64 slots of two pages
        (translate.min_bytes(10, 2), 10 * 4 + 2),
        # two rows, five pages in two lanes of 16 entries
        (fill_table.min_bytes(2, 5, 32, 0), 2 * 4 + 5 + 32),
        (fill_table.min_bytes(2, 5, 32, 128), 2 * 5 + 5 * 2 + 32),
        # two rows, five pages, 20 token slots; indptr has one more
        (fill_indices.min_bytes(2, 5, 20, 0), 2 * 5 + 5 + 20 + 1),
        (fill_indices.min_bytes(2, 5, 20, 128), 2 * 6 + 5 * 2 + 20 + 1),
        # one row: 5 read, 3 lengths and 2 of each table written, 4 for its new page, 3 for the freed one
        (decode.min_bytes(1, 4, 2, 32), 5 + 3 + 4 + 4 + 3 + 4 + 2 + 32 + 6),
        # two keys of 8 tokens that share 4: 12 stored, three nodes of 8 + 2 words; start is int64
        (match.min_bytes(2, 16, 12, 3), 2 * (4 + 8) + 16 + 12 + 3 * 10),
        # two rows of 3 pages of which 2 are shared
        (bind_match.min_bytes(2, 3, 6, 4), 2 * 4 + 3 * 3 + 4 + 6),
        # one record, two entries, one page of 4 tokens: ids, words read and written
        (update_mirror.min_bytes(1, 2, 1, 4), 4 + 2 * (8 + 4 + 4)),
    ],
)
def test_least_bytes(found: int, words: int) -> None:
    assert found == 4 * words


def test_operations_are_counted_without_views() -> None:
    state = {"x": torch.arange(6)}

    def run(s: Any) -> None:
        y = s["x"].view(2, 3)[1][:2]  # three views
        s["y"] = torch.cat((y, y)) + 1  # two operations

    version = Version("torch", run, outputs("y"), ())
    counts: dict[str, int] = {}
    with count_operations(counts, "torch"):
        Run(Case(state, (version,), 1), version).run()
    assert counts == {"torch": 2}


def test_repeats_fill_the_budget() -> None:
    assert timing.repeats_for(10.0, 1000.0) == 50
    assert timing.repeats_for(50.0, 1000.0) == 20
    assert timing.repeats_for(500.0, 1000.0) == 3
    assert timing.repeats_for(10_000.0, 1000.0) == 2


class FakeCuda:
    """torch.cuda as far as GpuTimer uses it; notes what is done in what order."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def get_device_properties(self, device: str) -> Any:
        return SimpleNamespace(L2_cache_size=1 << 10)

    def synchronize(self) -> None:
        self.log.append("wait")

    def _sleep(self, cycles: int) -> None:
        self.log.append("sleep")

    def CUDAGraph(self) -> Any:
        return SimpleNamespace(replay=lambda: self.log.append("replay"))

    @contextlib.contextmanager
    def graph(self, graph: Any) -> Iterator[None]:
        self.log.append("capture")
        yield
        self.log.append("captured")

    def Event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        return SimpleNamespace(
            record=lambda: self.log.append("event"), elapsed_time=lambda end: 0.25
        )


class NotedRun(Run):
    """A run that notes itself in the log of a FakeCuda."""

    def __init__(self, log: list[str], *, captured: bool, name: str = OURS) -> None:
        def run(state: Any) -> None:
            log.append("run")
            if "capture" in log and "captured" not in log and name != OURS:
                raise RuntimeError("operation not permitted when stream is capturing")

        version = Version(name, run, outputs("x"), ("x",), captured)
        super().__init__(Case({"x": torch.zeros(1)}, (version,), 4), version)
        self.log = log

    def restore(self) -> None:
        self.log.append("restore")
        super().restore()


class TestGpuTimer:
    @pytest.fixture(autouse=True)
    def small_flush(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(timing, "_LEAST_FLUSH", 1 << 12)
        monkeypatch.setattr(timing, "_GPU_COPY", 1 << 12)

    def timer(self, cuda: FakeCuda) -> timing.GpuTimer:
        timer = timing.GpuTimer(0.001, device="cpu", cuda=cuda)
        timer._flushed = SimpleNamespace(zero_=lambda: cuda.log.append("flush"))  # type: ignore[assignment]
        return timer

    def test_the_flush_is_larger_than_the_l2(self) -> None:
        timer = timing.GpuTimer(1.0, device="cpu", cuda=FakeCuda())
        assert timer._flushed.numel() * 4 == 1 << 12
        cuda = FakeCuda()
        cuda.get_device_properties = lambda device: SimpleNamespace(L2_cache_size=1 << 20)  # type: ignore[method-assign]
        assert timing.GpuTimer(1.0, device="cpu", cuda=cuda)._flushed.numel() == 1 << 20

    def test_what_is_timed_stands_alone_between_events(self) -> None:
        cuda = FakeCuda()
        timings = self.timer(cuda).time(NotedRun(cuda.log, captured=True))
        assert timings.keys() == {"wall", "host", "graph_cold", "graph_hot"}
        assert timings["graph_cold"].us == timings["graph_hot"].us == 250.0
        text = " ".join(cuda.log)
        # by the clock: from an idle device until it is idle again
        assert text.startswith("restore wait run wait")
        assert "restore wait capture run captured" in text
        # cold: inputs restored, then the flush, then the replay alone
        assert "restore flush event replay event" in text
        # hot: it runs, is undone, and the device is kept busy while the host enqueues the rest
        assert "restore replay restore sleep event replay event" in text
        assert text.count("event") == 2 * text.count("event replay event")
        assert cuda.log[-2:] == ["restore", "wait"]

    def test_a_version_that_waits_is_timed_by_the_clock_alone(self) -> None:
        cuda = FakeCuda()
        timings = self.timer(cuda).time(NotedRun(cuda.log, captured=False))
        assert timings.keys() == {"wall", "host"}
        assert "capture" not in cuda.log

    def test_only_ours_must_be_fit_for_a_graph(self) -> None:
        cuda = FakeCuda()
        timings = self.timer(cuda).time(NotedRun(cuda.log, captured=True, name="torch"))
        assert timings.keys() == {"wall", "host"}
        assert "capture" in cuda.log

    def test_copy_ceiling_counts_both_directions(self) -> None:
        assert self.timer(FakeCuda()).copy_gb_per_s() == pytest.approx(
            2 * (1 << 12) / 0.25e-3 / 1e9
        )


def test_the_table_of_a_gpu_shows_what_was_measured() -> None:
    def row(version: str, launches: int, **modes: float) -> Row:
        timings = {mode: timing.Timing(us, us / 2, 9) for mode, us in modes.items()}
        return Row("slide", "slide", "", 256, 64, 2048, version, 9224, launches, timings)

    rows = [
        row(OURS, 1, graph_cold=4.0, graph_hot=2.5, wall=20.0, host=12.0),
        row("torch", 36, wall=400.0, host=390.0),
        row("sglang", 2048, wall=30_000.0, host=29_000.0),
    ]
    text = report.table(
        Bench("slide", "", "a title", lambda size: pytest.fail("made")), rows, 4000.0
    )
    title, head, line = text.splitlines()
    assert title == "slide: a title"
    assert head.split()[:2] == ["P", "B"]
    assert line.split() == [
        *("64", "256", "9,224", "1", "4.00", "2.50", "2.31", "0", "%", "12.0", "20.0"),
        *("-", "400", "20.0x", "36", "30,000", "1,500x", "2,048"),
    ]
