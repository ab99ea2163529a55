"""The plot of README.md: hit rate of the demo over its requests, with and without windows kept at forks.

    .venv/bin/python perf/demo_plot.py        # some seconds, and about a minute of compiling the first time

Replays what `make demo` does (kvcache replay --workload shared-prompt --compare) and writes
perf/results/cpu/demo.png. Hit rates are counts: every machine draws the same curves.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from kvcache.output import write_figure
from kvcache.policies.checkpoints import Branch, CheckpointPolicy, Ladder
from kvcache.policies.retention import Lru, Retention, Value
from kvcache.replay.bound import replay_bound
from kvcache.replay.config import EngineConfig
from kvcache.replay.counters import ReplayResult, Timeline
from kvcache.replay.engine import Engine
from kvcache.replay.workloads import WorkloadSizes, make_workload

ROOT = Path(__file__).parents[1]
CONFIG = EngineConfig(running=8, swa_tokens=15_360, cut_chunks=False)  # those of the workload
SIZES = WorkloadSizes()
POLICIES: dict[str, tuple[tuple[CheckpointPolicy, ...], Retention]] = {
    "none": ((), Lru()),
    "branch": ((Branch(),), Lru()),
    "value": ((Branch(), Ladder()), Value()),
}


def runs() -> dict[str, tuple[ReplayResult, Timeline]]:
    """Replay the workload under each policy, and the bound."""
    trace = make_workload("shared-prompt", SIZES, seed=0)
    found = {}
    for name, (checkpoints, retention) in POLICIES.items():
        config = replace(CONFIG, checkpoints=checkpoints, retention=retention)
        engine = Engine(trace, config, policy=name)
        found[name] = engine.run(), engine.timeline
        engine.close()
    found["bound"] = replay_bound(trace, page_size=CONFIG.page_size)
    return found


def plot(found: dict[str, tuple[ReplayResult, Timeline]], path: Path) -> None:
    """Draw the hit rate so far of each run, named at its end."""
    figure = Figure(figsize=(7.6, 3.2), layout="constrained")
    axes = figure.subplots()
    styles = {
        "bound": ("#888888", "--", "bound: infinite cache, full attention", (-1, 9)),
        "branch": ("#7570b3", "-", "and at forks", (-1, -28)),
        "value": ("#1b9e77", "-", "kvcache's default", (-1, -13)),
        "none": ("#d95f02", "-", "windows kept at ends of chunks and prompts alone", (-1, 7)),
    }
    for name, (color, style, words, shift) in styles.items():
        result, timeline = found[name]
        x = np.array(timeline.requests)
        rate = 100 * np.array(timeline.reused_tokens) / np.maximum(1, timeline.input_tokens)
        axes.plot(x, rate, style, color=color, lw=2, clip_on=False, zorder=3)
        axes.annotate(
            f"{words}: {100 * result.hit_rate:.2f} %",
            (x[-1], rate[-1]),
            xytext=shift,
            textcoords="offset points",
            ha="right",
            va="center",
            color=color,
            fontsize=9,
        )
    axes.set(
        xlim=(0, SIZES.requests), ylim=(0, 108), xlabel="requests", ylabel="tokens reused so far, %"
    )
    axes.set_yticks(range(0, 101, 20))
    axes.set_title(
        f"{SIZES.requests} questions of {SIZES.question_len} tokens behind one system prompt of "
        f"{SIZES.system_len:,}; page {CONFIG.page_size}, window {CONFIG.window}",
        fontsize=9,
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    write_figure(path, figure, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=ROOT / "perf/results/cpu/demo.png")
    args = parser.parse_args()
    plot(runs(), args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
