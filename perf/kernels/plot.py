"""Plots of `kvcache bench`, a file for each benchmark. Needs matplotlib, which is optional."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcache.bench.case import OURS, SGLANG, TORCH, Bench
from kvcache.bench.measure import Row
from kvcache.output import write_figure

_STYLES = {
    OURS: ("#1b9e77", "o", "ours"),
    TORCH: ("#7570b3", "s", "torch, vectorised"),
    SGLANG: ("#d95f02", "^", "SGLang's sequence"),
}


def write_plot(path: Path, bench: Bench, rows: Sequence[Row], *, label: str, copy: float) -> None:
    """Draw the time of each version over the batch, a panel for each page size, and the copy's floor.

    Args:
        label: Machine and command, for the title.
        copy: GB/s of a plain copy; the dotted line is the time it takes for the least bytes.
    """
    from matplotlib.figure import Figure

    page_sizes = sorted({row.page_size for row in rows})
    figure: Any = Figure(figsize=(max(3 * len(page_sizes) + 0.6, 7.2), 3.7), layout="constrained")
    figure.suptitle(f"{bench.name}: {bench.title}\n{label}", fontsize=9)
    panels = figure.subplots(1, len(page_sizes), sharey=True, squeeze=False)[0]
    for axes, page_size in zip(panels, page_sizes, strict=True):
        here = [row for row in rows if row.page_size == page_size]
        for version, (color, marker, name) in _STYLES.items():
            points = sorted((row.batch, row.us) for row in here if row.version == version)
            if points:
                axes.plot(*zip(*points, strict=True), marker=marker, ms=4, color=color, label=name)
        floor = sorted((r.batch, r.min_bytes / copy / 1e3) for r in here if r.version == OURS)
        axes.plot(*zip(*floor, strict=True), ":", color="#666666", label="copy of the least bytes")
        axes.set(xscale="log", yscale="log", title=f"P = {page_size}", xlabel="requests")
        batches = sorted({row.batch for row in here})
        axes.set_xticks(batches, [str(b) for b in batches], minor=False)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.title.set_fontsize(9)
    panels[0].set_ylabel("microseconds")
    panels[0].yaxis.set_major_formatter(
        lambda value, _: f"{value:,g}" if value < 1e6 else f"{value:,.0f}"
    )
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), fontsize=8)
    write_figure(path, figure, dpi=80)
