"""`translate`: token slots of the Full pool to those of the SWA pool."""

from __future__ import annotations

import numpy as np
import torch

from kvcache.bench.case import OURS, SGLANG, TORCH, Bench, Case, Size, State, Version, outputs
from kvcache.bench.scene import int32, on_device, rng_of
from kvcache.kernels.translate import translate


def min_bytes(num_slots: int, num_pages: int) -> int:
    """Bytes that any implementation must move: a slot read and written, int64; each map entry read once."""
    return 16 * num_slots + 4 * num_pages


def _ours(s: State) -> None:
    translate(s["slots"], s["swa_map"], page_size=s["page_size"], out=s["out"])


def _torch(s: State) -> None:
    slots, size = s["slots"], s["page_size"]
    swa_page = s["swa_map"][slots // size].long()
    s["out"].copy_(torch.where(swa_page > 0, swa_page * size + slots % size, 0))


def _sglang(s: State) -> None:
    """Its map has an entry per token, so the job is one gather."""
    s["out"] = s["full_to_swa"][s["slots"]]


def make(size: Size) -> Case:
    """All token slots of requests whose pages lie in no order; a quarter of the pages has no SWA."""
    rng = rng_of(size)
    num_pages = size.batch * size.pages
    swa_map = np.zeros(num_pages + 1, np.int32)
    swa_map[1:] = rng.permutation(num_pages) + 1
    swa_map[1:][rng.random(num_pages) < 0.25] = 0
    swa_map[1] = 1
    pages = rng.permutation(num_pages) + 1
    offset = np.arange(size.page_size)
    slots = (pages[:, None] * size.page_size + offset).reshape(size.batch, -1)
    tokens = np.where(swa_map[:, None] > 0, swa_map[:, None] * size.page_size + offset, 0)
    s: State = {
        "slots": on_device(slots, size.device),
        "swa_map": int32(swa_map, size.device),
        "full_to_swa": on_device(tokens.reshape(-1).astype(np.int64), size.device),
        "page_size": size.page_size,
    }
    s["out"] = torch.full_like(s["slots"], -1)
    read, changed = outputs("out"), ("out",)
    versions = (
        Version(OURS, _ours, read, changed, captured=True),
        Version(TORCH, _torch, read, changed, captured=True),
        Version(SGLANG, _sglang, read, (), captured=True),
    )
    return Case(s, versions, min_bytes(slots.size, num_pages))


BENCHES = (Bench("translate", "", "all Full slots of the batch to SWA slots", make),)
