"""Plot of a replay: hit rate and pool use over the run. Needs matplotlib, which is optional."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvcache.output import write_figure
from kvcache.replay.bound import BOUND
from kvcache.replay.counters import ReplayResult, Timeline

_COLORS = ("#d95f02", "#1b9e77", "#7570b3", "#666666")


def write_plot(path: Path, title: str, runs: Sequence[tuple[ReplayResult, Timeline]]) -> None:
    """Draw all runs into one file.

    The upper part shows the hit rate of all requests that have ended so far; the lower one how full
    the pools are: all pages in use, and those that running requests hold.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 8), layout="constrained")
    figure.suptitle(title)
    hits, full, swa = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": [2, 1, 1]})
    for (result, timeline), color in zip(runs, _cycle(len(runs)), strict=True):
        x = np.array(timeline.requests)
        inputs = np.maximum(1, np.array(timeline.input_tokens))
        rate = 100 * np.array(timeline.reused_tokens) / inputs
        style = "--" if result.policy == BOUND else "-"
        label = f"{result.policy}: {100 * result.hit_rate:.2f} %"
        hits.plot(x, rate, style, color=color, label=label)
        if result.policy == BOUND:
            continue
        for axes, used, locked, pages in (
            (full, timeline.full_used, timeline.full_locked, result.full_pages),
            (swa, timeline.swa_used, timeline.swa_locked, result.swa_pages),
        ):
            share = 100 / max(1, pages)
            axes.plot(x, share * np.array(used), color=color, label=f"{result.policy}, in use")
            axes.plot(x, share * np.array(locked), ":", color=color, label="held by requests")
    hits.set_ylabel("hit rate so far, %")
    full.set_ylabel("Full pool, %")
    swa.set_ylabel("SWA pool, %")
    swa.set_xlabel("requests that have ended")
    for axes in (hits, full, swa):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    hits.legend(fontsize="small", loc="lower right")
    swa.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=4)
    write_figure(path, figure)


def _cycle(count: int) -> list[str]:
    return [_COLORS[i % len(_COLORS)] for i in range(count)]
