"""Match keys that are on the device against the tree's copy there: one launch for a batch, nothing read back.

One program a request walks down from its root: hash of the next page, look-up in the child table, compare of
the whole edge, and along with it the number of pages since the last tombstone. Lengths and places are pages
times the page size, a constant, so that Triton knows their alignment and the compare loads 16 bytes at a
time.

Source: none; SGLang v0.5.20 matches on the host, request by request.
Reference: match_twin (twin_of_match.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvcache.checks import check_tensor
from kvcache.errors import InvalidInputError
from kvcache.kernels import launch
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
    RECORD_HEAD,
    RECORD_LIVE,
    RECORD_PAGES,
    RECORD_PARENT,
    RECORD_START,
)
from kvcache.kernels.twin_of_match import match_twin

if TYPE_CHECKING:
    import triton.language as tl

# tokens that a program compares at a time: an edge of 2048 is one round, two 16-byte loads a thread and side
# (one where a warp has 64 threads)
_BLOCK = 2048
# pairs of tokens that a program hashes at a time
_HASH_BLOCK = 512
# registers a thread, enough for all. Without a bound ptxas aims at 40 or 48 and spills a word for it, in one
# version or another; the grid is as wide as the batch, so nothing is gained by more programs a processor
_MOST_REGISTERS = 64
# tokens: keys that begin at multiples of it are loaded 16 bytes at a time
ALIGN = 4
# constants of the tag's mixing function (splitmix64)
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB
_LOW_WORD = 0xFFFFFFFF


@launch.kernel(
    do_not_specialize=(
        "starts_ptr",
        "lens_ptr",
        "roots_ptr",
        "results_ptr",
        "num",
        "table_mask",
        "table_base",
        "old_mask",
        "old_base",
        "keep_pages",
    )
)
def _match_kernel(
    keys_ptr,  # [num_tokens] int32 or int64, in
    starts_ptr,  # [num] int64, in; first token of each key
    lens_ptr,  # [num] int32, in, tokens
    roots_ptr,  # [num] int32, in; node
    records_ptr,  # [num_records, 8] int32, in
    table_ptr,  # [slots, 2] int32, in; NODE 0: empty
    tokens_ptr,  # [slab_slots * P] int32, in
    hash_words_ptr,  # [5 + P] int64, in
    results_ptr,  # [8, num] int32, out
    num,
    table_mask,  # slots of the table's level - 1
    table_base,  # its first slot
    old_mask,  # slots of the older level - 1, 0 where nothing is left in it
    old_base,  # its first slot
    keep_pages,  # pages of a window, 0 without SWA
    P: tl.constexpr,
    BIGRAM: tl.constexpr,  # 1 with bigram keys, else 0
    ALIGN: tl.constexpr,  # starts are multiples of it
    HASH_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (num,). Program b matches key b."""
    b = tl.program_id(0)
    stride = tl.cast(num, tl.int64)
    node = tl.load(roots_ptr + b)
    num_units = tl.maximum(tl.load(lens_ptr + b) - BIGRAM, 0)
    num_pages = num_units // P
    key_ptr = keys_ptr + tl.load(starts_ptr + b) // ALIGN * ALIGN
    head = num_pages * 0 - 1
    if BIGRAM:
        if num_pages > 0:
            # a token that no int32 holds is no first token of a stored key
            first_token = tl.load(key_ptr).to(tl.int64)
            storable = (first_token >= 0) & (first_token < 2147483648)
            num_pages = tl.where(storable, num_pages, 0)
            head = first_token.to(tl.int32)
    tl.store(results_ptr + stride * MATCH_ROOT + b, node)

    token_keys_ptr = hash_words_ptr + HASH_TOKEN_KEYS
    multiplier = tl.load(hash_words_ptr + HASH_MULTIPLIER).to(tl.uint64)
    addend = tl.load(hash_words_ptr + HASH_ADDEND).to(tl.uint64)
    head_key = tl.load(hash_words_ptr + HASH_HEAD_KEY).to(tl.uint64)
    head_factor = tl.load(hash_words_ptr + HASH_HEAD_FACTOR).to(tl.uint64)
    odd_factor = tl.load(hash_words_ptr + HASH_ODD_FACTOR).to(tl.uint64)

    pos = num_pages * 0
    best = num_pages * 0
    best_node = node
    # in pages; -1 = no tombstone so far: any window is whole
    tombstone_end = num_pages * 0 - 1
    walks = num_pages > 0
    while walks:
        page_ptr = key_ptr + pos.to(tl.int64) * P + BIGRAM
        top_head = tl.where(pos == 0, head, -1)
        total = (top_head.to(tl.uint32).to(tl.uint64) + head_key) & _LOW_WORD
        total *= head_factor
        if P % 2:
            odd = tl.load(page_ptr + P - 1).to(tl.uint32).to(tl.uint64)
            odd += tl.load(token_keys_ptr + P - 1).to(tl.uint64)
            total += (odd & _LOW_WORD) * odd_factor
        hashed = num_pages * 0
        while hashed < P // 2:
            i = hashed + tl.arange(0, HASH_BLOCK)
            in_page = i < P // 2
            first = tl.load(page_ptr + i, mask=in_page, other=0).to(tl.uint32).to(tl.uint64)
            first += tl.load(token_keys_ptr + i, mask=in_page, other=0).to(tl.uint64)
            j = i + P // 2
            second = tl.load(page_ptr + j, mask=in_page, other=0).to(tl.uint32).to(tl.uint64)
            second += tl.load(token_keys_ptr + j, mask=in_page, other=0).to(tl.uint64)
            total += tl.sum((first & _LOW_WORD) * (second & _LOW_WORD), axis=0)
            hashed += HASH_BLOCK
        x = (node.to(tl.uint64) << 32) | ((total * multiplier + addend) >> 32)
        x = (x ^ (x >> 30)) * _MIX1
        x = (x ^ (x >> 27)) * _MIX2
        x = ((x ^ (x >> 31)) >> 16) & _LOW_WORD
        tag = x.to(tl.uint32).to(tl.int32, bitcast=True)

        found = num_pages * 0
        matched = num_pages * 0
        mask, base = table_mask, table_base
        slot = x.to(tl.int64) & mask
        probes = num_pages > 0
        while probes:
            entry_ptr = table_ptr + (base + slot) * ENTRY_FIELDS
            child = tl.load(entry_ptr + ENTRY_NODE)
            if (child != 0) & (tl.load(entry_ptr + ENTRY_TAG) == tag):
                record_ptr = records_ptr + child.to(tl.int64) * RECORD_FIELDS
                is_child = tl.load(record_ptr + RECORD_PARENT) == node
                if BIGRAM:
                    same_head = tl.load(record_ptr + RECORD_HEAD) == head
                    is_child = is_child & (same_head | (pos > 0))
                if is_child:
                    edge_pages = tl.load(record_ptr + RECORD_PAGES)
                    edge_ptr = tokens_ptr + tl.load(record_ptr + RECORD_START).to(tl.int64) * P
                    limit = tl.minimum(edge_pages, num_pages - pos) * P
                    same = limit
                    done = num_pages * 0
                    compares = limit > 0
                    while compares:
                        i = done * BLOCK + tl.arange(0, BLOCK)
                        in_range = i < limit
                        mine = tl.load(page_ptr + i, mask=in_range, other=0)
                        stored = tl.load(edge_ptr + i, mask=in_range, other=0)
                        differs = in_range & (mine != stored.to(mine.dtype))
                        same = tl.min(tl.where(differs, i, limit), axis=0)
                        done += 1
                        compares = (same == limit) & (done * BLOCK < limit)
                    matched = same // P
                    found = tl.where(matched > 0, child, 0)
            # an empty slot: no such child, unless it was not moved to this level yet
            goes_on = child != 0
            probes = (found == 0) & (goes_on | (mask > old_mask) & (old_mask > 0))
            mask = tl.where(goes_on, mask, old_mask)
            base = tl.where(goes_on, base, old_base)
            slot = tl.where(goes_on, slot + 1, x.to(tl.int64)) & mask

        walks = found != 0
        if walks:
            node = found
            pos += matched
            record_ptr = records_ptr + node.to(tl.int64) * RECORD_FIELDS
            is_live = tl.load(record_ptr + RECORD_LIVE) != 0
            tombstone_end = tl.where(is_live, tombstone_end, pos)
            has_window = (tombstone_end < 0) | (pos - tombstone_end >= keep_pages)
            best = tl.where(has_window, pos, best)
            best_node = tl.where(has_window, node, best_node)
            walks = (tl.load(record_ptr + RECORD_PAGES) == matched) & (pos < num_pages)

    full_gen = tl.load(records_ptr + node.to(tl.int64) * RECORD_FIELDS + RECORD_GEN)
    reuse_gen = tl.load(records_ptr + best_node.to(tl.int64) * RECORD_FIELDS + RECORD_GEN)
    tl.store(results_ptr + stride * MATCH_FULL_HIT + b, pos * P)
    tl.store(results_ptr + stride * MATCH_REUSE + b, best * P)
    tl.store(results_ptr + stride * MATCH_BRANCH + b, tl.where(pos > best, pos * P, -1))
    tl.store(results_ptr + stride * MATCH_FULL_NODE + b, node)
    tl.store(results_ptr + stride * MATCH_FULL_GEN + b, full_gen)
    tl.store(results_ptr + stride * MATCH_REUSE_NODE + b, best_node)
    tl.store(results_ptr + stride * MATCH_REUSE_GEN + b, reuse_gen)


