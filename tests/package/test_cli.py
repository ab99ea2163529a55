"""The command line: what it prints and writes, and one clear message for bad input."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvcache
from kvcache.cli import main

SMALL = [
    "replay",
    *("--workload", "shared-prompt", "--requests", "12", "--system-len", "300"),
    *("--question-len", "20", "--output-len", "10", "--page-size", "16", "--window", "32"),
    *("--chunk", "512", "--running", "2"),
]
KEYS = {
    "requests",
    "input_tokens",
    "output_tokens",
    "computed_tokens",
    "full_hit_tokens",
    "reused_tokens",
    "hit_rate",
    "full_hit_rate",
    "branch_points",
    "evicted_full_pages",
    "evicted_swa_pages",
    "retractions",
    "launches",
    "uploads",
    "host_us_per_request",
    "peak_full_pages",
    "peak_swa_pages",
    "leaked_pages",
}


def trace_file(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def line(length: int, ids: list[int]) -> str:
    record = {"timestamp": 0, "input_length": length, "output_length": 4, "hash_ids": ids}
    return json.dumps(record)


def failing(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run a command that must fail as bad input does: status 2, one line, on stderr."""
    try:
        status = main(argv)
    except SystemExit as stop:  # argparse
        status = int(str(stop.code))
    out, err = capsys.readouterr()
    assert status == 2
    assert out == ""
    assert "Traceback" not in err
    message = err.strip().splitlines()[-1]
    assert "error: " in message
    return message


