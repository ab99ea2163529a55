"""tools/gpu_check.py: parts, why they are skipped, what stops them, goals, summary. Not the whole run."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def load(name: str) -> ModuleType:
    """Import a script of tools/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tool() -> Iterator[Any]:
    goals = load("gpu_goals")
    yield load("gpu_check")
    del sys.modules["gpu_check"], sys.modules[goals.__name__]


@pytest.fixture
def without_gpu(tool: Any, tmp_path: Path) -> Any:
    return tool.Check(tmp_path, None, None)


def python(code: str) -> Any:
    return lambda check: ("-c", code)


def test_parts_are_over_in_less_than_eight_minutes(tool: Any) -> None:
    assert sum(part.seconds for part in tool.PARTS) <= tool.MOST_SECONDS < 480
    assert len({part.name for part in tool.PARTS}) == len(tool.PARTS)


def test_every_gpu_test_file_is_run(tool: Any) -> None:
    check = tool.Check(ROOT, "a GPU", "compute-sanitizer")
    run = {Path(a).name for part in tool.PARTS for a in part.command(check) if a.endswith(".py")}
    assert {path.name for path in (ROOT / "tests").rglob("test_*_gpu.py")} <= run
    marked = {p.name for p in (ROOT / "tests").rglob("*.py") if "mark.gpu" in p.read_text()}
    assert marked - {Path(__file__).name} <= run
    for name in run:
        assert list((ROOT / "tests").rglob(name))


def test_goals_have_a_run_that_measures_them(tool: Any) -> None:
    for goal in tool.gpu_goals.GOALS:
        _, arguments = tool.BENCH_RUNS[goal.report]
        named = {a for a in arguments if not a.startswith("--")}
        assert str(goal.batch) in named
        assert str(goal.page_size) in named


def test_without_a_gpu_parts_are_skipped_by_name(tool: Any, without_gpu: Any) -> None:
    ran = [part for part in tool.PARTS if tool.missing(part, without_gpu) is None]
    assert [part.name for part in ran] == ["bytes moved, interpreted", "benchmarks, CPU twins"]
    gpu_parts = [part for part in tool.PARTS if part not in ran]
    for outcome, part in zip(tool.run_all(without_gpu, gpu_parts), gpu_parts, strict=True):
        assert outcome == (part.name, "skipped", 0.0, "no CUDA or HIP device")


def test_without_compute_sanitizer_only_its_parts_are_skipped(tool: Any, tmp_path: Path) -> None:
    check = tool.Check(tmp_path, "a GPU", None)
    skipped = {part.name: tool.missing(part, check) for part in tool.PARTS}
    assert {name for name, why in skipped.items() if why} == {
        "compute-sanitizer memcheck",
        "compute-sanitizer racecheck",
    }


def test_a_part_that_fails_stops_no_other(tool: Any, without_gpu: Any) -> None:
    parts = [
        tool.Part("bad", 30, python("print('the last line'); raise SystemExit(3)")),
        tool.Part("good", 30, python("import kvcache.bench; print('fine')")),
    ]
    bad, good = tool.run_all(without_gpu, parts)
    assert (bad.status, bad.note) == ("failed", "exit status 3: the last line; bad.log")
    assert (good.status, good.note) == ("passed", "fine")
    assert "the last line" in (without_gpu.out / "bad.log").read_text()


def test_skipped_tests_do_not_pass_for_a_check_on_the_gpu(tool: Any, tmp_path: Path) -> None:
    part = tool.Part("tests", 30, python("print('=== 3 passed, 2 skipped in 0.1s ===')"), ("gpu",))
    (outcome,) = tool.run_all(tool.Check(tmp_path, "a GPU", None), [part])
    assert outcome.status == "failed"
    assert outcome.note == "tests were skipped: 3 passed, 2 skipped in 0.1s; tests.log"


def test_a_part_that_takes_too_long_is_stopped_with_its_children(tool: Any, tmp_path: Path) -> None:
    child = "import time; time.sleep(60)"
    code = (
        "import subprocess, sys\n"
        f"print(subprocess.Popen([sys.executable, '-c', {child!r}]).pid, flush=True)\n"
        f"{child}"
    )
    check = tool.Check(tmp_path, "a GPU", None)
    start = time.monotonic()
    (outcome,) = tool.run_all(check, [tool.Part("slow", 3, python(code))])
    assert time.monotonic() - start < 30
    assert (outcome.status, outcome.note) == ("failed", "stopped after 3 s; slow.log")
    pid = int((tmp_path / "slow.log").read_text().split()[-1])
    # a kill takes effect when the process gets a processor next; left alone, it would sleep for a minute
    while time.monotonic() - start < 30 and is_alive(pid):
        time.sleep(0.05)
    assert not is_alive(pid)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def row(bench: str, batch: int, page_size: int, **figures: Any) -> dict[str, Any]:
    us = {"us": figures.pop("us", 5.0)}
    timings = {"graph_hot": us, "graph_cold": us}
    base = {"bench": bench, "batch": batch, "page_size": page_size, "version": "ours"}
    return {**base, "launches": 1, "min_bytes": 10**6, "timings": timings, **figures}


