"""DecodeStep: one decode step's cache maintenance for all running rows, made to be captured in a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from kvcache import rows as row_ops
from kvcache.checks import check_int
from kvcache.device.data_plane import PlacedRows
from kvcache.device.view_buffers import IndexBuffers, TableBuffers
from kvcache.device.views import PageIndices, PageTable, count_entries
from kvcache.errors import IntegrityError, InvalidInputError
from kvcache.kernels.decode_slide import decode_slide, decode_slide_twin
from kvcache.kernels.decode_step import decode_step, decode_step_twin
from kvcache.kernels.layout import ERROR_CODE, ERROR_ROW, NO_PAGE, ROW_FULL
from kvcache.requests import running_rows
from kvcache.rows import Int32Array
from kvcache.state import state_of
from kvcache.types import Rows
from kvcache.uncopied import Uncopied

# name of a view: (whether of the SWA window, whether a list, whether of token slots)
_VIEWS = {
    "page_table": (False, False, False),
    "swa_page_table": (True, False, False),
    "full_indices": (False, True, False),
    "swa_indices": (True, True, False),
    "token_slots": (False, True, True),
    "swa_token_slots": (True, True, True),
}


class DecodeStep(Uncopied):
    """`step`, views, `advance` and `slide` of a decode batch: fixed launches that a graph can hold.

    Grids, buffers and arguments never change. What changes from step to step is on the device: which rows
    run and how many, their lengths, the tops of the free stacks. While the batch stays the same a step
    uploads nothing; when rows join or leave, `running` uploads the list once, outside of the graph. The host
    moves its own lengths and counts by the same rules, so nothing is read back.

    A graph may be captured on any stream of the cache's device: torch.cuda.graph takes one of its own. Warm
    up and replay on the stream of all other calls.

    Attributes:
        num_lanes: Lanes of the views; a batch has at most so many rows. Lanes beyond the batch are padding:
            length 0, page 0, an empty list.
        views: The views by name, PageTable or PageIndices over `num_lanes` lanes. Lists have all of their
            buffer: what lies behind `indptr[num_lanes]` means nothing.
        error: [2] int32 on the device, (code, row) of the first fault of any decode step of the cache
            (kernels/layout.py), all 0 without. It stays 0 as long as all steps go through `running`.

    Args:
        cache: The manager.
        views: Names of methods of kvcache.Views; each is one launch a step.
        num_lanes: Default: max_rows.
        slot_dtype: Of token slots: torch.int32 or torch.int64.
        max_slots: Entries of each buffer of token slots; default: enough for num_lanes rows of max_len.

    Raises:
        InvalidInputError: An unknown view, an SWA view without an SWA pool, or a number out of range.

    Example:
        >>> decode = DecodeStep(cache, views=("page_table", "swa_page_table"))
        >>> decode.warm_up()                                # compiles and loads the kernels
        >>> with torch.cuda.graph(graph):
        ...     decode.before_forward()
        ...     logits = model(tokens, decode.views)
        ...     decode.after_forward()
        >>> with decode.running(rows):                      # each step
        ...     decode.replay(graph)
    """

    def __init__(
        self,
        cache: Any,
        views: Sequence[str] = ("page_table", "swa_page_table"),
        *,
        num_lanes: int | None = None,
        slot_dtype: torch.dtype = torch.int32,
        max_slots: int | None = None,
    ) -> None:
        self._state = state_of(cache)
        self._state.check_stream()
        if max_slots is not None:
            check_int("max_slots", max_slots, low=0, high=2**31 - 1)
        config, plane = self._state.config, self._state.plane
        most = config.max_rows
        self.num_lanes = most if num_lanes is None else num_lanes
        check_int("num_lanes", self.num_lanes, low=1, high=most)
        if slot_dtype not in (torch.int32, torch.int64):
            raise InvalidInputError(
                f"slot_dtype must be torch.int32 or torch.int64, got {slot_dtype}"
            )
        for name in views:
            if name not in _VIEWS:
                raise InvalidInputError(f"views must be of {sorted(_VIEWS)}, got {name!r}")
            if _VIEWS[name][0] and config.window is None:
                raise InvalidInputError(f"{name} needs a config with a window, got window=None")
        self.error = plane.pools.error
        self._begun = self._done = 0  # of the body: launches before the forward, and after it
        self._buffers: list[TableBuffers | IndexBuffers] = []
        self.views: dict[str, PageTable | PageIndices] = {}
        for name in views:
            swa, is_list, is_slots = _VIEWS[name]
            window = config.window or 0 if swa else 0
            if is_list:
                unit = 1 if is_slots else config.page_size
                capacity = max_slots if is_slots else None
                dtype = slot_dtype if is_slots else torch.int32
                out = IndexBuffers(plane, unit, window, capacity, dtype)
                self.views[name] = self._index_view(out)
                self._buffers.append(out)
            else:
                table = TableBuffers(plane, window)
                self.views[name] = self._table_view(table)
                self._buffers.append(table)

    def _table_view(self, out: TableBuffers) -> PageTable:
        n = self.num_lanes
        return PageTable(out.table[:n], out.cache_seqlens[:n], out.window_start[:n])

    def _index_view(self, out: IndexBuffers) -> PageIndices:
        n = self.num_lanes
        return PageIndices(
            out.indptr[: n + 1], out.indices, out.last_page_len[:n], out.window_start[:n]
        )

    # -- what a graph captures -------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Launch every kernel once, for no row: it is compiled and loaded then, which a capture refuses.

        Changes no page and no length. One upload.
        """
        self._state.check_idle()
        self._state.plane.place_rows(np.zeros(0, np.int32))
        self.before_forward()
        self.after_forward()

    def before_forward(self) -> None:
        """Make room for one token of each row and fill the views: 1 + len(views) launches."""
        self._state.check_stream(captured=True)
        self._begun += 1
        plane = self._state.plane
        pools, host, config = plane.pools, plane.host, plane.config
        placed = plane.placed_rows()
        plane.launches += 1
        if host is not None:
            decode_step_twin(
                placed.rows,
                placed.num_rows,
                host["page_table"],
                host["full_stack"],
                host["swa_stack"],
                host["swa_map"],
                host["row_state"],
                host["tops"],
                self.error.numpy(),
                config.page_size,
                config.has_swa,
            )
        else:
            decode_step(
                placed.rows,
                placed.num_rows,
                pools.page_table,
                pools.full_stack,
                pools.swa_stack,
                pools.swa_map,
                pools.row_state,
                pools.tops,
                self.error,
                page_size=config.page_size,
                has_swa=config.has_swa,
            )
        for out in self._buffers:
            self._fill(out, placed)

    def _fill(self, out: TableBuffers | IndexBuffers, placed: PlacedRows) -> None:
        config = self._state.config
        if isinstance(out, TableBuffers):
            out.fill(placed, self.num_lanes, out.table.shape[1])
            return
        # sizes the grid: what a decoding row can list; a longer list takes more rounds
        tokens = out.window if out.window else config.max_pages_per_row * config.page_size
        out.fill(placed, self.num_lanes, tokens // out.unit + 2)

    def after_forward(self) -> None:
        """Say that the forward is on the stream, and free what fell out of the window: one launch."""
        self._state.check_stream(captured=True)
        self._done += 1
        plane = self._state.plane
        pools, host, config = plane.pools, plane.host, plane.config
        placed = plane.placed_rows()
        plane.launches += 1
        if host is not None:
            decode_slide_twin(
                placed.rows,
                placed.num_rows,
                host["page_table"],
                host["swa_map"],
                host["swa_stack"],
                host["row_state"],
                host["tops"],
                self.error.numpy(),
                config.page_size,
                config.keep_tokens,
                config.bigram,
                config.has_swa,
            )
        else:
            decode_slide(
                placed.rows,
                placed.num_rows,
                pools.page_table,
                pools.swa_map,
                pools.swa_stack,
                pools.row_state,
                pools.tops,
                self.error,
                page_size=config.page_size,
                keep=config.keep_tokens,
                bigram=config.bigram,
                has_swa=config.has_swa,
            )

    def replay(self, graph: Any) -> None:
        """Replay a graph that captured the step; in the body of `running`, once.

        Args:
            graph: What has a method `replay`, as torch.cuda.CUDAGraph does.
        """
        graph.replay()
        self.replayed()

    def replayed(self) -> None:
        """Say that the step was replayed, where an engine's own runner does it and `replay` cannot."""
        self._begun += 1
        self._done += 1

    # -- what the host does around a step --------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self, rows: Rows) -> Iterator[None]:
        """Run one step for `rows` in the body: replay the graph, or call what it captures.

        On entry everything is checked, pages are evicted if the step needs them, and the rows are uploaded if
        they are not those of the last call. On exit the host's lengths and counts move. Other calls that
        change the cache are refused in the body.

        If the body raises, or does not run the step exactly once (through `replay`, or `before_forward` and
        `after_forward`), host and device may disagree, and nothing can tell without a wait: every later call
        raises BrokenError until `reset`.

        Args:
            rows: [n] distinct handles of running rows, n <= num_lanes; pages are taken in this order.

        Raises:
            BrokenError: The body ran the step not at all, or more than once.
            CapacityError: Too few pages even with everything evictable gone.
            ReceiptError: A handle of a request that has ended, or that was never given out.
            InvalidInputError: A row named twice, a row that is at `max_len` or holds pages for more than one
                further token (of rejected drafts, say), too many rows, or more token slots than `max_slots`.
        """
        cache = self._state
        cache.check_idle()
        given = running_rows(cache.rows, rows)
        total = self._check(given)
        plane = cache.plane
        plane.place_rows_and_free(given, cache.make_room(total))
        cache.stepping = True
        self._begun = self._done = 0
        try:
            yield
        except BaseException:
            cache.broken = "the body of DecodeStep.running raised, and may have run half a step"
            raise
        finally:
            cache.stepping = False
        if (self._begun, self._done) != (1, 1):
            cache.broken = (
                "the body of DecodeStep.running must run the step once, through replay() or before_forward() "
                f"and after_forward(); it ran them {self._begun} and {self._done} times"
            )
            cache.check_open()
        plane.took(total)
        state, config = cache.rows, cache.config
        row_ops.step_lens(state.state, given)
        row_ops.catch_up(state.state, given)
        if config.has_swa:
            released = np.empty(given.size, np.int64)
            freed, num = row_ops.slide_rows(
                state.state,
                state.receipts,
                given,
                config.page_size,
                config.keep_tokens,
                config.bigram,
                released,
            )
            plane.swa_top += int(freed)
            if num:
                cache.tree.release_swa(released[:num])

    def _check(self, rows: Int32Array) -> int:
        """Raise unless the step can be done for these rows; return the pages that it takes."""
        config, state = self._state.config, self._state.rows.state
        if rows.size > self.num_lanes:
            raise InvalidInputError(
                f"rows must be at most num_lanes ({self.num_lanes}), got {rows.size}"
            )
        total = int(row_ops.pages_to_step(state, rows, config.page_size, config.max_len))
        if total < 0:
            raise InvalidInputError(
                f"rows[{-1 - total}] must stay within max_len ({config.max_len}), "
                f"got row {rows[-1 - total]}, which is full"
            )
        i = row_ops.first_with_drafts(state, rows)
        if i >= 0:
            raise InvalidInputError(
                f"rows[{i}] must hold pages for one token more than are computed, at most; got row {rows[i]} "
                f"with {state[row_ops.ALLOCATED, rows[i]]} and {state[row_ops.COMPUTED, rows[i]]}"
            )
        for out in self._buffers:
            if isinstance(out, IndexBuffers):
                lens = state[row_ops.COMPUTED, rows] + np.int32(1)
                entries = int(count_entries(state, rows, lens, out.window, out.unit)[0])
                if entries > out.indices.shape[0]:
                    raise InvalidInputError(
                        f"rows must list at most {out.indices.shape[0]} entries (max_slots), "
                        f"got {entries}"
                    )
        return total

    def check_error(self) -> None:
        """Raise IntegrityError if a step met a fault on the device. Waits for the device.

        For debugging. A fault (no page was free, a row was at max_len) means that steps ran outside of
        `running`, or that host and device disagree; a step outside of it that meets none, `check` notices.
        """
        error = self.error.cpu()
        code, row = int(error[ERROR_CODE]), int(error[ERROR_ROW])
        if code:
            reasons = {NO_PAGE: "no page was free", ROW_FULL: "the row was at max_len"}
            reason = reasons.get(code, "more SWA pages came back than there are")
            raise IntegrityError(f"a decode step stopped at row {row}: {reason}")
