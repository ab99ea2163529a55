"""`bind_match`: the pages that a match on the device found, into the rows."""

from __future__ import annotations

import numpy as np
import torch

from kvcache.bench.case import (
    OURS,
    SGLANG,
    TORCH,
    Bench,
    Case,
    Outcome,
    Size,
    State,
    Version,
    call,
    outputs,
)
from kvcache.bench.scene import int32, pages_of_tokens, rng_of
from kvcache.bench.tree_scene import edges, grown_tree
from kvcache.kernels.bind_match import bind_match
from kvcache.kernels.layout import (
    MATCH_REUSE,
    MATCH_REUSE_NODE,
    RECORD_DEPTH,
    RECORD_PARENT,
    RECORD_START,
)

_NAMES = (
    "results",
    "index",
    "rows",
    "records",
    "slab",
    "page_table",
)


def min_bytes(num_rows: int, num_nodes: int, bound_pages: int, distinct_pages: int) -> int:
    """Bytes that any implementation must move.

    A row: its id, its request, two results read. A node on a path: three fields read once. A page: read from
    the slab once, however many rows it is bound to, and written to each.
    """
    return 16 * num_rows + 12 * num_nodes + 4 * distinct_pages + 4 * bound_pages


def _ours(s: State) -> None:
    call(
        bind_match,
        s,
        _NAMES,
        num=s["rows"].shape[0],
        max_pages=s["max_pages"],
        page_size=s["page_size"],
    )


def _torch(s: State) -> None:
    """All paths climbed level by level; the pages of a level as one padded gather and scatter."""
    index, rows = s["index"].long(), s["rows"].long()
    end = s["results"][MATCH_REUSE, index].long() // s["page_size"]
    node = s["results"][MATCH_REUSE_NODE, index].long()
    j = torch.arange(s["max_pages"], device=rows.device)
    while bool((end > 0).any()):
        record = s["records"][node].long()
        depth = record[:, RECORD_DEPTH, None]
        here = (j >= depth) & (j < end[:, None])
        slot = (record[:, RECORD_START, None] + j - depth)[here]
        s["page_table"][rows[:, None].expand_as(here)[here], j.expand_as(here)[here]] = s["slab"][
            slot
        ]
        end = torch.minimum(end, record[:, RECORD_DEPTH])
        node = record[:, RECORD_PARENT]


def _sglang(s: State) -> None:
    """Request by request: the values of the path's nodes concatenated, then written into the row."""
    for row, nodes in zip(s["req_rows"], s["paths"], strict=True):
        indices = torch.cat([s["values"][first:end] for first, end in nodes])
        s["req_to_token"][row, : indices.shape[0]] = indices.int()


def _sglang_read(s: State) -> Outcome:
    return {"page_table": pages_of_tokens(s["req_to_token"], s["page_size"])}


def _paths(s: State, size: Size) -> list[list[tuple[int, int]]]:
    """The token slots of each request's nodes, as the host of SGLang has them from its own match."""
    records = s["records"].tolist()
    nodes, ends = (s["results"][f].tolist() for f in (MATCH_REUSE_NODE, MATCH_REUSE))
    paths = []
    for b in s["index"].tolist():
        node, end, path = nodes[b], ends[b] // size.page_size, []
        while end > 0:
            depth, first = records[node][RECORD_DEPTH], records[node][RECORD_START]
            path.append((first * size.page_size, (first + end - depth) * size.page_size))
            node, end = records[node][RECORD_PARENT], depth
        paths.append(path[::-1])
    return paths


def make(size: Size) -> Case:
    """Every key of the tree of `match`, bound to a row."""
    s, handles = grown_tree(size)
    shared, own = edges(size)
    rng = rng_of(size)
    starts, lens = (s[name].cpu().numpy().astype(np.int64) for name in ("starts", "lens"))
    found = s["tree"].match(s["host_keys"].reshape(-1), starts, lens, handles, touch=False)
    columns = -(-(shared + own) // 16) * 16
    s["results"] = int32(found, size.device)
    s["index"] = int32(rng.permutation(size.batch), size.device)
    s["rows"] = int32(rng.permutation(size.batch), size.device)
    slots = shared + size.batch * own
    s["slab"] = int32(rng.permutation(slots + 1) + 1, size.device)
    s["page_table"] = torch.zeros((size.batch, columns), dtype=torch.int32, device=size.device)
    s["req_to_token"] = torch.zeros(
        (size.batch, columns * size.page_size), dtype=torch.int32, device=size.device
    )
    s.update(max_pages=shared + own, req_rows=s["rows"].tolist())
    s["paths"] = _paths(s, size)
    offset = torch.arange(size.page_size, device=size.device)
    s["values"] = (s["slab"].long()[:, None] * size.page_size + offset).reshape(-1)
    changed = ("page_table",)
    versions = (
        Version(OURS, _ours, outputs(*changed), changed, captured=True),
        Version(TORCH, _torch, outputs(*changed), changed),
        Version(SGLANG, _sglang, _sglang_read, ("req_to_token",)),
    )
    bound = size.batch * (shared + own)
    return Case(s, versions, min_bytes(size.batch, size.batch + 1, bound, slots))


BENCHES = (Bench("bind_match", "", "what a match on the device found, into every row", make),)
