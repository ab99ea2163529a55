"""Tables and JSON of a run, and which of the numbers of issue 4 hold; figures.py draws the JSON."""

from __future__ import annotations

import json
import os
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from timing import Bench

from kvcache.bench.machine import describe_machine, describe_versions

OURS, RUST, PYTHON = "kvcache", "SGLang Rust", "SGLang Python"
PARTS = ("match", "admit", "finish")


class Goal(NamedTuple):
    """At least `factor` times faster than SGLang's Rust core."""

    case: str
    factor: float | None  # None: shown, but nothing to reach


GOALS = (
    Goal("W1 match hot, batch 64", 25),
    # memcmp of the same bytes is the limit here, for us and for SGLang (perf/limit.py)
    Goal("W1 match cold, batch 64", None),
    Goal("W1 match hot, batch 1", 5),
    Goal("W1 match cold, batch 1", 5),
    Goal("W2 admit 4,096 tokens", 10),
    Goal("W2 commit 2,048 new tokens", 20),
    Goal("W2 finish 2,048 new tokens", 20),
    Goal("W3 evict one tail", 25),
    Goal("W3 evict 1,000 tails", 100),
    Goal("W4 out-of-window pass, 256 requests", 100),
    Goal("W5 turn 30", 30),
    Goal("W7 scheduler step", 20),
)
MOST_EVICT_GROWTH = 1.2  # one tail at 50,000 leaves against 5,000
MOST_REMATCH_US = 0.35


def medians(bench: Bench) -> dict[str, dict[str, float]]:
    """Return case -> side -> median us per request; the parts of a turn of W5 are added up."""
    table = {
        case: {side: samples.median for side, samples in sides.items()}
        for case, sides in bench.samples.items()
    }
    for turn in (1, 10, 20, 30):
        parts = [table.get(f"W5 turn {turn}, {part}") for part in PARTS]
        if all(parts):
            table[f"W5 turn {turn}"] = {
                side: sum(part[side] for part in parts if part) for side in parts[0] or {}
            }
    return table


def checks(bench: Bench) -> list[tuple[str, float, str, bool]]:
    """Return (what, value, goal, whether it holds) of every number that this run can check."""
    table = medians(bench)
    found = []
    for goal in GOALS:
        us = table.get(goal.case, {})
        if goal.factor is not None and OURS in us and RUST in us:
            ratio = us[RUST] / us[OURS]
            found.append((goal.case, ratio, f">= {goal.factor:g}x Rust", ratio >= goal.factor))
    small, large = (
        table.get(f"W3 evict one tail of {leaves}", {}).get(OURS) for leaves in ("5,000", "50,000")
    )
    if small and large:
        growth = large / small
        found.append(
            (
                "W3 evict one tail, 50,000 / 5,000 leaves",
                growth,
                f"<= {MOST_EVICT_GROWTH}",
                growth <= MOST_EVICT_GROWTH,
            )
        )
    again = table.get("W8 re-match, queue of 1,000", {}).get(OURS)
    if again:
        found.append(
            ("W8 re-match, us", again, f"<= {MOST_REMATCH_US} us", again <= MOST_REMATCH_US)
        )
    rates = [bench.notes.get(f"W6 hit rate, {side}") for side in (OURS, RUST)]
    if all(r is not None for r in rates):
        ratio = rates[0] / rates[1] if rates[1] else float("inf")
        found.append(("W6 hit rate, ours / SGLang's", ratio, ">= 1", ratio >= 1))
    memory = bench.notes.get(f"memory, {OURS}")
    if memory:
        tokens = memory["cached_tokens"]
        beyond = memory["tree_bytes"] - 4 * tokens - 128 * memory["nodes"]
        most = 5.0 if bench.page_size == 1 else 0.5
        value = beyond / tokens
        found.append(
            (
                "memory, bytes per cached token beyond 4 + 128 a node",
                value,
                f"<= {most}",
                value <= most,
            )
        )
    return found


def machine() -> dict[str, str]:
    """Return what the numbers depend on."""
    here, versions = describe_machine("cpu"), describe_versions()
    return {
        "cpu": f"{here['cpu']}, {here['cores']} cores",
        "date": time.strftime("%Y-%m-%d"),
        "load": ", ".join(f"{x:.1f}" for x in os.getloadavg()),
        "python": versions["python"],
        "sglang": version("sglang"),
        **{name: versions[name] for name in ("torch", "numpy", "numba")},
    }


def markdown(bench: Bench) -> str:
    """Return the table of one page size and window."""
    lines = [
        f"### page size {bench.page_size}, window {bench.window}",
        "",
        "| microseconds per request | SGLang Python | SGLang Rust | kvcache | Python / ours | Rust / ours |",
        "| --- | --: | --: | --: | --: | --: |",
    ]
    for case, us in medians(bench).items():
        if case.startswith("W5 turn") and "," in case and "turn 30" not in case:
            continue
        cells = [f"{us[side]:,.2f}" if side in us else "" for side in (PYTHON, RUST, OURS)]
        ratios = [
            f"{us[side] / us[OURS]:,.1f}" if side in us and OURS in us else ""
            for side in (PYTHON, RUST)
        ]
        lines.append(f"| {case} | {' | '.join(cells)} | {' | '.join(ratios)} |")
    held = [bench.notes.get(f"memory, {side}") for side in (PYTHON, RUST, OURS)]
    per_token = [f"{m['tree_bytes'] / m['cached_tokens']:,.1f}" if m else "" for m in held]
    lines += [f"| host bytes per cached token | {' | '.join(per_token)} | | |", ""]
    for what, value, goal, holds in checks(bench):
        lines.append(f"- {'holds' if holds else 'SHORT'}: {what}: {value:,.2f} (goal {goal})")
    for name, value in bench.notes.items():
        lines.append(f"- {name}: {value:.4g}" if isinstance(value, float) else f"- {name}: {value}")
    return "\n".join(lines)


def as_json(benches: list[Bench], notes: dict[str, Any]) -> dict[str, Any]:
    """Return all figures of a run."""
    return {
        "machine": machine(),
        **notes,
        "runs": [
            {
                "page_size": bench.page_size,
                "window": bench.window,
                "cases": {
                    case: {side: samples.as_json() for side, samples in sides.items()}
                    for case, sides in bench.samples.items()
                },
                "notes": bench.notes,
                "checks": [
                    {"what": what, "value": value, "goal": goal, "holds": holds}
                    for what, value, goal, holds in checks(bench)
                ],
            }
            for bench in benches
        ],
    }


def write_json(path: Path, found: dict[str, Any], *, append: bool = False) -> dict[str, Any]:
    """Write the figures, with `append` beside the runs that the file has; return all of it."""
    if append and path.exists():
        before = json.loads(path.read_text())
        found = {**found, "runs": before["runs"] + found["runs"]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    return found
