"""What commands print and write: aligned tables, files that are whole or not there, checks beforehand."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcache.errors import InvalidInputError


def align(lines: Sequence[Sequence[str] | None]) -> str:
    """Align cells: the first column to the left, the others to the right; None is an empty line."""
    full = [line for line in lines if line is not None]
    widths = [max(len(line[i]) for line in full) for i in range(len(full[0]))]
    out = []
    for line in lines:
        if line is None:
            out.append("")
            continue
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        out.append("  ".join(cells).rstrip())
    return "\n".join(out)


def check_writable(name: str, path: Path) -> None:
    """Raise InvalidInputError unless a file can be put at `path`; touches nothing that is there."""
    folder = path.parent
    if path.is_dir():
        raise InvalidInputError(f"{name}: {path}: is a folder")
    if not folder.is_dir():
        raise InvalidInputError(f"{name}: {path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise InvalidInputError(f"{name}: {path}: folder {folder} cannot be written")


def check_plot(name: str, path: Path) -> None:
    """Raise InvalidInputError unless matplotlib is there and can write this kind of file."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise InvalidInputError(
            f"{name} needs matplotlib, which is not installed: pip install 'kvcache[plot]'"
        ) from error
    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise InvalidInputError(f"{name}: {path}: must end in one of .{', .'.join(kinds)}")


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    """Write the report whole or not at all."""
    text = json.dumps(report, indent=2) + "\n"
    replace_file(path, lambda partial: partial.write_text(text))


def write_figure(path: Path, figure: Any, dpi: int = 150) -> None:
    """Write a matplotlib figure whole or not at all."""
    kind = path.suffix.removeprefix(".")
    replace_file(path, lambda partial: figure.savefig(partial, dpi=dpi, format=kind))


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` make a file, then move it to `path`: nobody sees half of it."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as folder:
        partial = Path(folder) / path.name
        write(partial)
        partial.replace(path)
