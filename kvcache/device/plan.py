"""Plan: page ranges of the tree and of ending rows, turned into descriptors for `apply`, in three phases.

    phase 0   STORE, FREE_*, DROP_*    read the page table and the slab as they were
    phase 1   ADOPT                    needs the slots stored and the dropped map entries clear
    phase 2   BIND, SET_ROW            needs the row's old pages read

Within a phase the descriptors are independent. The host knows how many pages each one frees, so it gives
every push its place on the free stack beforehand: no atomics, the same page ids on every device.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcache.compiled import compiled
from kvcache.kernels import layout
from kvcache.rows import Int32Array
from kvcache.tree import ranges as r

_TREE_KINDS = 9
_PHASES = 3

# per kind of range: op code, phase, whether it frees Full pages, whether it frees SWA pages
_OP = np.zeros(_TREE_KINDS, np.int32)
_PHASE = np.zeros(_TREE_KINDS, np.int32)
_FREES_FULL = np.zeros(_TREE_KINDS, np.int32)
_FREES_SWA = np.zeros(_TREE_KINDS, np.int32)
for _kind, _op, _phase, _full, _swa in (
    (r.BIND, layout.BIND, 2, 0, 0),
    (r.STORE, layout.STORE, 0, 0, 0),
    (r.ADOPT, layout.ADOPT, 1, 1, 0),
    (r.FREE_ROW, layout.FREE_ROW, 0, 1, 0),
    (r.FREE_ROW_SWA, layout.FREE_ROW, 0, 1, 1),
    (r.DROP_ROW, layout.DROP_ROW, 0, 0, 1),
    (r.FREE_SLOT, layout.FREE_SLOT, 0, 1, 0),
    (r.FREE_SLOT_SWA, layout.FREE_SLOT, 0, 1, 1),
    (r.DROP_SLOT, layout.DROP_SLOT, 0, 0, 1),
):
    _OP[_kind], _PHASE[_kind], _FREES_FULL[_kind], _FREES_SWA[_kind] = _op, _phase, _full, _swa

# what `fill_plan` returns, int64 [NUM_SUMMARY]
COUNTS = slice(0, 3)  # descriptors of each phase
WIDEST = slice(3, 6)  # most pages of a descriptor, by phase
FULL_TOP, SWA_TOP = 6, 7  # free pages after the plan
_AT = 8  # from here on scratch: where the next descriptor of each phase goes
NUM_SUMMARY = _AT + _PHASES + 1


@compiled
def _put(
    desc: Int32Array,
    i: int,
    op: int,
    n: int,
    row: int,
    page: int,
    slot: int,
    full_pos: int,
    swa_pos: int,
) -> None:
    desc[layout.APPLY_OP, i] = op
    desc[layout.APPLY_N, i] = n
    desc[layout.APPLY_ROW, i] = row
    desc[layout.APPLY_PAGE, i] = page
    desc[layout.APPLY_SLOT, i] = slot
    desc[layout.APPLY_FULL_POS, i] = full_pos
    desc[layout.APPLY_SWA_POS, i] = swa_pos


@compiled
def fill_plan(
    ranges: Int32Array,
    rows: Int32Array,
    tails: Int32Array,
    states: Int32Array,
    row_state: Int32Array,
    has_swa: bool,
    full_top: int,
    swa_top: int,
    desc: Int32Array,
    summary: npt.NDArray[np.int64],
) -> int:
    """Write the descriptors, phase after phase, and return how many.

    Args:
        ranges: [num, 5] ranges of the tree; REQUEST indexes `rows`.
        rows: [batch] row of each request of the call.
        tails: [ending, 4] rows that end: (row, first own page, first own page with SWA, end page).
        states: [any] rows whose lengths the device must take over from `row_state`.
        row_state: [>= 4, max_rows] host lengths.
        full_top, swa_top: free pages before.
        desc: [7, capacity], out; room for one a range and a state, and for two a tail.
        summary: [NUM_SUMMARY], out.
    """
    at = summary[_AT:]
    at[:] = 0
    for i in range(ranges.shape[0]):
        at[_PHASE[ranges[i, r.KIND]] + 1] += 1
    for i in range(tails.shape[0]):
        at[1] += int(tails[i, 1] < tails[i, 2]) + int(tails[i, 2] < tails[i, 3])
    at[_PHASES] += states.shape[0]
    for phase in range(_PHASES):
        summary[phase] = at[phase + 1]
        summary[3 + phase] = 0
        at[phase + 1] += at[phase]
    total = at[_PHASES]

    for i in range(ranges.shape[0]):
        kind = np.int64(ranges[i, r.KIND])
        n = np.int64(ranges[i, r.COUNT])
        phase = _PHASE[kind]
        request = np.int64(ranges[i, r.REQUEST])
        row = np.int64(rows[request]) if request >= 0 else np.int64(0)
        swa_pos = swa_top if _FREES_SWA[kind] else -1
        page = max(np.int64(ranges[i, r.PAGE]), 0)
        slot = max(np.int64(ranges[i, r.SLOT]), 0)
        _put(desc, at[phase], np.int64(_OP[kind]), n, row, page, slot, full_top, swa_pos)
        full_top += n * _FREES_FULL[kind]
        swa_top += n * _FREES_SWA[kind]
        at[phase] += 1
        summary[3 + phase] = max(summary[3 + phase], n)
    for i in range(tails.shape[0]):
        row = np.int64(tails[i, 0])
        first = np.int64(tails[i, 1])
        cut = np.int64(tails[i, 2])
        end = np.int64(tails[i, 3])
        if first < cut:
            _put(desc, at[0], layout.FREE_ROW, cut - first, row, first, 0, full_top, -1)
            full_top += cut - first
            at[0] += 1
        if cut < end:
            swa_pos = swa_top if has_swa else -1
            _put(desc, at[0], layout.FREE_ROW, end - cut, row, cut, 0, full_top, swa_pos)
            full_top += end - cut
            if has_swa:
                swa_top += end - cut
            at[0] += 1
        summary[3] = max(summary[3], max(cut - first, end - cut))
    for i in range(states.shape[0]):
        s = np.int64(states[i])
        _put(
            desc,
            at[2],
            layout.SET_ROW,
            np.int64(row_state[layout.COMPUTED, s]),
            s,
            np.int64(row_state[layout.ALLOCATED, s]),
            np.int64(row_state[layout.OWNED, s]),
            np.int64(row_state[layout.FRONTIER, s]),
            -1,
        )
        at[2] += 1
    summary[6] = full_top
    summary[7] = swa_top
    return total
