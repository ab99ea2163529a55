"""`kvcache validate`: its arguments."""

from __future__ import annotations

import argparse
from typing import Any

from kvcache.validate.run import run

_DESCRIPTION = """\
Drive the manager and its oracle (kvcache/oracle/manager.py) with the same random calls and compare all
state after each: lengths, sets of pages, map, locks, recency, counts, victims, refusals. On a
disagreement print the shortest failing sequence found, as a Python script, and exit with 1.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvcache validate` to a parser."""
    parser.add_argument(
        "--seconds", type=_positive, default=10.0, help="time to spend (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--first", type=int, default=0, metavar="N", help="start at program N of the seed"
    )
    parser.add_argument(
        "--programs", type=int, default=None, metavar="N", help="stop after N programs"
    )
    parser.add_argument("--verbose", action="store_true", help="name each program as it starts")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ... (default: %(default)s)")


def add_parser(subparsers: Any) -> None:
    """Add `validate` to the subcommands of `kvcache`."""
    parser = subparsers.add_parser(
        "validate",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.set_defaults(run=_run)


def _positive(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"must be > 0, got {text}")
    return seconds


def _say(line: str) -> None:
    print(line, flush=True)


def _run(args: argparse.Namespace) -> int:
    return run(
        args.seconds,
        args.seed,
        device=args.device,
        first=args.first,
        programs=args.programs,
        verbose=args.verbose,
        say=_say,
    )
