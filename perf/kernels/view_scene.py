"""Decoding rows for the view benchmarks: ragged lengths, each with one token that is yet to be computed."""

from __future__ import annotations

import torch

from kvcache.bench.case import WINDOW, Size, State
from kvcache.bench.scene import Ints, add_token_pools, pools, rng_of


def decoding(size: Size) -> tuple[State, Ints]:
    """Return rows of at least half the longest request, and their allocated lengths in order of the batch.

    All pages are live, so that what lies before the window differs from padding.
    """
    rng = rng_of(size)
    lens = rng.integers((size.tokens + 1) // 2, size.tokens + 1, size.batch)
    s = pools(size, rng, computed=lens - 1, allocated=lens)
    add_token_pools(s, size.page_size)
    ordered: Ints = lens[s["req_rows"]]
    s["page_size"] = size.page_size
    s["seq_lens"] = torch.from_numpy(ordered).to(size.device)
    return s, ordered


def first_tokens(lens: Ints, window: int, unit: int) -> Ints:
    """Return the first token of each row's list: page-aligned for lists of pages, 0 without window."""
    if window == 0:
        return lens * 0
    first: Ints = (lens - window).clip(min=0) // unit * unit
    return first


WINDOWS = {"full": 0, "swa": WINDOW}
