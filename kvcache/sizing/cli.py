"""`kvcache size`: pages of both pools for a model and some memory."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcache.sizing.catalogue import ModelShape
    from kvcache.sizing.pools import PoolSizes

_GIB = 2**30
_MAX_LEN = 131_072


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "size",
        description="Split memory into a Full and an SWA pool for a model: pages, tokens and bytes of each, "
        "and the CacheConfig to paste. docs/sizing.md says how it is split.",
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--model", required=True, metavar="NAME", help="see `kvcache models`; or a JSON file"
    )
    parser.add_argument(
        "--memory", required=True, metavar="SIZE", help="for KV, on each GPU: 40GiB, 40GB, ..."
    )
    parser.add_argument("--kv", default="bf16", help="fp8, bf16 or fp16; default bf16")
    for option, default, text in (
        ("page-size", 64, "tokens"),
        ("running", 64, "requests that run at a time"),
        ("chunk", 8192, "prompt tokens of a step, of all its prefills together"),
        ("cached-len", 8192, "tokens that a cached request has on average"),
        ("max-len", _MAX_LEN, "tokens of a request at most, for the CacheConfig"),
        ("tp", 1, "GPUs that share the heads"),
    ):
        parser.add_argument(
            f"--{option}", type=int, default=default, metavar="N", help=f"{text}; default {default}"
        )
    parser.add_argument(
        "--swa-share",
        type=_share,
        metavar="auto|X",
        help="share of the memory for the SWA pool; default auto, by what runs and what is cached",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")


def _share(text: str) -> float | None:
    return None if text == "auto" else float(text)


def run(args: argparse.Namespace) -> int:
    """Carry out `kvcache size`; returns the exit status.

    Raises:
        InvalidInputError: Bad input; nothing was written.
        CapacityError: The memory is too small.
    """
    from kvcache.checks import check_int
    from kvcache.output import check_writable, write_json
    from kvcache.sizing.catalogue import load_model
    from kvcache.sizing.pools import parse_bytes, size_pools

    if args.json is not None:
        check_writable("--json", args.json)
    check_int("max_len", args.max_len, low=1, high=2**31 - 1 - 2**20)
    model = load_model(args.model)
    memory = parse_bytes(args.memory)
    options = {
        name: getattr(args, name)
        for name in ("kv", "page_size", "running", "chunk", "cached_len", "swa_share", "tp")
    }
    sizes = size_pools(model, memory, **options)
    if args.json is not None:
        report = {"model": asdict(model), "memory": memory, **options, **_as_json(sizes)}
        write_json(args.json, {**report, "config": sizes.config_line(args.max_len)})
    print(_title(model, memory, args))
    print(_table(sizes))
    if model.window is not None:
        print(f"The SWA pool holds {sizes.running_fit:,} running requests at their most.")
    print(f"\n{sizes.config_line(args.max_len)}")
    return 0


def _as_json(sizes: PoolSizes) -> dict[str, Any]:
    more = {name: getattr(sizes, name) for name in ("full_tokens", "swa_tokens", "running_fit")}
    return {**asdict(sizes), **more}


def _title(model: ModelShape, memory: int, args: argparse.Namespace) -> str:
    full, swa = model.full_token_bytes(args.kv, args.tp), model.swa_token_bytes(args.kv, args.tp)
    window = "full attention" if model.window is None else f"window {model.window}"
    ranks = "" if args.tp == 1 else f" on each of {args.tp} GPUs"
    kinds = f"{full:,} bytes a token full"
    kinds += f", {swa:,} sliding" if model.window is not None else ""
    return (
        f"{model.name}: {window}, {args.kv}, {kinds}{ranks}\n"
        f"{memory / _GIB:,.2f} GiB, page {args.page_size}, {args.running} running"
    )


def _table(sizes: PoolSizes) -> str:
    from kvcache.output import align

    lines = [["pool", "pages", "tokens", "bytes", "GiB"]]
    for name, pages, tokens, size in (
        ("Full", sizes.full_pages, sizes.full_tokens, sizes.full_bytes),
        ("SWA", sizes.swa_pages, sizes.swa_tokens, sizes.swa_bytes),
    ):
        if name == "Full" or sizes.window is not None:
            lines.append([name, f"{pages:,}", f"{tokens:,}", f"{size:,}", f"{size / _GIB:.2f}"])
    return align(lines)
