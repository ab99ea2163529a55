"""`update_mirror`: what a batch of commits changed in the tree, written to its copy on the device."""

from __future__ import annotations

import numpy as np
import torch

from kvcache.bench.case import OURS, TORCH, Bench, Case, Size, State, Version, call, outputs
from kvcache.bench.scene import int32, rng_of
from kvcache.kernels.layout import ENTRY_FIELDS, RECORD_FIELDS
from kvcache.kernels.update_mirror import update_mirror

_NAMES = (
    "node_ids",
    "node_rows",
    "slot_ids",
    "slot_rows",
    "page_ids",
    "page_rows",
    "records",
    "table",
    "tokens",
)
_CHANGED = ("records", "table", "tokens")
# a commit adds a node and changes its parent; entries of the child table; a quarter of its tokens is new
_NODES, _SLOTS, _NEW_SHARE = 2, 2, 4


def min_bytes(num_nodes: int, num_slots: int, num_pages: int, page_size: int) -> int:
    """Bytes that any implementation must move: each id read, each word of what changed read and written."""
    words = num_nodes * RECORD_FIELDS + num_slots * ENTRY_FIELDS + num_pages * page_size
    return 4 * (num_nodes + num_slots + num_pages) + 8 * words


def _ours(s: State) -> None:
    call(
        update_mirror,
        s,
        _NAMES,
        num_nodes=s["node_ids"].shape[0],
        num_slots=s["slot_ids"].shape[0],
        num_pages=s["page_ids"].shape[0],
        page_size=s["page_size"],
    )


def _torch(s: State) -> None:
    s["records"][s["node_ids"].long()] = s["node_rows"]
    s["table"][s["slot_ids"].long()] = s["slot_rows"]
    s["tokens"].view(-1, s["page_size"])[s["page_ids"].long()] = s["page_rows"]


def make(size: Size) -> Case:
    """Places in no order in a tree twice as large; SGLang keeps its tree on the host."""
    rng = rng_of(size)
    counts = {
        "node": (_NODES * size.batch, RECORD_FIELDS),
        "slot": (_SLOTS * size.batch, ENTRY_FIELDS),
        "page": (max(1, size.pages // _NEW_SHARE) * size.batch, size.page_size),
    }
    s: State = {"page_size": size.page_size}
    for (name, (num, width)), target in zip(counts.items(), _CHANGED, strict=True):
        s[f"{name}_ids"] = int32(rng.permutation(2 * num)[:num], size.device)
        words = rng.integers(1, 2**20, (num, width), dtype=np.int32)
        s[f"{name}_rows"] = int32(words, size.device)
        shape = (2 * num * width,) if target == "tokens" else (2 * num, width)
        s[target] = torch.zeros(shape, dtype=torch.int32, device=size.device)
    read = outputs(*_CHANGED)
    versions = (
        Version(OURS, _ours, read, _CHANGED, captured=True),
        Version(TORCH, _torch, read, _CHANGED, captured=True),
    )
    nodes, slots, pages = (num for num, _ in counts.values())
    return Case(s, versions, min_bytes(nodes, slots, pages, size.page_size))


BENCHES = (Bench("update_mirror", "", "what a batch of commits changed, to the tree's copy", make),)
