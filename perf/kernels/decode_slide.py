"""`decode_slide`: `advance` and `slide` in one launch that a graph can hold; every row frees a page."""

from __future__ import annotations

import torch

from kvcache.bench import slide as slide_bench
from kvcache.bench.case import OURS, SGLANG, TORCH, WINDOW, Bench, Case, Size, State, Version, call
from kvcache.bench.scene import pools, rng_of
from kvcache.kernels.decode_slide import decode_slide
from kvcache.kernels.layout import ALLOCATED, COMPUTED, ERROR_FIELDS

_NAMES = (
    "rows",
    "num_rows",
    "page_table",
    "swa_map",
    "swa_stack",
    "row_state",
    "tops",
    "error",
)
_CHANGED = ("swa_map", "swa_stack", "row_state", "tops")


def min_bytes(num_rows: int, num_pages: int) -> int:
    """Bytes that any implementation must move.

    A row: its id and three lengths read, the computed one and the frontier written. A page: as in `slide`.
    The top read and written, the number of rows and the error word read.
    """
    return 24 * num_rows + 16 * num_pages + 16


def run_ours(s: State) -> None:
    call(
        decode_slide,
        s,
        _NAMES,
        page_size=s["page_size"],
        keep=WINDOW,
        bigram=False,
        has_swa=True,
    )


def run_torch(s: State) -> None:
    rows = s["rows"].long()
    s["row_state"][COMPUTED, rows] = s["row_state"][ALLOCATED, rows]
    slide_bench.torch_slide(s)


def _sglang(s: State) -> None:
    """Lengths up by one, on the device and on the host; then its out-of-window pass."""
    s["seq_lens"] = s["seq_lens"] + 1
    s["host_lens"] = [n + 1 for n in s["host_lens"]]
    slide_bench.sglang_slide(s)


def make(size: Size) -> Case:
    """The rows of `slide`, whose last token is not yet counted as computed."""
    rng = rng_of(size)
    allocated, frontier = slide_bench.sliding_rows(size, rng)
    computed = allocated - 1
    s = pools(size, rng, computed=computed, allocated=allocated, frontier=frontier, spare=64)
    slide_bench.add_host_side(s, size, computed, frontier)
    s["error"] = torch.zeros(ERROR_FIELDS, dtype=torch.int32, device=size.device)
    s["seq_lens"] = torch.tensor(s["host_lens"], device=size.device)
    versions = (
        Version(OURS, run_ours, slide_bench.outcome, (*_CHANGED, "error"), captured=True),
        Version(TORCH, run_torch, slide_bench.outcome, _CHANGED),
        Version(SGLANG, _sglang, slide_bench.sglang_outcome, slide_bench.SGLANG_CHANGED),
    )
    return Case(s, versions, min_bytes(size.batch, size.batch))


BENCHES = (Bench("decode_slide", "", "advance and slide in a graph, every row frees a page", make),)
