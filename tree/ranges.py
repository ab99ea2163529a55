"""Page ranges: how the tree says what has to happen to pages that only the device knows.

A range is (KIND, REQUEST, PAGE, SLOT, COUNT): COUNT pages from page PAGE of the request's row and / or from
slot SLOT of the tree's slab. REQUEST is the index into the call's batch (-1 where no row takes part).
"""

from __future__ import annotations

from kvcache.compiled import inlined
from kvcache.tree.arrays import Int32Array

KIND, REQUEST, PAGE, SLOT, COUNT = range(5)
RANGE_WIDTH = 5

(
    BIND,  # the row names the slot's Full page from now on
    STORE,  # the slot takes the row's Full page (with its SWA page, unless dropped)
    ADOPT,  # the row's SWA page moves under the slot's Full page; the row's Full page is freed
    FREE_ROW,  # the row's Full page is freed; it has no SWA page
    FREE_ROW_SWA,  # the row's Full and SWA pages are freed
    DROP_ROW,  # the row's SWA page is freed
    FREE_SLOT,  # the slot's Full page is freed; it has no SWA page
    FREE_SLOT_SWA,  # the slot's Full and SWA pages are freed
    DROP_SLOT,  # the slot's SWA page is freed
) = range(9)


@inlined
def emit(
    ranges: Int32Array, num: int, kind: int, request: int, page: int, slot: int, count: int
) -> int:
    """Append a range, or lengthen one of the last four that it continues; return the number of ranges."""
    i = num - 1
    while i >= 0 and i >= num - 4:
        if ranges[i, KIND] == kind and ranges[i, REQUEST] == request:
            n = ranges[i, COUNT]
            page_follows = page < 0 or ranges[i, PAGE] + n == page
            slot_follows = slot < 0 or ranges[i, SLOT] + n == slot
            if page_follows and slot_follows:
                ranges[i, COUNT] = n + count
                return num
            break
        i -= 1
    ranges[num, KIND] = kind
    ranges[num, REQUEST] = request
    ranges[num, PAGE] = page
    ranges[num, SLOT] = slot
    ranges[num, COUNT] = count
    return num + 1
