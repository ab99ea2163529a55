"""The number goals of a GPU, read from the rows that `kvcache bench --json` wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

# a row of the JSON
Row = dict[str, Any]


@dataclass(frozen=True)
class Goal:
    """A bound on one figure.

    Attributes:
        name: What is bounded.
        report: Name of the bench run whose rows have it (gpu_check.BENCH_RUNS).
        bench, batch, page_size: Which row of ours.
        figure: The number out of the row; gets the row and the GB/s of a plain copy.
        unit: Of the number.
        limit: The bound, inclusive.
        at_least: Whether it is a lower bound.
    """

    name: str
    report: str
    bench: str
    batch: int
    page_size: int
    figure: Callable[[Row, float], float]
    unit: str
    limit: float
    at_least: bool = False


class Result(NamedTuple):
    """How a goal came out."""

    name: str
    value: float | None  # None: no such figure
    unit: str
    limit: str  # in words
    holds: bool


def _hot_us(row: Row, copy: float) -> float:
    return float(row["timings"]["graph_hot"]["us"])


def _launches(row: Row, copy: float) -> float:
    return float(row["launches"])


def _copy_share(row: Row, copy: float) -> float:
    """Least bytes over time with a cold L2, as a share of a plain copy."""
    cold = float(row["timings"]["graph_cold"]["us"])
    return 100 * float(row["min_bytes"]) / cold / 1e3 / copy


GOALS = (
    Goal("out-of-window pass, 256 rows, P=64: launches", "p64", "slide", 256, 64, _launches, "", 1),
    Goal(
        "out-of-window pass, 256 rows, P=64: time, hot", "p64", "slide", 256, 64, _hot_us, "us", 10
    ),
    Goal(
        "translate, 16 M slots", "slots", "translate", 1024, 64, _copy_share, "% of copy", 70, True
    ),
    Goal(
        "token-slot view, 16 M slots",
        *("slots", "fill_indices_slots_full", 1024, 64, _copy_share, "% of copy", 70, True),
    ),
    Goal(
        "page-table view, 16 M pages",
        *("pages", "fill_table_full", 1024, 1, _copy_share, "% of copy", 70, True),
    ),
    Goal(
        "apply on segments of 8,192 pages",
        *("pages", "apply_bind", 1024, 1, _copy_share, "% of copy", 70, True),
    ),
    Goal("device match, 256 x 4,096: launches", "match", "match", 256, 64, _launches, "", 1),
    Goal("device match, 256 x 4,096: time, hot", "match", "match", 256, 64, _hot_us, "us", 60),
    Goal(
        "device match, compare path, 1,024 x 16,384",
        *("compare", "match", 1024, 64, _copy_share, "% of copy", 50, True),
    ),
    Goal(
        "decode step with two tables, B=256, P=64: launches",
        "p64",
        "decode",
        256,
        64,
        _launches,
        "",
        4,
    ),
)


def judge(goal: Goal, report: dict[str, Any] | None) -> Result:
    """Return how a goal came out in the report of a bench run, None if that run gave none."""
    limit = f"{'>=' if goal.at_least else '<='} {goal.limit:g} {goal.unit}".rstrip()
    rows = [
        row
        for row in (report or {}).get("rows", ())
        if row["version"] == "ours"
        and (row["bench"], row["batch"], row["page_size"])
        == (goal.bench, goal.batch, goal.page_size)
    ]
    try:
        value = goal.figure(rows[0], float((report or {})["copy_gb_per_s"]))
    except (IndexError, KeyError):
        return Result(goal.name, None, goal.unit, limit, False)
    holds = value >= goal.limit if goal.at_least else value <= goal.limit
    return Result(goal.name, value, goal.unit, limit, holds)


def judge_all(reports: dict[str, dict[str, Any]]) -> list[Result]:
    """Return how all goals came out."""
    return [judge(goal, reports.get(goal.report)) for goal in GOALS]


def as_markdown(results: Sequence[Result]) -> str:
    """Return the goals as a table."""
    lines = ["| goal | limit | measured | |", "| --- | --- | --- | --- |"]
    for result in results:
        value = "-" if result.value is None else f"{result.value:.1f} {result.unit}".rstrip()
        verdict = "holds" if result.holds else "missed"
        lines.append(f"| {result.name} | {result.limit} | {value} | {verdict} |")
    return "\n".join(lines)
