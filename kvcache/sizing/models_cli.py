"""`kvcache models`: the models whose layers are known."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "models",
        description="List the models whose layers are known to `kvcache size`.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("--kv", default="bf16", help="fp8, bf16 or fp16; default bf16")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the list, with sources")


def run(args: argparse.Namespace) -> int:
    """Carry out `kvcache models`; returns the exit status.

    Raises:
        InvalidInputError: Bad input; nothing was written.
    """
    from kvcache.output import align, check_writable, write_json
    from kvcache.sizing.catalogue import catalogue

    if args.json is not None:
        check_writable("--json", args.json)
    lines = [["model", "full", "sliding", "window", "bytes a token full", "sliding"]]
    report = {}
    for name, model in catalogue().items():
        full, swa = model.full_token_bytes(args.kv), model.swa_token_bytes(args.kv)
        layers = model.swa.layers if model.swa is not None else 0
        counts = [model.full.layers, layers, model.window or 0, full, swa]
        lines.append([name, *(f"{x:,}" for x in counts)])
        report[name] = {**asdict(model), "full_token_bytes": full, "swa_token_bytes": swa}
    if args.json is not None:
        write_json(args.json, {"kv": args.kv, "models": report})
    print(align(lines))
    return 0
