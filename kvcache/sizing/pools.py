"""Pages of both pools from the memory there is: what running requests need, the rest by what is cached."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from kvcache.checks import check_int
from kvcache.errors import CapacityError, InvalidInputError
from kvcache.sizing.catalogue import ModelShape

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)

# windows that a cached request is to have: where others fork, and where its next turn goes on
_WINDOWS = 2
# token slots are int32 in the attention backends
_MAX_INT32 = 2**31 - 1


def parse_bytes(text: str) -> int:
    """Return the bytes that "40GiB", "40 GB", "1.5TiB" or "1024" say; KB is 1,000, KiB 1,024 bytes.

    Raises:
        InvalidInputError: It says something else, or less than a byte.
    """
    found = _AMOUNT.fullmatch(text)
    if found is None or found[2].lower() not in _UNITS:
        raise InvalidInputError(f"memory must be like 40GiB, 40GB or a number, got {text!r}")
    amount = int(Fraction(found[1]) * _UNITS[found[2].lower()])
    return check_int("memory", amount, low=1, high=2**60)


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Sizes of both pools of one rank. Pages without the padding page 0, bytes with it."""

    page_size: int  # tokens
    window: int | None
    full_pages: int
    swa_pages: int  # 0 without sliding-window layers
    full_bytes: int
    swa_bytes: int
    running: int  # requests that the SWA pool was sized for
    row_pages: int  # SWA pages that a running request needs at most, without its prefill chunk
    chunk_pages: int  # SWA pages of a step's prefill chunks

    @property
    def full_tokens(self) -> int:
        """Tokens of the Full pool."""
        return self.full_pages * self.page_size

    @property
    def swa_tokens(self) -> int:
        """Tokens of the SWA pool."""
        return self.swa_pages * self.page_size

    @property
    def running_fit(self) -> int:
        """Requests that can run without one waiting for another's SWA pages, whatever is cached."""
        if self.window is None:
            return self.running
        return max(0, self.swa_pages - self.chunk_pages) // self.row_pages

    def config_line(self, max_len: int) -> str:
        """Return the CacheConfig to paste; a request holds at most what the Full pool does."""
        return (
            f"CacheConfig(page_size={self.page_size}, window={self.window}, "
            f"full_pages={self.full_pages}, swa_pages={self.swa_pages}, max_rows={self.running}, "
            f'max_len={min(max_len, self.full_tokens)}, device="cuda")'
        )


def size_pools(
    model: ModelShape,
    memory: int,
    *,
    kv: str = "bf16",
    page_size: int = 64,
    running: int = 64,
    chunk: int = 8192,
    cached_len: int = 8192,
    swa_share: float | None = None,
    tp: int = 1,
) -> PoolSizes:
    """Split `memory` into a Full and an SWA pool (docs/sizing.md).

    Both pools get the SWA pages that `running` requests need at most, 2 * ceil(W / P) + 3 each and those of
    the chunk: a request goes on while the tree still holds the window that it began with. The rest is split
    so that two windows fit for every `cached_len` tokens of Full KV.

    Args:
        model: Its layers.
        memory: Bytes for the KV of both pools, on each rank.
        kv: "fp8", "bf16" or "fp16".
        page_size: Tokens of a page.
        running: Requests that run at a time.
        chunk: Prompt tokens of a step, of all its prefills together.
        cached_len: Tokens that a cached request has on average.
        swa_share: Share of `memory` for the SWA pool instead; 0 < share < 1.
        tp: Ranks that share the heads.

    Raises:
        CapacityError: The memory is too small.
        InvalidInputError: A value out of range, or a share for a model without sliding-window layers.
    """
    check_int("memory", memory, low=1, high=2**60)
    check_int("page_size", page_size, low=1, high=2**20)
    check_int("running", running, low=1, high=2**20)
    check_int("chunk", chunk, low=1, high=2**30)
    check_int("cached_len", cached_len, low=1, high=2**30)
    full, swa = (page_size * x(kv, tp) for x in (model.full_token_bytes, model.swa_token_bytes))
    most = _MAX_INT32 // page_size - 1
    if model.window is None:
        if swa_share is not None:
            raise InvalidInputError(f"swa_share: {model.name} has no sliding-window layers")
        full_pages = min(memory // full - 1, most)
        if full_pages < 1:
            raise CapacityError(f"memory must be at least {2 * full:,} bytes, got {memory:,}")
        bytes_of_full = full * (1 + full_pages)
        return PoolSizes(page_size, None, full_pages, 0, bytes_of_full, 0, running, 0, 0)
    window_pages = -(-model.window // page_size)
    need = _Need(running, 2 * window_pages + 3, -(-chunk // page_size))
    if swa_share is None:
        # a window may lie across one page more
        ratio = Fraction(_WINDOWS * (window_pages + 1), -(-cached_len // page_size))
        swa_pages = _by_what_is_cached(memory, full, swa, need, ratio)
    else:
        swa_pages = _by_share(memory, full, swa, need, swa_share)
    # no page has SWA KV without Full KV: more SWA pages than Full pages would never be used
    swa_pages = min(swa_pages, memory // (full + swa) - 1, most)
    full_pages = min((memory - swa * (1 + swa_pages)) // full - 1, most)
    return PoolSizes(
        page_size=page_size,
        window=model.window,
        full_pages=full_pages,
        swa_pages=swa_pages,
        full_bytes=full * (1 + full_pages),
        swa_bytes=swa * (1 + swa_pages),
        running=running,
        row_pages=need.row_pages,
        chunk_pages=need.chunk_pages,
    )


class _Need(NamedTuple):
    """SWA pages of the running requests, at most; they have at least as many Full pages."""

    running: int
    row_pages: int
    chunk_pages: int

    def pages(self, running: int) -> int:
        return running * self.row_pages + self.chunk_pages


def _by_what_is_cached(memory: int, full: int, swa: int, need: _Need, ratio: Fraction) -> int:
    """SWA pages: what runs, and of the rest `ratio` SWA pages for each Full page."""
    pages = need.pages(need.running)
    spare = memory - (full + swa) * (1 + pages)
    if spare < 0:
        fit = max(0, memory // (full + swa) - 1 - need.chunk_pages) // need.row_pages
        raise CapacityError(
            f"memory must be at least {memory - spare:,} bytes for {need.running} running requests, "
            f"got {memory:,}, which holds {fit}"
        )
    more_full = spare // (full + swa * ratio)
    return pages + (spare - more_full * full) // swa


def _by_share(memory: int, full: int, swa: int, need: _Need, share: float) -> int:
    """SWA pages of a share of the memory; one request must be able to run."""
    if not 0 < share < 1:
        raise InvalidInputError(f"swa_share must be in (0, 1), got {share}")
    least = (1 + need.pages(1)) * swa
    most = memory - (1 + need.pages(1)) * full
    found = int(Fraction(str(share)) * memory)
    if not least <= found <= most:
        raise CapacityError(
            f"swa_share must be in [{least / memory:.4f}, {max(0, most) / memory:.4f}] for one running "
            f"request in {memory:,} bytes, got {share}"
        )
    return found // swa - 1