def shell(command: str, cwd: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run `command` of bash, with the command line of `kvcache` in place of {}."""
    ours = shlex.join([sys.executable, "-m", "kvcache", *argv])
    return subprocess.run(
        ["bash", "-c", command.format(ours)], capture_output=True, text=True, cwd=cwd, check=False
    )


class TestReplay:
    def test_prints_a_table_and_writes_all_counts(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        report = tmp_path / "out.json"
        assert main([*SMALL, "--json", str(report)]) == 0
        out = capsys.readouterr().out
        counts = json.loads(report.read_text())
        assert counts.keys() >= KEYS
        assert counts["policy"] == "branch,ladder, value"
        assert counts["requests"] == 12
        assert counts["input_tokens"] == 12 * 320
        assert counts["output_tokens"] == 120
        assert counts["hit_rate"] == counts["reused_tokens"] / counts["input_tokens"]
        assert counts["leaked_pages"] == 0
        assert counts["options"]["page_size"] == 16
        assert re.search(r"^requests +12$", out, re.MULTILINE)
        assert re.search(r"^reused tokens +" + f"{counts['reused_tokens']:,}$", out, re.MULTILINE)
        assert re.search(rf"^hit rate +{100 * counts['hit_rate']:.2f} %$", out, re.MULTILINE)

    def test_compares_policies_side_by_side(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        report = tmp_path / "out.json"
        assert main([*SMALL, "--compare", "--checkpoints", "hints", "--json", str(report)]) == 0
        out = capsys.readouterr().out
        runs: dict[str, dict[str, Any]] = json.loads(report.read_text())["runs"]
        assert list(runs) == ["none", "branch", "hints, value", "bound"]
        assert all(run.keys() >= KEYS for run in runs.values())
        rates = [run["hit_rate"] for run in runs.values()]
        assert rates == sorted(rates)
        assert rates[0] < rates[1]
        # 300 shared tokens are 18 pages of 16; all but the first request can reuse them
        assert runs["bound"]["reused_tokens"] == 11 * 288
        assert re.search(r"^ +none +branch +hints, value +bound$", out, re.MULTILINE)
        assert "An infinite cache with full attention reuses 82.50 % of the input" in out

    def test_reads_a_trace(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        path = trace_file(tmp_path / "my.jsonl", line(1024, [0, 1]), line(1024, [0, 2]))
        report = tmp_path / "out.json"
        argv = ["replay", str(path), "--running", "1", "--chunk", "512", "--no-decode"]
        assert main([*argv, "--json", str(report)]) == 0
        counts = json.loads(report.read_text())
        assert counts["trace"] == "my"
        # the first chunk of the first request ends where the second request forks
        assert (counts["reused_tokens"], counts["output_tokens"]) == (512, 0)
        assert capsys.readouterr().out.startswith("my: page 64, window 128, Full unlimited")

    def test_takes_only_the_first_requests_with_a_limit(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        report = tmp_path / "out.json"
        assert main([*SMALL, "--limit", "5", "--json", str(report)]) == 0
        assert json.loads(report.read_text())["requests"] == 5

    def test_full_attention_has_no_swa_pool(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        report = tmp_path / "out.json"
        assert main([*SMALL, "--window", "none", "--json", str(report)]) == 0
        counts = json.loads(report.read_text())
        assert counts["swa_pages"] == 0
        assert counts["reused_tokens"] == counts["full_hit_tokens"] == 11 * 288

    def test_says_which_requests_were_refused_and_why(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([*SMALL, "--full-tokens", "320"]) == 1
        captured = capsys.readouterr()
        assert "12 requests refused: needs more Full pages than the pool has (20)" in captured.out
        assert captured.err == "no request could run: the figures mean nothing\n"

    def test_draws_a_plot(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
        picture = tmp_path / "out.png"
        assert main([*SMALL, "--compare", "--plot", str(picture)]) == 0
        assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        assert [path.name for path in tmp_path.iterdir()] == ["out.png"]

    def test_shows_progress_where_asked(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(SMALL) == 0
        assert capsys.readouterr().err == ""
        assert main([*SMALL, "--progress"]) == 0
        err = capsys.readouterr().err
        assert "branch,ladder, value:" in err
        assert "/12 [" in err


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--page-size", "0"], "page size must be in [1, 1048576], got 0"),
            (["--page-size", "-4"], "page size must be in [1, 1048576], got -4"),
            (["--window", "0"], "window must be in [1, 1073741824], got 0"),
            (["--chunk", "-1"], "chunk must be >= 0, got -1"),
            (["--running", "0"], "running must be in [1, 65536], got 0"),
            (["--limit", "0"], "limit must be >= 1, got 0"),
            (["--seed", "-1"], "seed must be >= 0, got -1"),
            (["--requests", "0"], "requests must be in [1, 16777216], got 0"),
            (
                ["--full-tokens", "15"],
                "Full pool must hold at least one page of 16 tokens, got 15",
            ),
            (["--swa-tokens", "-1"], "SWA pool must be >= 0, got -1"),
            (
                ["--window", "none", "--swa-tokens", "64"],
                "SWA pool: there is none without a window",
            ),
            (
                ["--checkpoints", "forks"],
                "checkpoints must be none or a list of branch, chunks, hints, ladder, every=N, got 'forks'",
            ),
            (["--device", "abacus"], "device must be cpu, cuda or cuda:N, got 'abacus'"),
            (["--arrivals", "--speed", "0"], "speed must be a number > 0, got 0.0"),
            (["--speed", "2"], "--speed: does nothing without --arrivals"),
            (["--step-seconds", "0.02"], "--step-seconds: does nothing without --arrivals"),
            (["--prefill-rate", "9"], "--prefill-rate: does nothing without --arrivals"),
            (["--turns", "8"], "--turns: is for multi-turn, round-robin, not for shared-prompt"),
            (["--depth", "2"], "--depth: is for forest, not for shared-prompt"),
            (["--block-size", "512"], "--block-size: is for a trace, not for a --workload"),
        ],
    )
    def test_impossible_sizes(
        self, capsys: pytest.CaptureFixture[str], options: list[str], message: str
    ) -> None:
        assert failing(capsys, *SMALL, *options) == f"kvcache replay: error: {message}"

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["replay"], "kvcache replay: error: give a TRACE or a --workload, one of them"),
            (
                ["replay", "t.jsonl", "--workload", "forest"],
                "kvcache replay: error: give a TRACE or a --workload, one of them",
            ),
            (
                ["replay", "nowhere.jsonl"],
                "kvcache replay: error: nowhere.jsonl: cannot be read: No such file or directory",
            ),
            (
                ["replay", "t.jsonl", "--question-len", "3"],
                "kvcache replay: error: --question-len: is for a --workload, not for a trace",
            ),
            (
                ["replay", "t.jsonl", "--seed", "0"],
                "kvcache replay: error: --seed: is for a --workload, not for a trace",
            ),
            (
                ["replay", "--workload", "multi-turn", "--requests", "3"],
                "kvcache replay: error: --requests: is for shared-prompt, forest, uniform, templates, "
                "scan, not for multi-turn",
            ),
        ],
    )
    def test_wrong_sources(
        self, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
    ) -> None:
        assert failing(capsys, *argv) == message

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (
                ["replay", "--window", "wide"],
                r"argument --window: invalid int or none value: 'wide'",
            ),
            (["replay", "--full-tokens", "1.5"], r"invalid int or unlimited value: '1.5'"),
            (["replay", "--workload", "chat"], r"argument --workload: invalid choice: 'chat'"),
            (["reply"], r"invalid choice: 'reply'"),
            ([], r"arguments are required: COMMAND"),
        ],
    )
    def test_words_that_argparse_does_not_take(
        self, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
    ) -> None:
        assert message in failing(capsys, *argv)

    def test_a_bad_line_is_named_and_no_output_file_is_touched(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        path = trace_file(tmp_path / "bad.jsonl", line(1024, [0, 1]), line(1024, [0]))
        report, picture = tmp_path / "out.json", tmp_path / "out.png"
        report.write_text("from before")
        message = failing(
            capsys, "replay", str(path), "--json", str(report), "--plot", str(picture)
        )
        assert message == (
            f"kvcache replay: error: {path}:2: hash_ids: must hold 2 block ids for 1024 tokens "
            "in blocks of 512, got 1"
        )
        assert report.read_text() == "from before"
        assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.jsonl", "out.json"]

    @pytest.mark.parametrize("option", ["--json", "--plot"])
    def test_a_place_for_no_file_is_seen_before_the_run(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str
    ) -> None:
        nowhere = tmp_path / "no" / "out.png"
        message = failing(capsys, *SMALL, option, str(nowhere))
        assert message == (
            f"kvcache replay: error: {option}: {nowhere}: there is no folder {nowhere.parent}"
        )
        assert failing(capsys, *SMALL, option, str(tmp_path)).endswith("is a folder")

    def test_a_plot_of_no_known_kind(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
        message = failing(capsys, *SMALL, "--plot", str(tmp_path / "out.txt"))
        assert "out.txt: must end in one of ." in message

    def test_a_plot_without_matplotlib(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
        message = failing(capsys, *SMALL, "--plot", str(tmp_path / "out.png"))
        assert message == (
            "kvcache replay: error: --plot needs matplotlib, which is not installed: "
            "pip install 'kvcache[plot]'"
        )


class TestCommand:
    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as stop:
            main(["--version"])
        assert stop.value.code == 0
        assert capsys.readouterr().out == f"kvcache {kvcache.__version__}\n"

    def test_help_names_all_subcommands(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as stop:
            main(["--help"])
        assert stop.value.code == 0
        out = capsys.readouterr().out
        assert "replay" in out
        assert "validate" in out

    def test_a_reader_that_leaves_early_is_no_error(self, tmp_path: Path) -> None:
        report = tmp_path / "out.json"
        command = "{} | true; exit ${{PIPESTATUS[0]}}"
        done = shell(command, tmp_path, *SMALL, "--json", str(report))
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads(report.read_text())["requests"] == 12

    @pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
    def test_runs_with_closed_streams_as_daemons_have_them(
        self, tmp_path: Path, closed: str
    ) -> None:
        report = tmp_path / "out.json"
        done = shell(f"{{}} {closed}", tmp_path, *SMALL, "--progress", "--json", str(report))
        assert done.returncode == 0
        assert "Traceback" not in done.stderr
        assert json.loads(report.read_text())["requests"] == 12

    @pytest.mark.parametrize(
        ("closed", "argv"),
        [
            ("2>&-", [*SMALL, "--page-size", "0"]),
            ("2>/dev/full", [*SMALL, "--page-size", "0"]),
            ("2>/dev/full", ["reply"]),  # argparse's own error
        ],
    )
    def test_bad_input_has_its_status_where_nobody_can_be_told(
        self, tmp_path: Path, closed: str, argv: list[str]
    ) -> None:
        done = shell(f"{{}} {closed}", tmp_path, *argv)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", "")

    @pytest.mark.parametrize("unbuffered", ["", "1"])
    def test_a_full_disk_behind_stdout_is_one_line(self, tmp_path: Path, unbuffered: str) -> None:
        command = f"PYTHONUNBUFFERED={unbuffered} {{}} >/dev/full"
        done = shell(command, tmp_path, *SMALL)
        assert (done.returncode, done.stderr) == (
            2,
            "kvcache replay: error: stdout: cannot be written: No space left on device\n",
        )

    def test_help_that_cannot_be_printed_is_an_error(self, tmp_path: Path) -> None:
        done = shell("PYTHONUNBUFFERED= {} >/dev/full", tmp_path, "--help")
        assert (done.returncode, done.stderr) == (
            2,
            "kvcache: error: stdout: cannot be written: No space left on device\n",
        )

    def test_runs_as_a_module_with_an_exit_status(self, tmp_path: Path) -> None:
        argv = [sys.executable, "-m", "kvcache", "replay", str(tmp_path / "no.jsonl")]
        done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr == (
            f"kvcache replay: error: {tmp_path / 'no.jsonl'}: cannot be read: "
            "No such file or directory\n"
        )
