"""What commands print and write: aligned tables, files that are whole or not there, checks beforehand."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
    """Raise InvalidInputError unless `write_file` can write to `path`; touches nothing that is there."""
    if str(path) == "-":
        raise InvalidInputError(f"{name}: must be a file, got '-'; /dev/stdout is one")
    mode = _mode(name, path)
    if stat.S_ISDIR(mode):
        raise InvalidInputError(f"{name}: {path}: is a folder")
    if not _is_replaced(path, mode):
        if not os.access(path, os.W_OK):
            raise InvalidInputError(f"{name}: {path}: cannot be written")
        return
    folder = _target(path).parent
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
    """Write a report as JSON; errors and what happens to what is there: see `write_file`."""
    text = json.dumps(report, indent=2) + "\n"
    write_file(path, lambda partial: partial.write_text(text))


def write_figure(path: Path, figure: Any, dpi: int = 150) -> None:
    """Write a matplotlib figure; see `write_file`."""
    kind = path.suffix.removeprefix(".")
    write_file(path, lambda partial: figure.savefig(partial, dpi=dpi, format=kind))


def write_file(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` make a file, and put it where `path` leads.

    A file, also one behind a link, is replaced whole and keeps its mode: nobody sees half of it. Pipes and
    devices, and the file that stdout or stderr go to, are written into.

    Raises:
        InvalidInputError: It cannot be written, or the pipe has no reader.
    """
    try:
        mode = _mode("output", path)
        if _is_replaced(path, mode):
            _replace(_target(path), mode, write)
        else:
            _write_into(path, write)
    except OSError as error:  # a reader that leaves is one, too: not the one of stdout
        reason = "nobody reads it" if error.errno == errno.ENXIO else error.strerror
        raise InvalidInputError(f"{path}: cannot be written: {reason}") from error


def _mode(name: str, path: Path) -> int:
    """Kind and permissions of what `path` leads to; 0: there is nothing."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return 0
    except OSError as error:  # a loop of links, a file in place of a folder
        raise InvalidInputError(f"{name}: {path}: cannot be written: {error.strerror}") from error


def _target(path: Path) -> Path:
    """Where a link leads, else the path itself."""
    return path.resolve() if path.is_symlink() else path


def _is_replaced(path: Path, mode: int) -> bool:
    return mode == 0 or (stat.S_ISREG(mode) and _open_stream(path) is None)


def _open_stream(path: Path) -> int | None:
    """Descriptor of stdout or stderr if that is where `path` leads: what they print must not get lost."""
    for stream in (sys.stdout, sys.stderr):
        # a stream that is closed, or that is no file
        with suppress(OSError, ValueError, AttributeError):
            if os.path.samestat(os.fstat(stream.fileno()), path.stat()):
                return stream.fileno()
    return None


def _replace(target: Path, mode: int, write: Callable[[Path], object]) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
        partial = Path(folder) / target.name
        write(partial)
        if mode:
            partial.chmod(stat.S_IMODE(mode))
        partial.replace(target)


def _write_into(path: Path, write: Callable[[Path], object]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / path.name
        write(whole)
        with whole.open("rb") as source, open(_opened(path), "wb") as out:
            shutil.copyfileobj(source, out)


def _opened(path: Path) -> int:
    stream = _open_stream(path)
    if stream is not None:
        sys.stdout.flush()
        return os.dup(stream)
    # opening a pipe that has no reader would wait for one; so it fails
    fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    os.set_blocking(fd, True)
    return fd
