"""Warm-up: a small cache makes every call once, so that all code of a cache like it is compiled and loaded.

What is compiled depends on dtypes and flags, and for Triton on the page size and on where tensors begin,
never on the size of a pool: the small cache has small pools and the rest of the real one's config. Tokens may
be int32 or int64, and read-only; all other arrays of a caller reach compiled code as one kind (checks.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kvcache.config import CacheConfig
from kvcache.device.decode_step import DecodeStep
from kvcache.device.device_match import DeviceKeys
from kvcache.kernels.match import ALIGN
from kvcache.keys import KeyBatch, Ragged, TokenArray
from kvcache.manager import KVCacheManager

_ROWS = 2
_PROMPT_PAGES = 4
# beyond the prompt, so that the window leaves the prefix that a row shares with the tree
_MORE_PAGES = 6


def small_config(config: CacheConfig) -> CacheConfig:
    """Return the config of the smallest cache that runs the same compiled code as one of `config`."""
    page_size = config.page_size
    pages = 2 * _ROWS * (_PROMPT_PAGES + _MORE_PAGES)
    return replace(
        config,
        window=None if config.window is None else min(config.window, 2 * page_size),
        full_pages=pages,
        swa_pages=0 if config.window is None else pages,
        max_rows=_ROWS,
        max_len=(_PROMPT_PAGES + _MORE_PAGES + 2) * page_size,
        max_namespaces=4,
    )


def warm_up(config: CacheConfig, *, every: bool = True) -> None:
    """Make every call of a small cache like one of `config`, with each kind of argument.

    Waits for the device.

    Args:
        every: False: only what requests with int32 tokens need, no views and nothing for keys on the device.
    """
    cache = KVCacheManager(small_config(config))
    buffers = [
        _tokens(cache.config, dtype, writable)
        for dtype in (np.int32, np.int64)
        for writable in (True, False)
    ]
    for tokens in buffers if every else buffers[:1]:
        _serve(cache, tokens)
        cache.flush()
    _namespaces(cache, buffers[0])
    if every:
        for tokens in buffers[::2]:
            _match_on_device(cache, tokens)
        _read(cache, buffers[0])
        cache.reset()
    cache.close()


def _tokens(config: CacheConfig, dtype: Any, writable: bool) -> TokenArray:
    """Return the tokens of all requests: row i of [_ROWS, max_len] is request i."""
    tokens = np.arange(_ROWS * config.max_len, dtype=dtype) % 30_000
    tokens.flags.writeable = writable
    return tokens


def _keys(cache: KVCacheManager, tokens: TokenArray, length: int) -> KeyBatch:
    return KeyBatch(tokens, np.arange(_ROWS) * cache.config.max_len, np.full(_ROWS, length))


def _serve(cache: KVCacheManager, tokens: TokenArray) -> None:
    """Requests begin, run, hand over, are retracted, resume and end."""
    page_size = cache.config.page_size
    prompt = _PROMPT_PAGES * page_size + 1
    end = prompt + _MORE_PAGES * page_size
    short, whole = _keys(cache, tokens, prompt - 1), _keys(cache, tokens, end)
    hints = Ragged([page_size] * _ROWS, range(_ROWS + 1))
    # as where an insert is longer than any before: the scratch grows
    cache.tree._marks = np.zeros(1, np.int64)
    found = cache.match(short)
    found = cache.match(short, previous=found)
    cache.admit_as_many(found, [prompt] * _ROWS)
    rows = cache.admit(found)
    cache.index(rows)
    cache.extend(rows, [prompt] * _ROWS)
    cache.advance(rows, [prompt - 1] * _ROWS)
    cache.advance(rows)
    cache.commit(rows, whole, hints)
    cache.step(rows)
    cache.advance(rows)
    found = cache.retract(rows, whole)
    rows = cache.admit(cache.match(short, previous=found))
    cache.extend(rows, [end] * _ROWS)
    cache.advance(rows)
    cache.slide(rows)
    cache.unpin(cache.pin(short).pins)
    cache.finish(rows[:1], KeyBatch(tokens, whole.starts[:1], whole.lens[:1]))
    cache.match(short)
    cache.abort(rows[1:])
    cache.evict(1, 1 if cache.config.has_swa else 0)


def _namespaces(cache: KVCacheManager, tokens: TokenArray) -> None:
    """A namespace comes and goes with what is cached in it."""
    handle = cache.namespace("warm-up")
    length = _PROMPT_PAGES * cache.config.page_size
    keys = _keys(cache, tokens, length)
    rows = cache.admit(cache.match(keys, handle))
    cache.extend(rows, [length] * _ROWS)
    cache.advance(rows)
    cache.finish(rows, keys)
    cache.drop_namespace(handle)


def _match_on_device(cache: KVCacheManager, tokens: TokenArray) -> None:
    """Matches of keys that lie in each of the ways that kernels tell apart, and what is cached changes."""
    length = _PROMPT_PAGES * cache.config.page_size
    keys = _keys(cache, tokens, length)
    rows = cache.admit(cache.match(keys))
    cache.extend(rows, [length] * _ROWS)
    cache.advance(rows)
    cache.finish(rows, keys)
    for pool in _placements(_on_device(cache, tokens)):
        for starts in ([0, ALIGN], [0, 1]):
            found = cache.match(DeviceKeys(pool, starts, [length] * _ROWS), on="device")
            found.prefetch()
            rows = cache.admit(found)
            cache.extend(rows, [length + cache.config.page_size] * _ROWS)
            cache.abort(rows)
    cache.flush()  # which the device is told of at the next of them


def _read(cache: KVCacheManager, tokens: TokenArray) -> None:
    """Everything that an engine reads of running rows, and decode steps."""
    page_size = cache.config.page_size
    length = _PROMPT_PAGES * page_size
    keys = _keys(cache, tokens, length)
    rows = cache.admit(cache.match(keys))
    cache.extend(rows, [length] * _ROWS)
    cache.advance(rows)
    cache.commit(rows, keys)
    cache.check()
    names = ["page_table", "full_indices", "token_slots"]
    if cache.config.has_swa:
        names += ["swa_page_table", "swa_indices", "swa_token_slots"]
    for lens in (None, [length] * _ROWS):
        for name in names:
            fill = getattr(cache.views, name)
            fill(rows, lens)
            if name.endswith("slots"):
                fill(rows, lens, dtype=torch.int64)
    decode = DecodeStep(cache, names)
    with decode.running(rows):
        decode.before_forward()
        decode.after_forward()
    decode.check_error()
    if cache.config.has_swa:
        for dtype in (torch.int32, torch.int64):
            slots = torch.zeros(ALIGN + 1, dtype=dtype, device=cache.pools.tops.device)
            for given in _placements(slots):
                for out in (None, *_placements(torch.zeros_like(slots))):
                    cache.translate(given, out=out)
    cache.abort(rows)


def _on_device(cache: KVCacheManager, tokens: TokenArray) -> torch.Tensor:
    return torch.from_numpy(tokens.copy()).to(cache.pools.tops.device)


def _placements(buffer: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield parts of a buffer, one at a multiple of 16 bytes and one not: Triton compiles for each."""
    yield buffer[:-1]
    yield buffer[1:]
