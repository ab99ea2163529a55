"""The command `kvcache`.

A subcommand is a module with `add_parser(subparsers)`, which sets the default `run`: a function of
the parsed arguments that returns the exit status.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from kvcache import __version__
from kvcache.errors import InvalidInputError

# of a subcommand: the module, imported only where it is asked for (some pull in torch and numba, which takes
# seconds), and what --help says
COMMANDS = {
    "replay": ("kvcache.replay.cli", "replay a trace or a workload through the manager"),
    "bench": ("kvcache.bench.cli", "time each kernel against torch and SGLang's operations"),
    "compile": (
        "kvcache.compile_cli",
        "compile and store all code, so that no request waits for it",
    ),
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
    args = build_parser(argv).parse_args(argv)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # the reader has seen enough, as `head` has; Python must not flush into the pipe at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (InvalidInputError, OSError, MemoryError) as error:
        reason = str(error) or type(error).__name__
        print(f"kvcache {args.command}: error: {reason}", file=sys.stderr)
        return USAGE_ERROR
    return status
