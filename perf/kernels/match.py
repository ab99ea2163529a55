"""`match` on the device: keys of two edges, the first shared by all, every token in the tree."""

from __future__ import annotations

import array
from typing import Any, NamedTuple

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
from kvcache.bench.tree_scene import edges, grown_tree
from kvcache.kernels.layout import (
    ENTRY_FIELDS,
    ENTRY_NODE,
    ENTRY_TAG,
    HASH_ADDEND,
    HASH_HEAD_FACTOR,
    HASH_HEAD_KEY,
    HASH_MULTIPLIER,
    HASH_ODD_FACTOR,
    HASH_TOKEN_KEYS,
    MATCH_BRANCH,
    MATCH_FIELDS,
    MATCH_FULL_GEN,
    MATCH_FULL_HIT,
    MATCH_FULL_NODE,
    MATCH_REUSE,
    MATCH_REUSE_GEN,
    MATCH_REUSE_NODE,
    MATCH_ROOT,
    RECORD_FIELDS,
    RECORD_GEN,
    RECORD_LIVE,
    RECORD_PAGES,
    RECORD_PARENT,
    RECORD_START,
)
from kvcache.kernels.match import match

_NAMES = (
    "keys",
    "starts",
    "lens",
    "roots",
    "records",
    "table",
    "tokens",
    "hash_words",
    "results",
)
# splitmix64, as int64 wraps around
_MIX1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX2 = 0x94D049BB133111EB - 2**64
_LOW_WORD = 0xFFFFFFFF
_NO_TOMBSTONE = 2**31


def min_bytes(num_keys: int, key_tokens: int, stored_tokens: int, num_nodes: int) -> int:
    """Bytes that any implementation must move.

    A key: its start, length and root read, eight results written. A token of a key and one of the tree that
    any key is compared with: read once. A node on a path: its record and its table entry read once.
    """
    per_key = 16 + 4 * MATCH_FIELDS
    per_node = 4 * (RECORD_FIELDS + ENTRY_FIELDS)
    return per_key * num_keys + 4 * (key_tokens + stored_tokens) + per_node * num_nodes


