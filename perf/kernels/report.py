"""Reports of `kvcache bench`: a table for each benchmark, and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kvcache.bench.case import OURS, SGLANG, TORCH, Bench
from kvcache.bench.measure import Row
from kvcache.bench.timing import CPU, GRAPH_COLD, GRAPH_HOT, HOST, MODES, WALL
from kvcache.output import align

CPU_LABEL = "CPU twin, no GPU here"
_NOT_THERE = "-"


def rounded(value: float) -> str:
    """Return a number with three digits that count."""
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def by_size(rows: Sequence[Row]) -> list[dict[str, Row]]:
    """Return the rows of one benchmark, a dict by version for each size."""
    found: dict[tuple[int, int, int], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row.page_size, row.batch, row.tokens), {})[row.version] = row
    return [found[key] for key in sorted(found)]


def _cell(row: Row | None, mode: str) -> str:
    if row is None or mode not in row.timings:
        return _NOT_THERE
    timing = row.timings[mode]
    return rounded(timing.best_us if mode == CPU else timing.us)


def _times(other: Row | None, ours: Row, mode: str) -> str:
    """How many times as long as ours another version takes."""
    if other is None:
        return _NOT_THERE
    a, b = other.timings[mode], ours.timings[mode]
    ratio = a.best_us / b.best_us if mode == CPU else a.us / b.us
    return f"{rounded(ratio)}x"


def _cpu_lines(rows: Sequence[Row], copy: float) -> list[list[str]]:
    lines = [
        [
            "P",
            "B",
            "least bytes",
            "ours us",
            "GB/s",
            "of memcpy",
            "torch us",
            "",
            "ops",
            "SGLang us",
            "",
            "ops",
        ],
    ]
    for versions in by_size(rows):
        ours = versions[OURS]
        line = [str(ours.page_size), str(ours.batch), f"{ours.min_bytes:,}", _cell(ours, CPU)]
        line += [rounded(ours.gb_per_s), f"{100 * ours.gb_per_s / copy:.0f} %"]
        for name in (TORCH, SGLANG):
            other = versions.get(name)
            ops = f"{other.launches:,}" if other else _NOT_THERE
            line += [_cell(other, CPU), _times(other, ours, CPU), ops]
        lines.append(line)
    return lines


def _gpu_lines(rows: Sequence[Row], copy: float) -> list[list[str]]:
    lines = [
        [
            *(
                "P",
                "B",
                "least bytes",
                "launches",
                "cold us",
                "hot us",
                "GB/s cold",
                "of copy",
                "call us",
            ),
            *("wall us", "torch cold", "wall", "", "ops", "SGLang wall", "", "ops"),
        ]
    ]
    for versions in by_size(rows):
        ours = versions[OURS]
        line = [str(ours.page_size), str(ours.batch), f"{ours.min_bytes:,}", str(ours.launches)]
        line += [_cell(ours, GRAPH_COLD), _cell(ours, GRAPH_HOT), rounded(ours.gb_per_s)]
        line += [f"{100 * ours.gb_per_s / copy:.0f} %", _cell(ours, HOST), _cell(ours, WALL)]
        for name in (TORCH, SGLANG):
            other = versions.get(name)
            line += [_cell(other, GRAPH_COLD)] if name == TORCH else []
            ops = f"{other.launches:,}" if other else _NOT_THERE
            line += [_cell(other, WALL), _times(other, ours, WALL), ops]
        lines.append(line)
    return lines


def table(bench: Bench, rows: Sequence[Row], copy: float) -> str:
    """Return the table of one benchmark: a line for each size.

    Args:
        copy: GB/s of a plain copy on this device.
    """
    on_cpu = CPU in rows[0].timings
    lines = (_cpu_lines if on_cpu else _gpu_lines)(rows, copy)
    label = f" [{CPU_LABEL}]" if on_cpu else ""
    return f"{bench.name}: {bench.title}{label}\n{align(lines)}"


def legend(modes: Sequence[str], copy: float) -> str:
    """Return what the columns mean."""
    if CPU in modes:
        times = (
            "us: CPU time of one thread, best of the repeats. "
            f"memcpy: {rounded(copy)} GB/s, read and write counted."
        )
    else:
        times = (
            "cold, hot: replay of a CUDA graph, L2 flushed or not; call: until the call returns; wall: until "
            f"the device is idle; medians, us. copy: {rounded(copy)} GB/s, read and write counted."
        )
    return (
        f"P: tokens per page, B: requests, least bytes: what the job must move. {times}\n"
        "ops: torch operations that do work, each one launch or more on a GPU; ours: one launch, `decode` 4."
    )


def as_json(
    rows: Sequence[Row],
    *,
    machine: dict[str, Any],
    versions: dict[str, str],
    command: str,
    copy: float,
) -> dict[str, Any]:
    """Return the report."""
    modes = sorted({mode for row in rows for mode in row.timings})
    return {
        "command": command,
        "label": CPU_LABEL if modes == [CPU] else machine.get("gpu", ""),
        "machine": machine,
        "versions": versions,
        "copy_gb_per_s": copy,
        "modes": {mode: MODES[mode] for mode in modes},
        "rows": [row.as_dict() for row in rows],
    }


def as_text(report: dict[str, Any]) -> str:
    """Return the report as JSON, a line for each row."""
    head = json.dumps({**report, "rows": []}, indent=2)
    rows = ",\n".join(f"    {json.dumps(row)}" for row in report["rows"])
    return head.replace('"rows": []', f'"rows": [\n{rows}\n  ]') + "\n"
