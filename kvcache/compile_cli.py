"""`kvcache compile`: fill the caches of compiled code, so that no process has to compile."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

_DESCRIPTION = """\
Compile all that a cache with these flags runs, as KVCacheManager.warm_up() does, and store it: numba's code
in the __pycache__ folders of the package, or in NUMBA_CACHE_DIR if that is set, kernels of a GPU where Triton
has its cache. Code for the CPU does not depend on the flags, but that with a window covers that without.
"""
_PAGE_SIZES = (1, 16, 64, 256)


def add_parser(subparsers: Any) -> None:
    """Add `compile` to the subcommands of `kvcache`."""
    parser = subparsers.add_parser(
        "compile", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shown = " ".join(map(str, _PAGE_SIZES))
    parser.add_argument(
        "--page-size",
        type=int,
        nargs="+",
        metavar="P",
        help=f"tokens per page; default: on a GPU {shown}",
    )
    parser.add_argument(
        "--window", type=_window, default=128, metavar="W", help="tokens, or none (default: 128)"
    )
    parser.add_argument("--bigram", action="store_true", help="with EAGLE's bigram keys")
    parser.add_argument("--device", help="cpu, cuda, cuda:1; default: cuda where there is one")
    parser.set_defaults(run=run)


def _window(text: str) -> int | None:
    return None if text == "none" else int(text)


_window.__name__ = "int or none"  # what argparse says of a bad value


def run(args: argparse.Namespace) -> int:
    """Carry out `kvcache compile`; returns the exit status."""
    # nothing that needs torch or numba is imported before it is asked for
    import torch
    from numba import config as numba_config
    from numba.core import event

    from kvcache.compiled import cache_folder
    from kvcache.config import CacheConfig
    from kvcache.errors import InvalidInputError
    from kvcache.keys import first_bad_span
    from kvcache.warmup import warm_up

    if getattr(numba_config, "DISABLE_JIT", 0):
        raise InvalidInputError("NUMBA_DISABLE_JIT must not be set: with it nothing is compiled")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    sizes = args.page_size or (_PAGE_SIZES if device != "cpu" else _PAGE_SIZES[1:2])
    configs = [
        CacheConfig(
            page_size=size,
            window=args.window,
            full_pages=1,
            swa_pages=0 if args.window is None else 1,
            max_rows=1,
            max_len=size,
            bigram=args.bigram,
            device=device,
        )
        for size in dict.fromkeys(sizes)
    ]
    start = time.perf_counter()
    with event.install_recorder("numba:compile") as compiled:
        for config in configs:
            warm_up(config)
    num = sum(e.is_start for _, e in compiled.buffer)
    seconds = time.perf_counter() - start
    print(f"{device}: {num} functions compiled by numba, the others loaded; {seconds:.1f} s")
    folder = cache_folder(first_bad_span)
    if folder is None:
        print("nothing is stored: no folder can be written", file=sys.stderr)
        return 1
    # of a module's __pycache__ the package, of a folder per module what holds them
    print(f"stored in {folder.parent}")
    if device != "cpu":
        from triton import knobs

        shown = " ".join(str(config.page_size) for config in configs)
        print(f"kernels for page sizes {shown} stored in {knobs.cache.dir}")
    return 0
