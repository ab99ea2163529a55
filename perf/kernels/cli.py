"""`kvcache bench`: each kernel against plain torch and against SGLang's sequence of operations."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcache.bench.case import Bench, Size
    from kvcache.bench.measure import Row
    from kvcache.bench.timing import CpuTimer, GpuTimer

    _Draw = Callable[[Bench, list[Row], str, float], None]

# one file each, in the order of the tables
KERNELS = (
    "extend",
    "step",
    "advance",
    "slide",
    "apply",
    "translate",
    "fill_table",
    "fill_indices",
    "decode_step",
    "decode_slide",
    "decode",
    "match",
    "bind_match",
    "update_mirror",
)
_BATCHES = (1, 16, 256, 1024)
_PAGE_SIZES = (1, 16, 64, 256)
_QUICK_BATCHES, _QUICK_PAGE_SIZES = (1, 64), (16,)
_TOKENS, _QUICK_TOKENS = 1024, 512
# milliseconds for the repeats of one version in one mode
_BUDGET, _QUICK_BUDGET = 20.0, 4.0
_MOST_BATCH, _MOST_PAGE_SIZE, _MOST_TOKENS = 2**16, 2**12, 2**20
_DESCRIPTION = """\
Time the device operations beside the straightforward torch version and beside the sequence of tensor
operations that SGLang does for the same job. All versions must give the same result first; where they do
not, the case is not timed and the exit status is 1. On a machine without a GPU the CPU twins are timed, and
the tables say so.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "bench",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "kernel",
        nargs="*",
        metavar="KERNEL",
        help=f"default: all. {', '.join(KERNELS)}",
    )
    parser.add_argument(
        "--quick", action="store_true", help="two batches, one page size, few repeats"
    )
    for option, default, quick in (
        ("batch", _BATCHES, _QUICK_BATCHES),
        ("page-size", _PAGE_SIZES, _QUICK_PAGE_SIZES),
    ):
        shown, shown_quick = (" ".join(map(str, values)) for values in (default, quick))
        text = f"default: {shown}; --quick: {shown_quick}"
        parser.add_argument(f"--{option}", type=int, nargs="+", metavar="N", help=text)
    parser.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help="of the longest request; default: 1024; --quick: 512",
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1; default: cuda where there is one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write bench.json there, and a PNG for each benchmark if matplotlib is installed",
    )


def run(args: argparse.Namespace) -> int:
    """Carry out `kvcache bench`; returns the exit status: 1 if versions of a job differ.

    Raises:
        InvalidInputError: Bad input; nothing was written.
    """
    # nothing that needs torch or numba is imported before a benchmark is asked for
    import torch

    from kvcache.bench.timing import CpuTimer, GpuTimer
    from kvcache.output import check_writable

    device = _device(args.device)
    benches = load(args.kernel)
    sizes = _sizes(args, device)
    draw = _check_out(args.out)
    if args.json is not None:
        check_writable("--json", args.json)
    budget = _QUICK_BUDGET if args.quick else _BUDGET
    if device != "cpu":
        return _measure(args, benches, sizes, GpuTimer(budget, device=device), draw)
    # the twins run on one core, and a pool of threads waits long on a busy machine
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(args, benches, sizes, CpuTimer(budget), draw)
    finally:
        torch.set_num_threads(threads)


def _measure(
    args: argparse.Namespace,
    benches: list[Bench],
    sizes: list[Size],
    timer: CpuTimer | GpuTimer,
    draw: _Draw | None,
) -> int:
    from kvcache.allocation import allocating
    from kvcache.bench import report
    from kvcache.bench.case import MismatchError
    from kvcache.bench.machine import command_line, describe_machine, describe_versions, one_line
    from kvcache.bench.measure import measure
    from kvcache.output import write_file

    machine = describe_machine(sizes[0].device)
    copy = timer.copy_gb_per_s()
    print(one_line(machine))
    print(report.legend(timer.modes, copy), flush=True)

    def show(bench: Bench, rows: list[Row]) -> None:
        print(f"\n{report.table(bench, rows, copy)}", flush=True)
        if draw is not None:
            draw(bench, rows, f"{one_line(machine)}; {command_line()}", copy)

    try:
        with allocating():
            rows = measure(benches, sizes, timer, on_bench=show)
    except MismatchError as error:
        print(f"kvcache bench: {error}; it was not timed", file=sys.stderr)
        return 1
    found = report.as_json(
        rows, machine=machine, versions=describe_versions(), command=command_line(), copy=copy
    )
    text = report.as_text(found)
    for path in filter(None, (args.json, args.out / "bench.json" if args.out else None)):
        write_file(path, lambda partial: partial.write_text(text))
        print(f"\nwrote {path}")
    return 0


def load(kernels: list[str]) -> list[Bench]:
    """Return the benchmarks of these kernels, all if none is named.

    Raises:
        InvalidInputError: An unknown kernel.
    """
    from kvcache.errors import InvalidInputError

    for name in kernels:
        if name not in KERNELS:
            raise InvalidInputError(f"KERNEL must be one of {', '.join(KERNELS)}, got {name!r}")
    benches: list[Bench] = []
    for name in dict.fromkeys(kernels or KERNELS):
        benches += import_module(f"kvcache.bench.{name}").BENCHES
    return benches


def _device(given: str | None) -> str:
    """Return the device to measure on, made the current one if it is a GPU."""
    import torch

    from kvcache.checks import check_device

    if given is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    check_device("--device", given)
    device = torch.device(given)
    if device.type == "cpu":
        return "cpu"
    torch.cuda.set_device(device)
    return given


def _sizes(args: argparse.Namespace, device: str) -> list[Size]:
    from kvcache.bench.case import Size
    from kvcache.checks import check_int

    batches = args.batch or (_QUICK_BATCHES if args.quick else _BATCHES)
    page_sizes = args.page_size or (_QUICK_PAGE_SIZES if args.quick else _PAGE_SIZES)
    tokens = args.tokens
    if tokens is None:
        tokens = _QUICK_TOKENS if args.quick else _TOKENS
    for name, values, most in (
        ("--batch", batches, _MOST_BATCH),
        ("--page-size", page_sizes, _MOST_PAGE_SIZE),
        ("--tokens", [tokens], _MOST_TOKENS),
    ):
        for value in values:
            check_int(name, value, low=1, high=most)
    return [
        Size(b, p, tokens, device)
        for p in dict.fromkeys(page_sizes)
        for b in dict.fromkeys(batches)
    ]


def _check_out(folder: Path | None) -> _Draw | None:
    """Make the folder; return what draws a benchmark into it, None without matplotlib or folder."""
    from kvcache.errors import InvalidInputError
    from kvcache.output import check_plot, check_writable

    if folder is None:
        return None
    if folder.exists() and not folder.is_dir():
        raise InvalidInputError(f"--out: {folder}: is not a folder")
    folder.mkdir(parents=True, exist_ok=True)
    check_writable("--out", folder / "bench.json")
    try:
        check_plot("--out", folder / "bench.png")
    except InvalidInputError:
        print("no plots: matplotlib is not installed", file=sys.stderr)
        return None
    from kvcache.bench import plot
    from kvcache.bench.report import CPU_LABEL

    def draw(bench: Bench, rows: list[Row], machine: str, copy: float) -> None:
        label = f"{CPU_LABEL}; {machine}" if "cpu" in rows[0].timings else machine
        plot.write_plot(folder / f"{bench.name}.png", bench, rows, label=label, copy=copy)

    return draw
