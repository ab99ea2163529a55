"""Runs of tokens: compare, copy, range check, at the speed of the C library or of vector code.

Tokens of one dtype are compared by memcmp and copied by memcpy, which are called as they are: faster than a
compiled loop where memory is what counts. int64 keys beside the int32 slab take loops that the compiler turns
into vector code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import overload

from kvcache.compiled import inlined
from kvcache.tree.arrays import Int32Array, TokenArray

# Tokens a block: an early exit every 64 tokens costs nothing and the OR of XORs inside vectorises.
_BLOCK = 64
# Tokens that memcmp is given at a time; it does not say where the first difference is.
_CHUNK = 1024

_memcmp = types.ExternalFunction("memcmp", types.int32(types.voidptr, types.voidptr, types.uintp))
_memcpy = types.ExternalFunction("memcpy", types.voidptr(types.voidptr, types.voidptr, types.uintp))


def _known_equal(x: Int32Array, y: TokenArray) -> bool:
    """Return whether memcmp finds `x` and `y` equal; False where it cannot compare them."""
    return x.dtype == y.dtype and bool((x == y).all())


@overload(_known_equal, strict=False, inline="always")
def _compile_known_equal(x: Any, y: Any) -> Callable[[Any, Any], bool]:
    if x.dtype == y.dtype:
        return lambda x, y: _memcmp(x.ctypes.data, y.ctypes.data, x.nbytes) == 0
    return lambda x, y: False


def _copy(x: Int32Array, y: TokenArray) -> None:
    x[:] = y


@overload(_copy, strict=False, inline="always")
def _compile_copy(x: Any, y: Any) -> Callable[[Any, Any], None]:
    if x.dtype == y.dtype:

        def copy(x: Any, y: Any) -> None:
            _memcpy(x.ctypes.data, y.ctypes.data, x.nbytes)
    else:

        def copy(x: Any, y: Any) -> None:
            for i in range(x.shape[0]):
                x[i] = y[i]

    return copy


@inlined
def matching_tokens(slab: Int32Array, a: int, keys: TokenArray, b: int, n: int) -> int:
    """Return how many tokens of `slab[a:a+n]` and `keys[b:b+n]` agree from the start."""
    # Slices first: indexing with a signed base would stop the vectoriser.
    x = slab[a : a + n]
    y = keys[b : b + n]
    j = 0
    while j < n and _known_equal(x[j : j + _CHUNK], y[j : j + _CHUNK]):
        j += _CHUNK
    if j >= n:
        return n
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
    _copy(slab[a : a + n], keys[b : b + n])


@inlined
def storable_tokens(keys: TokenArray, b: int, n: int) -> bool:
    """Return whether all of `keys[b:b+n]` are in [0, 2^31)."""
    y = keys[b : b + n]
    bits = y[0] & 0 if n > 0 else 0
    for i in range(n):
        bits |= y[i]
    return 0 <= bits < 2147483648
