"""What the kernels of a captured decode step must do, in plain Python; shares no code with the twins."""

from __future__ import annotations

import math

from kernel_cases import Array, Case

COMPUTED, ALLOCATED, OWNED, FRONTIER = range(4)
NO_PAGE, ROW_FULL, STACK_FULL = 1, 2, 3


def expected(case: Case) -> dict[str, Array]:
    """Return what all arrays of `case` must hold after the call."""
    arrays = {name: array.copy() for name, array in case.arrays.items() if array is not None}
    for row in arrays["rows"][: arrays["num_rows"][0]].tolist():
        if arrays["error"][0] != 0:
            break
        fault = (_step if case.op == "decode_step" else _slide)(case, arrays, row)
        if fault:
            arrays["error"][:] = fault, row
    return arrays


def _step(case: Case, a: dict[str, Array], row: int) -> int:
    size, has_swa = case.scalars["page_size"], case.scalars["has_swa"]
    pools = ((0, "full_stack"), (1, "swa_stack")) if has_swa else ((0, "full_stack"),)
    held = math.ceil(int(a["row_state"][ALLOCATED, row]) / size)
    new = max(int(a["row_state"][COMPUTED, row]) + 1, int(a["row_state"][ALLOCATED, row]))
    if math.ceil(new / size) > held:
        if held == a["page_table"].shape[1]:
            return ROW_FULL
        if any(a["tops"][pool] == 0 for pool, _ in pools):
            return NO_PAGE
        popped = []
        for pool, stack in pools:
            a["tops"][pool] -= 1
            popped.append(int(a[stack][a["tops"][pool]]))
        a["page_table"][row, held] = popped[0]
        if has_swa:
            a["swa_map"][popped[0]] = popped[1]
    a["row_state"][ALLOCATED, row] = new
    return 0


def _slide(case: Case, a: dict[str, Array], row: int) -> int:
    size, keep = case.scalars["page_size"], case.scalars["keep"]
    state = a["row_state"]
    tokens = int(state[ALLOCATED, row])
    if case.scalars["has_swa"]:
        units = max(tokens - 1, 0) if case.scalars["bigram"] else tokens
        again = max(units - 1, 0)
        needed_from = max(again - again % size - keep, 0)
        old, owned = int(state[FRONTIER, row]), int(state[OWNED, row])
        new = max(old, needed_from - needed_from % size)
        leaving = [p for p in range(new // size) if p * size >= max(old, owned)]
        if leaving and int(a["tops"][1]) + len(leaving) > a["swa_stack"].shape[0]:
            return STACK_FULL
        for page in leaving:
            full_page = int(a["page_table"][row, page])
            a["swa_stack"][a["tops"][1]] = a["swa_map"][full_page]
            a["tops"][1] += 1
            a["swa_map"][full_page] = 0
        state[FRONTIER, row] = new
    state[COMPUTED, row] = tokens
    return 0
