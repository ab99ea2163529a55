"""Output buffers of attention views, which never move, and the launches that fill them."""

from __future__ import annotations

import torch

from kvcache.allocation import zeros
from kvcache.config import CacheConfig
from kvcache.device.data_plane import DataPlane, PlacedRows
from kvcache.kernels.fill_indices import MOST_ENTRIES, fill_indices, fill_indices_twin
from kvcache.kernels.fill_table import ALIGN, fill_table, fill_table_twin


def table_columns(pages: int) -> int:
    """Return the columns of a page table that has room for `pages` pages."""
    return -(-pages // ALIGN) * ALIGN


class TableBuffers:
    """A padded page table (kernels/fill_table.py).

    Attributes:
        table: [max_rows, columns] int32.
        cache_seqlens: [max_rows] int32.
        window_start: [max_rows] int32.
        window: Tokens that a query reads; 0: a Full table.
    """

    def __init__(self, plane: DataPlane, window: int) -> None:
        config = plane.config
        self._plane = plane
        self.window = window
        columns = table_columns(config.max_pages_per_row)
        self.table = _zeros(plane, config.max_rows, columns)
        self.cache_seqlens = _zeros(plane, config.max_rows)
        self.window_start = _zeros(plane, config.max_rows)

    def fill(self, placed: PlacedRows, num_lanes: int, width: int) -> None:
        """Write `num_lanes` lanes of `width` columns. One launch."""
        plane = self._plane
        pools, host, page_size = plane.pools, plane.host, plane.config.page_size
        plane.launches += 1 if num_lanes else 0
        if host is not None:
            fill_table_twin(
                placed.rows,
                placed.num_rows,
                placed.lens,
                host["page_table"],
                host["swa_map"],
                host["row_state"],
                self.table.numpy(),
                self.cache_seqlens.numpy(),
                self.window_start.numpy(),
                num_lanes,
                width,
                page_size,
                self.window,
            )
        else:
            fill_table(
                placed.rows,
                placed.num_rows,
                placed.lens,
                pools.page_table,
                pools.swa_map,
                pools.row_state,
                self.table,
                self.cache_seqlens,
                self.window_start,
                num_lanes=num_lanes,
                width=width,
                page_size=page_size,
                window=self.window,
            )


class IndexBuffers:
    """A ragged list of pages or token slots (kernels/fill_indices.py).

    Attributes:
        indptr: [max_rows + 1] int32.
        indices: [capacity] int32 or int64.
        last_page_len: [max_rows] int32.
        window_start: [max_rows] int32.
        unit: Tokens of an entry: page_size or 1.
        window: Tokens that a query reads; 0: a Full list.
    """

    def __init__(
        self, plane: DataPlane, unit: int, window: int, capacity: int | None, dtype: torch.dtype
    ) -> None:
        config = plane.config
        self._plane = plane
        self.unit = unit
        self.window = window
        if capacity is None:
            capacity = most_entries(config, unit)
        self.indptr = _zeros(plane, config.max_rows + 1)
        self.indices = _zeros(plane, capacity, dtype=dtype)
        self.last_page_len = _zeros(plane, config.max_rows)
        self.window_start = _zeros(plane, config.max_rows)

    def fill(self, placed: PlacedRows, num_lanes: int, max_entries: int) -> None:
        """Write the lists of `num_lanes` lanes, which must fit. One launch."""
        plane = self._plane
        pools, host, page_size = plane.pools, plane.host, plane.config.page_size
        plane.launches += 1 if num_lanes else 0
        if host is not None:
            fill_indices_twin(
                placed.rows,
                placed.num_rows,
                placed.lens,
                host["page_table"],
                host["swa_map"],
                host["row_state"],
                self.indptr.numpy(),
                self.indices.numpy(),
                self.last_page_len.numpy(),
                self.window_start.numpy(),
                num_lanes,
                max_entries,
                page_size,
                self.unit,
                self.window,
            )
        else:
            fill_indices(
                placed.rows,
                placed.num_rows,
                placed.lens,
                pools.page_table,
                pools.swa_map,
                pools.row_state,
                self.indptr,
                self.indices,
                self.last_page_len,
                self.window_start,
                num_lanes=num_lanes,
                max_entries=max_entries,
                page_size=page_size,
                unit=self.unit,
                window=self.window,
            )


def most_entries(config: CacheConfig, unit: int) -> int:
    """Return the entries that a list of every row at `max_len` needs, as far as places are int32."""
    tokens = config.max_pages_per_row * config.page_size
    return min(config.max_rows * (tokens // unit), MOST_ENTRIES)


def _zeros(plane: DataPlane, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return zeros(shape, dtype, plane.pools.tops.device)
