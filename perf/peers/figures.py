"""What README and docs show of `peers.json`: tables of ratios, as ranges over its runs, and the bar plot.

    .venv/bin/python perf/peers/figures.py                 # prints the tables, draws peers.png; times nothing
    .venv/bin/python perf/peers/figures.py --plot-only build/peers/peers.json

A file may hold several runs of the same page size and window (`make bench-peers BENCH_ARGS=--append`). Ratios
are of the medians of one run; of several, the table gives the median ratio and the range.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
OURS, RUST, PYTHON = "kvcache", "SGLang Rust", "SGLang Python"
PARTS = ("match", "admit", "finish")


class Shown(NamedTuple):
    """A case in words, and where it is found: with many requests in a call, and with one."""

    words: str
    many: str  # case of the JSON; empty: none
    one: str = ""


SHOWN = (
    Shown("W1: match 4,096 tokens, hot", "W1 match hot, batch 64", "W1 match hot, batch 1"),
    Shown("W1: match 4,096 tokens, cold", "W1 match cold, batch 64", "W1 match cold, batch 1"),
    Shown(
        "W2: admit, 4,096 tokens bound", "W2 admit 4,096 tokens", "W2 admit 4,096 tokens, batch 1"
    ),
    Shown(
        "W2: commit, 2,048 of 4,096 tokens new",
        "W2 commit 2,048 new tokens",
        "W2 commit 2,048 new tokens, batch 1",
    ),
    Shown(
        "W2: finish, 2,048 of 4,096 tokens new",
        "W2 finish 2,048 new tokens",
        "W2 finish 2,048 new tokens, batch 1",
    ),
    Shown("W3: evict one tail of 64 tokens", "", "W3 evict one tail"),
    Shown("W3: evict 1,000 such tails", "W3 evict 1,000 tails"),
    Shown(
        "W4: one pass that frees what left the window, 256 requests",
        "W4 out-of-window pass, 256 requests",
    ),
    Shown("W5: turn 30 of a conversation: match, admit, finish", "W5 turn 30"),
    Shown("W6: a whole request behind a shared prompt", "W6 shared prompt, whole request"),
    Shown("W7: a scheduler's step, 256 running, 8 join, 8 end", "W7 scheduler step"),
    Shown("W8: match again, a queue of 1,000", "W8 re-match, queue of 1,000"),
)


def us_of(run: dict[str, Any]) -> Callable[[str, str], float | None]:
    """Return a function of (case, side): median us per request in a run, or None; W5 adds up its parts."""
    cases = run["cases"]

    def us(case: str, side: str) -> float | None:
        if case.startswith("W5 turn") and "," not in case:
            parts = [us(f"{case}, {part}", side) for part in PARTS]
            return None if None in parts else sum(part for part in parts if part is not None)
        found = cases.get(case, {}).get(side)
        return None if found is None else float(found["us_cpu_median"])

    return us


def ratios(runs: list[dict[str, Any]], case: str, side: str = RUST) -> list[float]:
    """Return how many times faster we are than `side`, of every run that has the case on both."""
    found = []
    for us in map(us_of, runs):
        theirs, ours = us(case, side), us(case, OURS)
        if theirs is not None and ours:
            found.append(theirs / ours)
    return found


def as_times(ratio: float) -> str:
    """Return two or more digits of a ratio."""
    return f"{ratio:.1f}" if ratio < 9.95 else f"{ratio:,.0f}"


def as_range(values: list[float]) -> str:
    """Return `16 to 20`, or one number where all round to it; one decimal below 10."""
    texts = [as_times(x) for x in (min(values), max(values))]
    return " to ".join(dict.fromkeys(texts))


def ranges(found: dict[str, Any]) -> str:
    """Return the table of README.md: times faster than SGLang's Rust core, over all runs of the file."""
    lines = [
        "| times faster than SGLang's Rust core | many requests a call | one request a call |",
        "| --- | --: | --: |",
    ]
    for shown in SHOWN:
        cells = [ratios(found["runs"], case) for case in (shown.many, shown.one)]
        if any(cells):
            texts = [as_range(cell) if cell else "" for cell in cells]
            lines.append(f"| {shown.words} | {' | '.join(texts)} |")
    return "\n".join(lines)


