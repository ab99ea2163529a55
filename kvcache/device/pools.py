"""Pools: the device tensors that hold page ids. The host never reads them back."""

from __future__ import annotations

import numpy as np
import torch

from kvcache import allocation
from kvcache.config import CacheConfig
from kvcache.kernels.layout import ERROR_FIELDS, NUM_POOLS, ROW_FIELDS
from kvcache.uncopied import Uncopied


class Pools(Uncopied):
    """Page table, slab, Full -> SWA map and free stacks of one cache, all int32 on `config.device`.

    Attributes:
        page_table: [max_rows, max_pages_per_row rounded up to 16], Full page of each page of a row; rows
            name pages of their own and of the tree alike. Entries at or above a row's allocated pages mean
            nothing. The width lets kernels copy 16 bytes at a time.
        slab: [full_pages], Full page of each tree slot.
        swa_map: [full_pages + 1], SWA page under each Full page, 0 = none. Length 0 without SWA.
        full_stack: [full_pages], free Full pages: entries [0, tops[0]).
        swa_stack: [swa_pages], free SWA pages: entries [0, tops[1]).
        row_state: [4, max_rows], lengths of each row in tokens (kernels/layout.py).
        tops: [2], number of free Full and SWA pages.
        error: [2], (code, row) of the first fault of a captured decode step (kernels/layout.py), 0 without.
    """

    def __init__(self, config: CacheConfig) -> None:
        device = torch.device(config.device)
        full, swa = config.full_pages, config.swa_pages

        def zeros(*shape: int) -> torch.Tensor:
            return allocation.zeros(shape, torch.int32, device)

        def fresh_stack(pages: int) -> torch.Tensor:
            # popped from the end: page 1 comes first
            ids = np.arange(pages, 0, -1, dtype=np.int32)
            return torch.from_numpy(ids).to(device)

        self.page_table = zeros(config.max_rows, -(-config.max_pages_per_row // 16) * 16)
        self.slab = zeros(full)
        self.swa_map = zeros(full + 1 if config.has_swa else 0)
        self.full_stack = fresh_stack(full)
        self.swa_stack = fresh_stack(swa)
        self.row_state = zeros(ROW_FIELDS, config.max_rows)
        self.tops = torch.from_numpy(np.array([full, swa], np.int32)).to(device)
        self.error = zeros(ERROR_FIELDS)
        assert self.tops.numel() == NUM_POOLS

    def reset(self) -> None:
        """Make all pages free again, as at the start; launches only, nothing waits."""
        for stack in (self.full_stack, self.swa_stack):
            pages = stack.shape[0]
            torch.arange(pages, 0, -1, dtype=torch.int32, device=stack.device, out=stack)
        for x in (self.page_table, self.slab, self.swa_map, self.row_state, self.error):
            x.zero_()
        self.tops[0].fill_(self.full_stack.shape[0])
        self.tops[1].fill_(self.swa_stack.shape[0])

    @property
    def nbytes(self) -> int:
        """Device bytes held."""
        return sum(x.numel() * x.element_size() for x in vars(self).values())