def match(
    keys: torch.Tensor,
    starts: torch.Tensor,
    lens: torch.Tensor,
    roots: torch.Tensor,
    records: torch.Tensor,
    table: torch.Tensor,
    tokens: torch.Tensor,
    hash_words: torch.Tensor,
    results: torch.Tensor,
    *,
    num: int,
    page_size: int,
    table_mask: int,
    table_base: int,
    old_mask: int,
    old_base: int,
    keep_pages: int,
    bigram: bool,
    aligned: bool,
) -> None:
    """Find how much of each key the tree holds, and how much of that can be reused. One launch.

    The results are those of tree/match.py on the tree of which `records`, `table` and `tokens` are the copy
    (kvcache/device/tree_mirror.py). Does not synchronize with the host: starts, lengths and roots are not
    range-checked. num 0 does nothing.

    Args:
        keys: [num_tokens] int32 or int64, token ids of all keys.
        starts: [>= num] int64, first token of each key.
        lens: [>= num] int32, tokens of each key.
        roots: [>= num] int32, root node of each key's namespace.
        records: [num_records, 8] int32, fields as in layout.RECORD_*.
        table: [slots, 2] int32, the child table: (TAG, NODE), NODE 0 = empty.
        tokens: [slab_slots * page_size] int32, tokens of the tree's slots.
        hash_words: [5 + page_size] int64, secrets of the page hash, as in layout.HASH_*.
        results: [8, num] int32, out, rows as in layout.MATCH_*.
        num: keys.
        page_size: tokens per page, >= 1.
        table_mask: slots of the table's level - 1, a power of two minus 1.
        table_base: its first slot.
        old_mask: slots - 1 of the older level, whose entries are moved one by one; 0: there is none.
        old_base: its first slot.
        keep_pages: pages of a window, 0 without SWA.
        bigram: whether unit i of a key covers tokens i and i + 1.
        aligned: whether all of `starts` are multiples of 4; then keys are loaded 16 bytes at a time.

    Raises:
        InvalidInputError: A tensor has a wrong rank, dtype, device, layout or length, or a number is out of
            range.
    """
    launch.check_operands(
        ("lens", lens, 1),
        ("roots", roots, 1),
        ("records", records, 2),
        ("table", table, 2),
        ("tokens", tokens, 1),
        ("results", results, 2),
    )
    device = lens.device
    if keys.dtype is not torch.int32 and keys.dtype is not torch.int64:
        raise InvalidInputError(f"keys must be torch.int32 or torch.int64, got {keys.dtype}")
    check_tensor("keys", keys, ndim=1, dtype=keys.dtype, device=device)
    check_tensor("starts", starts, ndim=1, dtype=torch.int64, device=device)
    launch.check_length("records.shape[1]", records.shape[1], RECORD_FIELDS)
    launch.check_length("table.shape[1]", table.shape[1], ENTRY_FIELDS)
    launch.check_range("num", num, 0, min(starts.shape[0], lens.shape[0], roots.shape[0]))
    if results.shape != (MATCH_FIELDS, num):
        raise InvalidInputError(
            f"results must be {(MATCH_FIELDS, num)}, got {tuple(results.shape)}"
        )
    launch.check_page_size(page_size)
    check_tensor("hash_words", hash_words, ndim=1, dtype=torch.int64, device=device)
    launch.check_length("hash_words.shape[0]", hash_words.shape[0], HASH_TOKEN_KEYS + page_size)
    for name, mask, base in (("table", table_mask, table_base), ("old", old_mask, old_base)):
        launch.check_range(f"{name}_mask", mask, 0, table.shape[0] - 1)
        # a level of one slot has a base all the same; without an older level its base says nothing
        if name == "table" or mask > 0:
            launch.check_range(f"{name}_base", base, 0, table.shape[0] - 1 - mask)
    if keep_pages < 0:
        raise InvalidInputError(f"keep_pages must be >= 0, got {keep_pages}")
    if num == 0:
        return
    if launch.takes_kernel(records):
        _match_kernel[(int(num),)](
            keys,
            starts,
            lens,
            roots,
            records,
            table,
            tokens,
            hash_words,
            results,
            int(num),
            int(table_mask),
            int(table_base),
            int(old_mask),
            int(old_base),
            int(keep_pages),
            P=int(page_size),
            BIGRAM=int(bigram),
            ALIGN=ALIGN if aligned else 1,
            HASH_BLOCK=min(1 << (int(page_size) // 2 - 1).bit_length(), _HASH_BLOCK),
            BLOCK=_BLOCK,
            num_warps=8,
            **launch.register_limit(_MOST_REGISTERS),
        )
    else:
        match_twin(
            keys.numpy(),
            starts.numpy(),
            lens.numpy(),
            roots.numpy(),
            records.numpy(),
            table.numpy(),
            tokens.numpy(),
            hash_words.numpy(),
            results.numpy(),
            num,
            page_size,
            table_mask,
            table_base,
            old_mask,
            old_base,
            keep_pages,
            bool(bigram),
        )