def summary(found: dict[str, Any]) -> str:
    """Return the table of docs/benchmarks.md: us of the first kind of run, and ratios of each kind."""
    kinds = kinds_of(found)
    heads = [f"P = {page}, W = {window}" for page, window in kinds]
    lines = [
        f"| us per request, {heads[0]} | SGLang Python | SGLang Rust | kvcache "
        f"| times faster than Rust | {' | '.join(heads[1:])} |".replace("|  |", "|"),
        f"| --- | {' | '.join(['--:'] * (3 + len(heads)))} |",
    ]
    first = [us_of(run) for run in next(iter(kinds.values()))]
    for shown in SHOWN:
        for case, size in ((shown.many, "many"), (shown.one, "one")):
            if not case or not ratios(found["runs"], case):
                continue
            by_side = [
                [x for x in (us(case, side) for us in first) if x is not None]
                for side in (PYTHON, RUST, OURS)
            ]
            cells = [f"{statistics.median(x):,.2f}" if x else "" for x in by_side]
            per_kind = [ratios(runs, case) for runs in kinds.values()]
            cells += [as_range(x) if x else "" for x in per_kind]
            words = f"{shown.words}; one request" if size == "one" and shown.many else shown.words
            lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(lines)


def kinds_of(found: dict[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Return the runs by (page size, window), in the order of the file."""
    kinds: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for run in found["runs"]:
        kinds.setdefault((run["page_size"], run["window"]), []).append(run)
    return kinds


def plot(found: dict[str, Any], path: Path) -> None:
    """Draw how many times faster we are than each core: a panel for each page size and window."""
    from matplotlib.figure import Figure

    kinds = kinds_of(found)
    bars = [(case, words) for case, words in _bars() if ratios(found["runs"], case)]
    columns = min(2, len(kinds))
    rows = -(-len(kinds) // columns)
    figure = Figure(
        figsize=(4.2 * columns + 4.2, 0.36 * len(bars) * rows + 1.9), layout="constrained"
    )
    figure.suptitle(_title(found), fontsize=10)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for panel, ((page, window), runs) in zip(panels.flat, kinds.items(), strict=False):
        for offset, side, color in ((-0.2, RUST, "#b05030"), (0.2, PYTHON, "#c0a060")):
            for y, (case, _) in enumerate(bars):
                values = ratios(runs, case, side)
                if not values:
                    continue
                middle = statistics.median(values)
                label = f"faster than {side}" if y == 0 else None
                panel.barh(y + offset, middle - 1, left=1, height=0.36, color=color, label=label)
                if len(values) > 1:
                    panel.plot([min(values), max(values)], [y + offset] * 2, color="black", lw=1)
                # in a column of their own, where no bar gets to
                at = {"ha": "right", "va": "center", "fontsize": 7, "color": color}
                panel.text(9000, y + offset, as_times(middle), **at)
        panel.set(xscale="log", xlim=(1, 10_000), ylim=(len(bars) - 0.5, -0.5))
        panel.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"], fontsize=8)
        panel.set_title(f"page size {page}, window {window}", fontsize=9)
        panel.set_yticks(range(len(bars)), [words for _, words in bars], fontsize=8)
        panel.grid(axis="x", alpha=0.3)
        panel.set_axisbelow(True)
    for panel in panels[-1]:
        panel.set_xlabel("times less CPU time per request", fontsize=8)
    handles, names = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=2, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _bars() -> list[tuple[str, str]]:
    """Return (case, words) of every bar."""
    bars = []
    for shown in SHOWN:
        if shown.many:
            several = bool(shown.one)
            bars.append((shown.many, f"{shown.words}{'; 64 requests' if several else ''}"))
        if shown.one:
            bars.append((shown.one, f"{shown.words}{'; one request' if shown.many else ''}"))
    return bars


def _title(found: dict[str, Any]) -> str:
    here = found["machine"]
    several = max(len(runs) for runs in kinds_of(found).values())
    of = f", median and range of {several} runs" if several > 1 else ""
    return (
        f"kvcache beside SGLang {here['sglang']}: times less CPU time per request{of}\n"
        f"{here['cpu']}, {here.get('date', 'no date')}, Python {here['python']}, "
        f"torch {here['torch']}, numba {here['numba']}; no GPU"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = ROOT / "perf" / "results" / "cpu" / "peers.json"
    parser.add_argument("json", nargs="?", type=Path, default=default)
    parser.add_argument("--plot-only", action="store_true", help="print no tables")
    args = parser.parse_args()
    found = json.loads(args.json.read_text())
    if not args.plot_only:
        print(f"{ranges(found)}\n\n{summary(found)}\n")
    path = args.json.with_suffix(".png")
    plot(found, path)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
