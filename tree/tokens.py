"""Runs of tokens: compare, copy, range check, in blocks that the compiler turns into vector code."""

from __future__ import annotations

from kvcache.compiled import inlined
from kvcache.tree.arrays import Int32Array, TokenArray

# Tokens a block: an early exit every 64 tokens costs nothing and the OR of XORs inside vectorises.
_BLOCK = 64


@inlined
def matching_tokens(slab: Int32Array, a: int, keys: TokenArray, b: int, n: int) -> int:
    """Return how many tokens of `slab[a:a+n]` and `keys[b:b+n]` agree from the start."""
    # Slices first: indexing with a signed base would stop the vectoriser.
    x = slab[a : a + n]
    y = keys[b : b + n]
    j = 0
    while j + _BLOCK <= n:
        difference = 0
        for i in range(j, j + _BLOCK):
            difference |= x[i] ^ y[i]
        if difference != 0:
            break
        j += _BLOCK
    while j < n and x[j] == y[j]:
        j += 1
    return j


@inlined
def copy_tokens(slab: Int32Array, a: int, keys: TokenArray, b: int, n: int) -> None:
    """Copy `keys[b:b+n]` to `slab[a:a+n]`."""
    x = slab[a : a + n]
    y = keys[b : b + n]
    for i in range(n):
        x[i] = y[i]


@inlined
def storable_tokens(keys: TokenArray, b: int, n: int) -> bool:
    """Return whether all of `keys[b:b+n]` are in [0, 2^31)."""
    y = keys[b : b + n]
    bits = y[0] & 0 if n > 0 else 0
    for i in range(n):
        bits |= y[i]
    return 0 <= bits < 2147483648
