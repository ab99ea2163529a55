"""The command `kvcache`.

A subcommand is a module with `add_parser(subparsers)`, which sets the default `run`: a function of
the parsed arguments that returns the exit status.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from kvcache import __version__
from kvcache.errors import CapacityError, InvalidInputError
from kvcache.streams import drop_unwritten, open_closed_streams, reason_of, say_last

# of a subcommand: the module, imported only where it is asked for (some pull in torch and numba, which takes
# seconds), and what --help says
COMMANDS = {
    "replay": ("kvcache.replay.cli", "replay a trace or a workload through the manager"),
    "bench": ("kvcache.bench.cli", "time each kernel against torch and SGLang's operations"),
    "compile": (
        "kvcache.compile_cli",
        "compile and store all code, so that no request waits for it",
    ),
    "size": ("kvcache.sizing.cli", "pages of both pools from a model and the memory there is"),
    "models": ("kvcache.sizing.models_cli", "list the models that kvcache size knows"),
    "validate": ("kvcache.validate.cli", "compare the manager with its oracle on random calls"),
}

# exit status for bad input, as argparse has it too
USAGE_ERROR = 2


def build_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser for a command line: with the arguments of the subcommand that it begins with."""
    parser = argparse.ArgumentParser(
        prog="kvcache",
        description="Prefix-cache manager for models that mix full and sliding-window attention.",
    )
    parser.add_argument("--version", action="version", version=f"kvcache {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    named = next((word for word in argv if word != "--"), None)
    for name, (module, summary) in COMMANDS.items():
        if name == named:
            import_module(module).add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 for bad input, else what the command says."""
    argv = sys.argv[1:] if argv is None else argv
    open_closed_streams()
    program = "kvcache"
    try:
        args = _parse(argv)
        program = f"kvcache {args.command}"
        status: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # the reader has seen enough, as `head` has
        drop_unwritten()
        return 0
    except (InvalidInputError, CapacityError, OSError, MemoryError) as error:
        say_last(f"{program}: error: {reason_of(error)}")
        return USAGE_ERROR
    return status


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    try:
        return build_parser(argv).parse_args(argv)
    except SystemExit as stop:
        if stop.code:
            drop_unwritten()
        sys.stdout.flush()  # --help and --version
        raise
