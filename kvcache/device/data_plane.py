"""Data plane: runs the kernels on the pools, one upload a call, and mirrors the tops of the free stacks."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from kvcache.config import CacheConfig
from kvcache.device import plan as p
from kvcache.device.pools import Pools
from kvcache.device.staging import Staging
from kvcache.device.stream import StreamGuard
from kvcache.kernels import launch
from kvcache.kernels.advance import advance, advance_twin
from kvcache.kernels.apply import apply, apply_twin
from kvcache.kernels.extend import extend, extend_twin
from kvcache.kernels.slide import slide, slide_twin
from kvcache.kernels.step import step, step_twin
from kvcache.rows import Int32Array
from kvcache.uncopied import Uncopied

# of a staging buffer at the start: nine descriptors of `apply` for every row
_WORDS_PER_ROW = 64
_MIN_WORDS = 4096

_NO_INTS = np.zeros(0, np.int32)
_NO_TAILS = np.zeros((0, 4), np.int32)
_NO_STATE = np.zeros((4, 1), np.int32)
NO_RANGES = np.zeros((0, 5), np.int32)


# a plan in the staging buffer: where, [7, room] as the host sees it, descriptors, summary of `fill_plan`
_Staged = tuple[slice, Int32Array, int, list[int]]

# words before the rows in the batch buffer: the first one holds their number
BATCH_HEAD = 4


class PlacedRows(NamedTuple):
    """Rows where kernels, or on the CPU their twins, read them: tensors, or numpy arrays."""

    rows: Any  # [>= n] int32
    num_rows: Any  # [1] int32
    lens: Any  # [n] int32, or None


class DataPlane(Uncopied):
    """Launches operations. `full_top` and `swa_top` are the free pages after all that was launched.

    Nothing is read back from the device: both counts follow from the plans alone.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self._has_swa = config.has_swa
        device = torch.device(config.device)
        # checked before every launch; None: twins run on the CPU, and launch nothing
        self.guard = None if device.type == "cpu" else StreamGuard(device)
        # rows of the last step, advance or slide: while the batch stays, they are not uploaded again
        self._rows: Int32Array = _NO_INTS
        self._raw_rows = b""
        words = BATCH_HEAD + config.max_rows
        self._batch = torch.zeros(words, dtype=torch.int32, device=device)
        self._num_rows, self._rows_buffer = self._batch[:1], self._batch[BATCH_HEAD:]
        # the last thing it does is a copy that waits: what was filled is there on whatever stream comes first
        self.pools = Pools(config)
        self.staging = Staging(config.device, max(_MIN_WORDS, _WORDS_PER_ROW * config.max_rows))
        self.full_top = config.full_pages
        self.swa_top = config.swa_pages
        self.launches = 0
        self._summary = np.zeros(p.NUM_SUMMARY, np.int64)
        # CPU twins take numpy; the views are made once
        self._host = None
        if not launch.takes_kernel(self.pools.tops):
            self._host = h = {name: x.numpy() for name, x in vars(self.pools).items()}
            self._tables = h["page_table"], h["slab"], h["swa_map"]
            self._stacks = h["full_stack"], h["swa_stack"], h["row_state"], h["tops"]

    @property
    def host(self) -> dict[str, Any] | None:
        """The pools as numpy arrays if they are on the CPU, else None."""
        return self._host

    def reset(self) -> None:
        """Free all pages and forget the rows of the last call."""
        self.pools.reset()
        self.full_top = self.config.full_pages
        self.swa_top = self.config.swa_pages
        self._rows, self._raw_rows = _NO_INTS, b""

    # -- plans ---------------------------------------------------------------------------------------------

    def _stage(
        self,
        ranges: Int32Array,
        rows: Int32Array,
        tails: Int32Array,
        states: Int32Array,
        row_state: Int32Array,
    ) -> _Staged | None:
        """Write a plan into the call's staging buffer. None: there is nothing to do."""
        room = ranges.shape[0] + 2 * tails.shape[0] + states.shape[0]
        if room == 0:
            return None
        where, desc = self.staging.matrix(7, room)
        summary = self._summary
        total = p.fill_plan(
            ranges,
            rows,
            tails,
            states,
            row_state,
            self._has_swa,
            self.full_top,
            self.swa_top,
            desc,
            summary,
        )
        found = summary.tolist()
        self.full_top, self.swa_top = found[p.FULL_TOP], found[p.SWA_TOP]
        return where, desc, total, found

    def _run(self, staged: _Staged) -> None:
        """Launch the phases of an uploaded plan."""
        where, desc, total, found = staged
        counts, widest = found[p.COUNTS], found[p.WIDEST]
        self.launches += 3 - counts.count(0)
        if self._host is not None:
            # the twin goes through the descriptors in order, so it needs no call for each phase
            apply_twin(
                desc,
                *self._tables,
                *self._stacks,
                0,
                total,
                max(widest),
                self.full_top,
                self.swa_top,
            )
            return
        pools = self.pools
        start = 0
        for num, most in zip(counts, widest, strict=True):
            if num == 0:
                continue
            apply(
                self.staging.device_part(where).view(desc.shape),
                pools.page_table,
                pools.slab,
                pools.swa_map,
                pools.full_stack,
                pools.swa_stack,
                pools.row_state,
                pools.tops,
                start=start,
                num=num,
                max_pages=most,
                full_top=self.full_top,
                swa_top=self.swa_top,
            )
            start += num

    def apply(
        self,
        ranges: Int32Array,
        rows: Int32Array = _NO_INTS,
        *,
        tails: Int32Array = _NO_TAILS,
        states: Int32Array = _NO_INTS,
        row_state: Int32Array = _NO_STATE,
        extra: Int32Array | None = None,
    ) -> slice:
        """Carry out ranges, free the own pages of ending rows and set row lengths: at most three launches.

        Returns:
            Where `extra`, uploaded along for the caller's own launch, lies in the staging buffer.
        """
        self.staging.begin()
        extra_at = slice(0, 0)
        if extra is not None:
            extra_at = self.staging.part(extra.size)
            self.staging.host_part(extra_at)[:] = extra
        staged = self._stage(ranges, rows, tails, states, row_state)
        if staged is not None and staged[2] > 0:
            self.staging.upload()
            self._run(staged)
        return extra_at

    # -- pages for rows ------------------------------------------------------------------------------------

    def extend(self, desc: Int32Array, total: int, widest: int, evicted: Int32Array) -> None:
        """Free what was evicted for it, then give rows pages: `desc` [5, n] as `plan_extend` fills it."""
        num = desc.shape[1]
        staging = self.staging
        staging.begin()
        where, staged_desc = staging.matrix(5, num)
        staged_desc[:] = desc
        staged = self._stage(evicted, _NO_INTS, _NO_TAILS, _NO_INTS, _NO_STATE)
        staging.upload()
        if staged is not None:
            self._run(staged)
        self.launches += 1
        pools, config = self.pools, self.config
        if self._host is not None:
            h = self._host
            extend_twin(
                desc,
                h["page_table"],
                h["full_stack"],
                h["swa_stack"],
                h["swa_map"],
                h["row_state"],
                h["tops"],
                num,
                self.full_top,
                self.swa_top,
                total,
                widest,
                config.has_swa,
            )
        else:
            extend(
                staging.device_part(where).view(5, num),
                pools.page_table,
                pools.full_stack,
                pools.swa_stack,
                pools.swa_map,
                pools.row_state,
                pools.tops,
                num_rows=num,
                full_top=self.full_top,
                swa_top=self.swa_top,
                total=total,
                max_pages=widest,
                has_swa=config.has_swa,
            )
        self.took(total)

    def took(self, pages: int) -> None:
        """Count pages that were taken from both stacks."""
        self.full_top -= pages
        if self._has_swa:
            self.swa_top -= pages

    def _batch_part(self, rows: Int32Array) -> slice:
        """Write `rows` and their number into the call's staging buffer."""
        where = self.staging.part(BATCH_HEAD + rows.size)
        part = self.staging.host_part(where)
        part[0] = rows.size
        part[BATCH_HEAD:] = rows
        return where

    def place_rows(self, rows: Int32Array, lens: Int32Array | None = None) -> PlacedRows:
        """Have rows, and a length of each, where an operation on them reads them; at most one upload."""
        if lens is None:
            self._upload_rows(rows)
            return self.placed_rows()
        staging = self.staging
        staging.begin()
        where = self._batch_part(rows)
        where_lens = staging.part(rows.size)
        staging.host_part(where_lens)[:] = lens
        staging.upload()
        if self._host is not None:
            return PlacedRows(rows, np.array([rows.size], np.int32), lens)
        batch = staging.device_part(where)
        return PlacedRows(batch[BATCH_HEAD:], batch[:1], staging.device_part(where_lens))

    def placed_rows(self) -> PlacedRows:
        """Return where the rows of the last call are, without having any placed there."""
        if self._host is None:
            return PlacedRows(self._rows_buffer, self._num_rows, None)
        return PlacedRows(self._rows, np.array([self._rows.size], np.int32), None)

    def place_rows_and_free(self, rows: Int32Array, evicted: Int32Array) -> None:
        """Have `rows` where `placed_rows` says, and free what was evicted; at most one upload."""
        self._upload_rows(rows, evicted)

    def _upload_rows(self, rows: Int32Array, evicted: Int32Array = NO_RANGES) -> None:
        """Have `rows` on the device, and free what was evicted.

        Rows are not uploaded again while they are there from the last call.
        """
        fresh = rows is not self._rows and rows.tobytes() != self._raw_rows
        if not fresh and evicted.shape[0] == 0:
            return
        staging = self.staging
        staging.begin()
        where = self._batch_part(rows)
        staged = self._stage(evicted, _NO_INTS, _NO_TAILS, _NO_INTS, _NO_STATE)
        self._rows, self._raw_rows = rows, rows.tobytes()
        on_device = self._host is None
        if staged is None and on_device:
            staging.upload_to(self._batch[: BATCH_HEAD + rows.size], where)
            return
        staging.upload()
        if fresh and on_device:
            batch = self._batch[: BATCH_HEAD + rows.size]
            batch.copy_(staging.device_part(where), non_blocking=True)
        if staged is not None:
            self._run(staged)

    def step(self, rows: Int32Array, total: int, evicted: Int32Array) -> None:
        """Free what was evicted for it, then one more token for each row; `total` of them begin a page."""
        self._upload_rows(rows, evicted)
        self.launches += 1
        pools, config = self.pools, self.config
        if self._host is not None:
            h = self._host
            step_twin(
                self._rows,
                h["page_table"],
                h["full_stack"],
                h["swa_stack"],
                h["swa_map"],
                h["row_state"],
                h["tops"],
                rows.size,
                config.page_size,
                config.has_swa,
            )
        else:
            step(
                self._rows_buffer,
                pools.page_table,
                pools.full_stack,
                pools.swa_stack,
                pools.swa_map,
                pools.row_state,
                pools.tops,
                num_rows=rows.size,
                page_size=config.page_size,
                has_swa=config.has_swa,
            )
        self.took(total)

    def advance(self, rows: Int32Array, lens: Int32Array | None) -> None:
        """COMPUTED = ALLOCATED, or `lens`."""
        pools = self.pools
        device_lens = None
        device_rows = self._rows_buffer
        if lens is None:
            self._upload_rows(rows)
        else:
            staging = self.staging
            staging.begin()
            where_rows = staging.part(rows.size)
            where_lens = staging.part(rows.size)
            staging.host_part(where_rows)[:] = rows
            staging.host_part(where_lens)[:] = lens
            staging.upload()
            device_rows = staging.device_part(where_rows)
            device_lens = staging.device_part(where_lens)
        self.launches += 1
        if self._host is not None:
            advance_twin(rows, lens, self._host["row_state"], rows.size)
        else:
            advance(device_rows, device_lens, pools.row_state, num_rows=rows.size)

    def slide(self, rows: Int32Array, freed: int) -> None:
        """Move frontiers; the host has counted `freed` SWA pages."""
        self._upload_rows(rows)
        self.launches += 1
        pools, config = self.pools, self.config
        if self._host is not None:
            h = self._host
            slide_twin(
                self._rows,
                h["page_table"],
                h["swa_map"],
                h["swa_stack"],
                h["row_state"],
                h["tops"],
                rows.size,
                config.page_size,
                config.keep_tokens,
                config.bigram,
            )
        else:
            slide(
                self._rows_buffer,
                pools.page_table,
                pools.swa_map,
                pools.swa_stack,
                pools.row_state,
                pools.tops,
                num_rows=rows.size,
                page_size=config.page_size,
                keep=config.keep_tokens,
                bigram=config.bigram,
            )
        self.swa_top += freed
