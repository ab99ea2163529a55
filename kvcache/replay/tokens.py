"""Tokens on demand: what a trace says is block ids, what a cache compares is token ids.

Token `j` of block `b` is `mix(b, j) % VOCAB_SIZE`, so equal blocks are equal runs of tokens.
Compiled loops over flat arrays: a replay makes some hundred million tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.compiled import compiled

IntArray = npt.NDArray[Any]

# as many ids as a common tokenizer has; a power of two makes the remainder cheap
VOCAB_SIZE = 131_072

# the multipliers of splitmix64
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MUL1 = np.uint64(0xBF58476D1CE4E5B9)
_MUL2 = np.uint64(0x94D049BB133111EB)
_VOCAB_MASK = np.uint64(VOCAB_SIZE - 1)


@compiled
def fill_tokens(out: IntArray, blocks: IntArray, lens: IntArray, block_size: int) -> None:
    """Write the tokens of segments, one after the other, to the start of `out`.

    Args:
        out: int32, at least sum(lens) long.
        blocks: [n] int64, the first block of each segment; the next ones have the next ids.
        lens: [n] int64, tokens of each segment; the last block of one may be cut short.
        block_size: tokens of a whole block.
    """
    pos = 0
    for i in range(len(blocks)):
        block = np.uint64(blocks[i])
        left = lens[i]
        while left > 0:
            count = min(left, block_size)
            seed = (block + np.uint64(1)) * _STEP
            seed = (seed ^ (seed >> np.uint64(30))) * _MUL1
            seed = (seed ^ (seed >> np.uint64(27))) * _MUL2
            run = out[pos : pos + count]
            for j in range(count):
                token = seed + np.uint64(j) * _STEP
                token = (token ^ (token >> np.uint64(32))) * _MUL1
                run[j] = np.int32((token >> np.uint64(40)) & _VOCAB_MASK)
            pos += count
            left -= count
            block += np.uint64(1)


@compiled
def common_prefix_len(tokens: IntArray, start_a: int, start_b: int, limit: int) -> int:
    """Return how many of `limit` tokens from `start_a` and from `start_b` on are equal."""
    a = tokens[start_a : start_a + limit]
    b = tokens[start_b : start_b + limit]
    for i in range(limit):
        if a[i] != b[i]:
            return i
    return limit


@compiled
def count_pages(
    blocks: IntArray,
    lens: IntArray,
    indptr: IntArray,
    total_lens: IntArray,
    block_size: int,
    page_size: int,
    scratch: IntArray,
) -> int:
    """Return how many distinct pages of `page_size` tokens the sequences have at most.

    A sequence is a prompt and what was generated after it; pages are equal if all tokens up to
    their ends are.

    Args:
        blocks, lens: [k] int64, the segments of all prompts, as in `fill_tokens`.
        indptr: [n + 1] int64, the segments of prompt i are [indptr[i], indptr[i + 1]).
        total_lens: [n] int64, tokens of prompt i and of what was generated.
        block_size: tokens of a whole block.
        page_size: tokens of a page.
        scratch: [3, more than any block id] int64.
    """
    seen_len, parent, parent_len = scratch[0], scratch[1], scratch[2]
    seen_len[:] = 0
    pages = 0
    one_parent = True
    for i in range(len(indptr) - 1):
        covered = 0
        last, last_len = np.int64(-1), np.int64(0)
        for s in range(indptr[i], indptr[i + 1]):
            block, left = blocks[s], lens[s]
            while left > 0:
                count = min(left, block_size)
                if seen_len[block] == 0:
                    parent[block], parent_len[block] = last, last_len
                elif parent[block] != last or parent_len[block] != last_len:
                    one_parent = False
                # past the first block that is new, or longer than it was, all are new
                covered += min(seen_len[block], count)
                seen_len[block] = max(seen_len[block], count)
                last, last_len = block, count
                left -= count
                block += 1
        pages += (total_lens[i] + page_size - 1) // page_size
        pages -= covered // page_size
    if one_parent:
        return pages
    # a block id says nothing of what stands before it: count every page of every sequence
    pages = 0
    for i in range(len(total_lens)):
        pages += (total_lens[i] + page_size - 1) // page_size
    return pages
