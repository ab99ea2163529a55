"""Views: what attention backends read of a batch of rows, each filled by one launch into fixed buffers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kvcache.checks import INT32, as_int_array, check_int
from kvcache.compiled import compiled
from kvcache.device.view_buffers import IndexBuffers, TableBuffers, most_entries, table_columns
from kvcache.errors import InvalidInputError
from kvcache.requests import check_lens, running_rows
from kvcache.rows import ALLOCATED, COMPUTED, Int32Array
from kvcache.state import state_of
from kvcache.types import Lens, Rows
from kvcache.uncopied import Uncopied


class PageTable(NamedTuple):
    """Padded page table of a batch; int32 on the cache's device."""

    page_table: torch.Tensor  # [n, width] page ids, row by row; 0 where a row has no page
    cache_seqlens: torch.Tensor  # [n] tokens that the table covers
    window_start: torch.Tensor  # [n] position of the table's first token; 0 in a Full table


class PageIndices(NamedTuple):
    """Ragged list (CSR) of the pages, or token slots, of a batch; int32 on the cache's device."""

    indptr: torch.Tensor  # [n + 1]; entries of row i are indices[indptr[i] : indptr[i + 1]]
    indices: torch.Tensor  # [total] page ids, or token slots (then of the dtype that was asked for)
    last_page_len: torch.Tensor  # [n] tokens in the last entry, 1 .. page_size; 0 for an empty list
    window_start: torch.Tensor  # [n] position of the first listed token; 0 in a Full list


@compiled
def count_entries(
    state: Int32Array, rows: Int32Array, lens: Int32Array | None, window: int, unit: int
) -> tuple[int, int]:
    """Return (entries in all, entries of the longest row) of a view; see kernels/fill_indices.py."""
    total = 0
    widest = 0
    for i in range(rows.shape[0]):
        r = rows[i]
        kv_len = state[ALLOCATED, r] if lens is None else lens[i]
        first = max(state[COMPUTED, r] + 1 - window, 0) // unit if window > 0 else 0
        count = (kv_len + unit - 1) // unit - first
        total += count
        widest = max(widest, count)
    return total, widest