class TestGoals:
    def judged(self, tool: Any, found: dict[str, Any], name: str) -> Any:
        other = {**found, "version": "torch", "launches": 99, "timings": {}}
        report = {"copy_gb_per_s": 100.0, "rows": [other, found]}
        runs = dict.fromkeys(tool.BENCH_RUNS, report)
        (result,) = (r for r in tool.gpu_goals.judge_all(runs) if r.name.startswith(name))
        return result

    @pytest.mark.parametrize(("us", "holds"), [(10.0, True), (10.1, False)])
    def test_an_upper_bound(self, tool: Any, us: float, holds: bool) -> None:
        result = self.judged(
            tool, row("slide", 256, 64, us=us), "out-of-window pass, 256 rows, P=64: time"
        )
        assert (result.value, result.limit, result.holds) == (us, "<= 10 us", holds)

    @pytest.mark.parametrize(("us", "holds"), [(14.28, True), (14.3, False)])
    def test_a_share_of_the_copy(self, tool: Any, us: float, holds: bool) -> None:
        # 1 MB in 14.28 us is 70.03 GB/s, 70 % of 100
        result = self.judged(tool, row("translate", 1024, 64, us=us), "translate")
        assert result.value == pytest.approx(1000 / us)
        assert (result.limit, result.holds) == (">= 70 % of copy", holds)

    @pytest.mark.parametrize(("launches", "holds"), [(4, True), (5, False)])
    def test_launches(self, tool: Any, launches: int, holds: bool) -> None:
        result = self.judged(tool, row("decode", 256, 64, launches=launches), "decode step")
        assert (result.value, result.holds) == (launches, holds)

    def test_a_goal_without_a_figure_is_missed(self, tool: Any) -> None:
        results = tool.gpu_goals.judge_all({})
        assert len(results) == len(tool.gpu_goals.GOALS)
        assert not any(result.holds for result in results)
        table = tool.gpu_goals.as_markdown(results)
        assert table.count("| - | missed |") == len(results)


class TestMain:
    @pytest.fixture(autouse=True)
    def small(self, tool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("OUT", str(tmp_path / "out"))
        monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
        monkeypatch.setattr(tool, "find_gpu", lambda: None)
        parts = (tool.Part("one", 30, python("print('fine')")), tool.PARTS[-1])
        monkeypatch.setattr(tool, "PARTS", parts)

    def test_writes_everything_below_the_folder(self, tool: Any, tmp_path: Path) -> None:
        assert tool.main() == 0
        out = tmp_path / "out"
        names = {path.name for path in out.iterdir()}
        assert names == {"environment.json", "one.log", "summary.json", "summary.md"}
        found = json.loads((out / "summary.json").read_text())
        assert found["gpu"] is None
        statuses = {part["part"]: part["status"] for part in found["parts"]}
        assert statuses == {
            "environment": "passed",
            "one": "passed",
            "compute-sanitizer racecheck": "skipped",
        }
        text = (out / "summary.md").read_text()
        assert "| compute-sanitizer racecheck | skipped | 0.0 | no CUDA or HIP device |" in text
        assert "skipped: no CUDA or HIP device" in text
        assert json.loads((out / "environment.json").read_text())["torch"]

    def test_exit_status_tells_of_a_failed_part(
        self, tool: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tool, "PARTS", (tool.Part("bad", 30, python("raise SystemExit(1)")),))
        assert tool.main() == 1

    def test_exit_status_tells_of_a_missed_goal(
        self, tool: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        missed = tool.gpu_goals.Result("g", 2.0, "us", "<= 1 us", False)
        monkeypatch.setattr(tool, "judge_goals", lambda check: [missed])
        assert tool.main() == 1

    def test_figures_of_an_earlier_run_are_gone(self, tool: Any, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "p64.json").write_text("{}")
        assert tool.main() == 0
        assert not (tmp_path / "out" / "p64.json").exists()

    def test_says_what_is_not_installed(
        self, tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(tool, "NEEDED", ("torch", "no_such_package"))
        assert tool.main() == 1
        assert "not installed: no_such_package" in capsys.readouterr().out


def test_the_folder_is_named_after_the_gpu(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUT", raising=False)
    assert tool.output_folder("NVIDIA H200") == ROOT / "perf" / "results" / "gpu" / "nvidia-h200"
    assert tool.output_folder(None) == ROOT / "build" / "gpu-check"