def _ours(s: State) -> None:
    call(
        match,
        s,
        _NAMES,
        num=s["lens"].shape[0],
        page_size=s["page_size"],
        table_mask=s["table_mask"],
        table_base=0,
        old_mask=0,
        old_base=0,
        keep_pages=s["keep_pages"],
        bigram=False,
        aligned=s["page_size"] % 4 == 0,
    )


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right without the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _tags(s: State, node: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Return the tag of each key's next page below its node: [active] int64 in [0, 2^32)."""
    size, words = s["page_size"], s["hash_words"]
    i = torch.arange(size, device=at.device)
    page = (s["keys"][at[:, None] + i] + words[HASH_TOKEN_KEYS:]) & _LOW_WORD
    half = size // 2
    total = (page[:, :half] * page[:, half : 2 * half]).sum(1)
    total += page[:, -1] * words[HASH_ODD_FACTOR]
    total += ((words[HASH_HEAD_KEY] - 1) & _LOW_WORD) * words[HASH_HEAD_FACTOR]
    total = total * words[HASH_MULTIPLIER] + words[HASH_ADDEND]
    x = (node << 32) | _shift(total, 32)
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return _shift(x ^ _shift(x, 31), 16) & _LOW_WORD


def _matched_pages(
    s: State, child: torch.Tensor, at: torch.Tensor, room: torch.Tensor
) -> torch.Tensor:
    """Return how many pages of each child's edge the key goes on with."""
    record, size = s["records"][child].long(), s["page_size"]
    limit = torch.minimum(record[:, RECORD_PAGES], room) * size
    i = torch.arange(int(limit.max()), device=at.device)
    in_range = i < limit[:, None]
    mine = s["keys"][torch.where(in_range, at[:, None] + i, 0)]
    stored = s["tokens"][torch.where(in_range, record[:, RECORD_START, None] * size + i, 0)]
    differs = in_range & (mine != stored)
    first = torch.where(differs.any(1), differs.int().argmax(1), limit)
    return first // size


def _find_child(
    s: State, node: torch.Tensor, at: torch.Tensor, room: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (child, pages it matches) of each key, 0 where there is none; probes in step."""
    tag = _tags(s, node, at)
    slot = tag & s["table_mask"]
    found, matched = torch.zeros_like(node), torch.zeros_like(node)
    active = torch.arange(node.shape[0], device=node.device)
    while active.numel():
        entry = s["table"][slot[active]].long()
        child = entry[:, ENTRY_NODE]
        fits = (child != 0) & ((entry[:, ENTRY_TAG] & _LOW_WORD) == tag[active])
        fits &= s["records"][child, RECORD_PARENT] == node[active]
        who = active[fits]
        if who.numel():
            pages = _matched_pages(s, child[fits], at[who], room[who])
            matched[who] = pages
            found[who] = torch.where(pages > 0, child[fits], 0)
        slot[active] = (slot[active] + 1) & s["table_mask"]
        active = active[(child != 0) & (found[active] == 0)]
    return found, matched


def _torch(s: State) -> None:
    """All keys level by level: hash, probe, compare; the host asks whether any key goes on."""
    size, records = s["page_size"], s["records"]
    root = s["roots"].long()
    num_pages = s["lens"].long() // size
    node, best_node = root.clone(), root.clone()
    pos, best = torch.zeros_like(root), torch.zeros_like(root)
    run = torch.full_like(root, _NO_TOMBSTONE)
    active = (num_pages > 0).nonzero()[:, 0]
    while active.numel():
        at = s["starts"][active] + pos[active] * size
        room = num_pages[active] - pos[active]
        child, matched = _find_child(s, node[active], at, room)
        active, child, matched = active[child > 0], child[child > 0], matched[child > 0]
        node[active] = child
        pos[active] += matched
        record = records[child].long()
        run[active] = torch.where(record[:, RECORD_LIVE] != 0, run[active] + matched, 0)
        whole = run[active] >= s["keep_pages"]
        best[active] = torch.where(whole, pos[active], best[active])
        best_node[active] = torch.where(whole, child, best_node[active])
        active = active[(record[:, RECORD_PAGES] == matched) & (pos[active] < num_pages[active])]
    fields = {
        MATCH_FULL_HIT: pos * size,
        MATCH_REUSE: best * size,
        MATCH_BRANCH: torch.where(pos > best, pos * size, -1),
        MATCH_FULL_NODE: node,
        MATCH_FULL_GEN: records[node, RECORD_GEN],
        MATCH_REUSE_NODE: best_node,
        MATCH_REUSE_GEN: records[best_node, RECORD_GEN],
        MATCH_ROOT: root,
    }
    for field, values in fields.items():
        s["results"][field] = values


class _HostNode(NamedTuple):
    """A node of SGLang's tree on the host."""

    key: array.array[int]
    value: torch.Tensor  # on the device
    children: dict[tuple[int, ...], Any]


def _common_len(a: array.array[int], b: array.array[int], page_size: int) -> int:
    """Return the tokens that two keys share, page by page after one compare of all."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n // page_size * page_size
    at = 0
    while at + page_size <= n and a[at : at + page_size] == b[at : at + page_size]:
        at += page_size
    return at


def _sglang(s: State) -> None:
    """Request by request on the host: child by its first page, edge compared, the values concatenated."""
    size = s["page_size"]
    hits, indices = [], []
    for key in s["request_keys"]:
        node, at, values = s["host_root"], 0, []
        while at < len(key):
            child = node.children.get(tuple(key[at : at + size]))
            if child is None:
                break
            n = _common_len(child.key, key[at:], size)
            values.append(child.value[:n])
            at += n
            node = child
            if n < len(child.key):
                break
        hits.append(at)
        indices.append(torch.cat(values))
    s["hits"], s["prefix_indices"] = hits, indices


def _sglang_read(s: State) -> Outcome:
    return {"full_hit_len": torch.tensor(s["hits"], dtype=torch.int32)}


def _read(s: State) -> Outcome:
    return {"results": s["results"], "full_hit_len": s["results"][MATCH_FULL_HIT].cpu()}


def _host_tree(s: State, size: Size) -> _HostNode:
    """The same tree as Python objects."""
    shared, own = (pages * size.page_size for pages in edges(size))
    keys = s["host_keys"]
    values = torch.arange(shared + own, device=size.device)
    top = _HostNode(array.array("q", keys[0, :shared].tolist()), values[:shared], {})
    for key in keys[:, shared:].tolist():
        leaf = _HostNode(array.array("q", key), values[shared:], {})
        top.children[tuple(key[: size.page_size])] = leaf
    return _HostNode(array.array("q"), values[:0], {tuple(top.key[: size.page_size]): top})


def make(size: Size) -> Case:
    """Keys of half a shared prompt and half of their own; all is found, all is live."""
    s, _ = grown_tree(size)
    s["host_root"] = _host_tree(s, size)
    s["request_keys"] = [array.array("q", key) for key in s["host_keys"].tolist()]
    s["hits"] = [-1] * size.batch
    changed = ("results",)
    versions = (
        Version(OURS, _ours, _read, changed, captured=True),
        Version(TORCH, _torch, outputs("results"), changed),
        Version(SGLANG, _sglang, _sglang_read, ()),
    )
    shared, own = (pages * size.page_size for pages in edges(size))
    stored = shared + size.batch * own
    least = min_bytes(size.batch, size.batch * (shared + own), stored, size.batch + 1)
    return Case(s, versions, least)


BENCHES = (Bench("match", "", "keys of a shared edge and one of their own, on the device", make),)
