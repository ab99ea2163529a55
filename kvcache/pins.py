"""Pins: prefixes that stay cached until they are released, or until so many admissions have passed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcache.config import CacheConfig
from kvcache.errors import CapacityError, ReceiptError
from kvcache.uncopied import Uncopied

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

FOR_EVER = 2**63 - 1


class PinResult(NamedTuple):
    """Outcome of `pin`."""

    pins: Int64Array  # [n] int64 receipts, for `unpin`
    pinned_len: (
        Int32Array  # [n] int32 tokens of each key that stay cached, their last window included
    )


class Pin(NamedTuple):
    """One pinned prefix."""

    full_pages: int
    swa_pages: int  # of its last window
    until: int  # admissions after which it ends


class Pins(Uncopied):
    """What is pinned, by receipt, and what of the budget that takes.

    Every pin counts all pages of its prefix and of its window, also those that another one pins too.
    """

    def __init__(self, config: CacheConfig) -> None:
        self._full_budget, self._swa_budget = config.pin_budget
        self._most = config.max_pins
        self._keep_pages, self._page_size = config.keep_pages, config.page_size
        self._pins: dict[int, Pin] = {}
        self._full_pages = self._swa_pages = 0
        self._admissions = 0
        self._next_end = FOR_EVER

    def __len__(self) -> int:
        return len(self._pins)

    def check_room(self, lens: Int32Array) -> None:
        """Raise CapacityError if prefixes of `lens` tokens do not fit into what is left of the budget."""
        pages = lens.astype(np.int64) // self._page_size
        full, swa = int(pages.sum()), int(np.minimum(pages, self._keep_pages).sum())
        for name, need, used, budget in (
            ("pins", lens.size, len(self._pins), self._most),
            ("Full pages", full, self._full_pages, self._full_budget),
            ("SWA pages", swa, self._swa_pages, self._swa_budget),
        ):
            if used + need > budget:
                raise CapacityError(
                    f"{name} to pin: {need} needed, {budget - used} of the budget of {budget} are left "
                    "(CacheConfig.pin_share)"
                )

    def add(self, receipts: Int64Array, lens: Int32Array, ttl: int | None) -> None:
        """Note pins of `lens` tokens; `ttl` in admissions, None: until they are released."""
        until = FOR_EVER if ttl is None else self._admissions + ttl
        self._next_end = min(self._next_end, until)
        for receipt, length in zip(receipts.tolist(), lens.tolist(), strict=True):
            pages = length // self._page_size
            pin = Pin(pages, min(pages, self._keep_pages), until)
            self._pins[receipt] = pin
            self._full_pages += pin.full_pages
            self._swa_pages += pin.swa_pages

    def check(self, receipts: Int64Array) -> None:
        """Raise ReceiptError unless all are of standing pins, each once."""
        seen = set()
        for i, receipt in enumerate(receipts.tolist()):
            if receipt not in self._pins or receipt in seen:
                raise ReceiptError(
                    f"pins[{i}] must be the receipt of a standing pin, once; got {receipt}"
                )
            seen.add(receipt)

    def remove(self, receipts: Int64Array) -> None:
        """Forget pins."""
        for receipt in receipts.tolist():
            pin = self._pins.pop(receipt)
            self._full_pages -= pin.full_pages
            self._swa_pages -= pin.swa_pages
        self._next_end = min((pin.until for pin in self._pins.values()), default=FOR_EVER)

    def admitted(self, num: int) -> Int64Array | None:
        """Count admissions; return the receipts of the pins that end with them, oldest first, if any do."""
        self._admissions += num
        if self._admissions < self._next_end:
            return None
        ended = [r for r, pin in self._pins.items() if pin.until <= self._admissions]
        return np.array(ended, np.int64)

    def reset(self) -> None:
        """Forget all pins."""
        self._pins.clear()
        self._full_pages = self._swa_pages = 0
        self._next_end = FOR_EVER