class Views(Uncopied):
    """Page tables and index lists of rows, as attention backends take them (docs/attention_backends.md).

    Each call is one launch, and one upload where the rows are not those of the last call or lengths are
    given. It waits for nothing. The result lies in buffers that belong to the view: it holds until the
    same method is called again.

    A view is of the next forward of each row: of its queries at [computed_len, kv_len), where kv_len is
    the row's `allocated_len`, or the length given. A query at q reads tokens (q - W, q] of an SWA layer, so
    an SWA view covers [computed_len + 1 - W, kv_len), from the page of its first token on (token slots:
    from that token itself). All of it has live pages, whatever was slid or committed. Positions in an SWA
    view count from `window_start`; causal and window masks depend on differences of positions alone, so
    backends take such a view as it is, with keys that are stored after RoPE.

    `lens` is for a forward that does not fill what is allocated: fewer draft tokens than before, or the
    cached part only, lens = computed_len, where new keys go to the backend beside it.

    Args:
        cache: The manager.
        max_slots: Entries of the buffer of `token_slots` and of `swa_token_slots`, each made at the first
            call; default: what max_rows rows of max_len tokens need.
    """

    def __init__(self, cache: Any, *, max_slots: int | None = None) -> None:
        if max_slots is not None:
            check_int("max_slots", max_slots, low=0, high=2**31 - 1)
        self._state = state_of(cache)
        self._max_slots = max_slots
        self._tables: dict[str, TableBuffers] = {}
        self._lists: dict[tuple[str, torch.dtype], IndexBuffers] = {}

    def page_table(self, rows: Rows, lens: Lens | None = None) -> PageTable:
        """Return the padded table of Full pages.

        Args:
            rows: [n] distinct running rows.
            lens: [n] tokens, computed_len <= lens <= allocated_len; default: allocated_len.

        Returns:
            `width` is the longest row's pages, rounded up to 16.

        Raises:
            InvalidInputError: A bad row or length.
        """
        return self._table("page_table", rows, lens, 0)

    def swa_page_table(self, rows: Rows, lens: Lens | None = None) -> PageTable:
        """Return the padded table of SWA pages, cut to the window. As `page_table` otherwise.

        Raises:
            InvalidInputError: A bad row or length, or there is no SWA pool.
        """
        return self._table("swa_page_table", rows, lens, self._window())

    def full_indices(self, rows: Rows, lens: Lens | None = None) -> PageIndices:
        """Return the list of Full pages. Arguments as in `page_table`.

        Example:
            >>> view = cache.views.full_indices(rows)      # page_size 4, rows of 5 and 8 tokens
            >>> view.indptr.tolist(), view.last_page_len.tolist()
            ([0, 2, 4], [1, 4])
        """
        return self._indices("full_indices", rows, lens, self._page_size(), 0, torch.int32)

    def swa_indices(self, rows: Rows, lens: Lens | None = None) -> PageIndices:
        """Return the list of SWA pages of the window. As `full_indices` otherwise.

        Raises:
            InvalidInputError: A bad row or length, or there is no SWA pool.
        """
        window = self._window()
        return self._indices("swa_indices", rows, lens, self._page_size(), window, torch.int32)

    def token_slots(
        self, rows: Rows, lens: Lens | None = None, *, dtype: torch.dtype = torch.int32
    ) -> PageIndices:
        """Return the list of Full token slots, page * page_size + offset, for backends of page size 1.

        Args:
            rows: As in `page_table`.
            lens: As in `page_table`.
            dtype: torch.int32, or torch.int64 (SGLang's Triton backend).

        Raises:
            InvalidInputError: A bad row, length or dtype, or more slots than `max_slots`.
        """
        return self._indices("token_slots", rows, lens, 1, 0, dtype)

    def swa_token_slots(
        self, rows: Rows, lens: Lens | None = None, *, dtype: torch.dtype = torch.int32
    ) -> PageIndices:
        """Return the list of SWA token slots of the window. As `token_slots` otherwise.

        Raises:
            InvalidInputError: A bad row, length or dtype, more slots than `max_slots`, or no SWA pool.
        """
        return self._indices("swa_token_slots", rows, lens, 1, self._window(), dtype)

    # -- shared ----------------------------------------------------------------------------------------------

    def _page_size(self) -> int:
        return self._state.config.page_size

    def _window(self) -> int:
        window = self._state.config.window
        if window is None:
            raise InvalidInputError("an SWA view needs a config with a window, got window=None")
        return window

    def _arguments(self, rows: Rows, lens: Lens | None) -> tuple[Int32Array, Int32Array | None]:
        self._state.check_idle()
        state = self._state.rows
        rows = running_rows(state, rows)
        if lens is not None:
            lens = as_int_array("lens", lens, dtype=INT32)
            check_lens("lens", state, rows, lens, None)
        return rows, lens

    def _table(self, name: str, rows: Rows, lens: Lens | None, window: int) -> PageTable:
        rows, lens = self._arguments(rows, lens)
        plane, config = self._state.plane, self._state.config
        out = self._tables.get(name)
        if out is None:
            out = self._tables[name] = TableBuffers(plane, window)
        state = self._state.rows.state
        widest = count_entries(state, rows, lens, window, config.page_size)[1]
        n, width = rows.size, table_columns(int(widest))
        out.fill(plane.place_rows(rows, lens), n, width)
        return PageTable(out.table[:n, :width], out.cache_seqlens[:n], out.window_start[:n])

    def _indices(
        self, name: str, rows: Rows, lens: Lens | None, unit: int, window: int, dtype: torch.dtype
    ) -> PageIndices:
        rows, lens = self._arguments(rows, lens)
        if dtype not in (torch.int32, torch.int64):
            raise InvalidInputError(f"dtype must be torch.int32 or torch.int64, got {dtype}")
        plane = self._state.plane
        most = self._max_slots if name.endswith("slots") else None
        if most is None:
            most = most_entries(plane.config, unit)
        total, widest = count_entries(self._state.rows.state, rows, lens, window, unit)
        if total > most:
            raise InvalidInputError(
                f"rows must have at most {most} entries (max_slots), got {total}"
            )
        out = self._lists.get((name, dtype))
        if out is None:
            out = self._lists[name, dtype] = IndexBuffers(plane, unit, window, most, dtype)
        n = rows.size
        out.fill(plane.place_rows(rows, lens), n, int(widest))
        return PageIndices(
            out.indptr[: n + 1], out.indices[:total], out.last_page_len[:n], out.window_start[:n]
        )
