"""Hashes of pages: keyed and not linear, so that nobody who does not know the seed can make pages collide.

The first half of a page is multiplied with the second, token by token, each after a secret number was added
(the NH of UMAC: two different pages have one sum with a probability of 2^-32, whatever they are). A last
token without a partner, and the token before a bigram page, have secret factors. A secret multiplication
then makes the sum a hash of 32 bits.

    tokens    t0 t1 t2 | t3 t4 t5 | t6        sum = (t0 + k0) * (t3 + k3) + (t1 + k1) * (t4 + k4) + ...
                                                  + (t6 + k6) * ODD_FACTOR + (head + HEAD_KEY) * HEAD_FACTOR
"""

from __future__ import annotations

import numpy as np

from kvcache.compiled import inlined
from kvcache.tree.arrays import (
    M_HASH_ADDEND,
    M_HASH_MULTIPLIER,
    M_HEAD_FACTOR,
    M_HEAD_KEY,
    M_ODD_FACTOR,
    M_TOKEN_KEYS,
    Int64Array,
    TokenArray,
)

_LOW_WORD = np.uint64(0xFFFFFFFF)


def hash_words(seed: int, page_size: int) -> Int64Array:
    """Return what `meta` holds from M_HASH_MULTIPLIER on, drawn from `seed` by SplitMix64.

    The order is that of arrays.py: five words, then a key for each token of a page.
    """
    first = M_HASH_MULTIPLIER
    x = np.uint64(seed) + np.arange(
        1, M_TOKEN_KEYS - first + page_size + 1, dtype=np.uint64
    ) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    x[M_HASH_MULTIPLIER - first] |= np.uint64(1)
    x[M_HEAD_KEY - first :] &= _LOW_WORD
    x[M_HEAD_FACTOR - first] |= np.uint64(1)
    # an even page has no token without a partner
    x[M_ODD_FACTOR - first] = (x[M_ODD_FACTOR - first] | np.uint64(1)) * np.uint64(page_size % 2)
    return x.view(np.int64)


@inlined
def page_hash(meta: Int64Array, tokens: TokenArray, start: int, page_size: int, head: int) -> int:
    """Return a 32-bit hash (as int32) of the `page_size` tokens from `start` on, order included.

    `head` is the token before the first page of a bigram key, else -1. No branches: with one in it, numba
    would count references to the arrays at every call.
    """
    half = page_size >> 1
    # unsigned: numba looks for negative indices otherwise, which stops the vectoriser
    x = np.uint64(start)
    y = np.uint64(start + half)
    j = np.uint64(M_TOKEN_KEYS)
    k = np.uint64(M_TOKEN_KEYS + half)
    last = np.uint64(page_size - 1)
    total = np.uint64(
        np.uint32(np.uint32(np.int64(head) & 0xFFFFFFFF) + np.uint32(meta[M_HEAD_KEY]))
    ) * np.uint64(meta[M_HEAD_FACTOR])
    total += np.uint64(
        np.uint32(np.uint32(tokens[x + last]) + np.uint32(meta[j + last]))
    ) * np.uint64(meta[M_ODD_FACTOR])
    for n in range(half):
        i = np.uint64(n)
        total += np.uint64(
            np.uint32(np.uint32(tokens[x + i]) + np.uint32(meta[j + i]))
        ) * np.uint64(np.uint32(np.uint32(tokens[y + i]) + np.uint32(meta[k + i])))
    total = total * np.uint64(meta[M_HASH_MULTIPLIER]) + np.uint64(meta[M_HASH_ADDEND])
    return np.int32(np.uint32(total >> np.uint64(32)))


@inlined
def child_tag(parent: int, first_page_hash: int) -> int:
    """Return the 32-bit tag (as int32) under which a child is filed. The secret is in the hash."""
    x = (np.uint64(np.uint32(parent)) << np.uint64(32)) | np.uint64(np.uint32(first_page_hash))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return np.int32(np.uint32((x >> np.uint64(16)) & np.uint64(0xFFFFFFFF)))
