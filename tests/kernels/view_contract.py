"""What attention views must hold, token by token, in plain Python; shares no code with the twins.

Each row is a list of the tokens that some query of the next forward may read; pages and slots follow from
that list.
"""

from __future__ import annotations

from kernel_cases import Array, Case

COMPUTED, ALLOCATED = 0, 1


def listed_tokens(computed: int, kv_len: int, window: int, unit: int) -> tuple[list[int], int]:
    """Positions that the entries of a view cover, and the position at which it begins.

    That is what the queries at [computed, kv_len) read, from the first entry that holds one of them on.
    """
    if window == 0:
        return list(range(kv_len)), 0
    # with no query at all: what one at `computed` would read
    queries = range(computed, max(kv_len, computed + 1))
    read = {t for q in queries for t in range(max(q - window + 1, 0), q + 1)}
    start = min(read) // unit * unit
    covered = list(range(start, kv_len))
    assert read - {computed} <= set(covered), "a query reads a token that the view lacks"
    return covered, start


def _rows(case: Case) -> list[tuple[int, int, int]]:
    """(row, computed, kv_len) of each lane in use."""
    a = case.arrays
    used = a["rows"][: a["num_rows"][0]].tolist()
    lens = a["lens"]
    return [
        (
            row,
            int(a["row_state"][COMPUTED, row]),
            int(a["row_state"][ALLOCATED, row] if lens is None else lens[i]),
        )
        for i, row in enumerate(used)
    ]


def _page(case: Case, row: int, token: int) -> int:
    """Page id, in the pool of the view, of the page that holds a token."""
    page = int(case.arrays["page_table"][row, token // case.scalars["page_size"]])
    return int(case.arrays["swa_map"][page]) if case.scalars["window"] else page


def _pages_of(case: Case, row: int, tokens: list[int]) -> list[int]:
    """Page ids of the pages that hold these tokens, in order."""
    size = case.scalars["page_size"]
    return [_page(case, row, n * size) for n in sorted({t // size for t in tokens})]


def expected(case: Case) -> dict[str, Array]:
    """Return what all arrays of `case` must hold after the call."""
    arrays = {name: array.copy() for name, array in case.arrays.items() if array is not None}
    (_fill_table if case.op == "fill_table" else _fill_indices)(case, arrays)
    return arrays


def _fill_table(case: Case, out: dict[str, Array]) -> None:
    lanes, width, size = (case.scalars[k] for k in ("num_lanes", "width", "page_size"))
    window = case.scalars["window"]
    out["table"][:lanes, :width] = 0
    out["cache_seqlens"][:lanes] = 0
    out["window_start"][:lanes] = 0
    for lane, (row, computed, kv_len) in enumerate(_rows(case)):
        tokens, start = listed_tokens(computed, kv_len, window, size)
        pages = _pages_of(case, row, tokens)[:width]
        out["table"][lane, : len(pages)] = pages
        out["cache_seqlens"][lane] = kv_len - start
        out["window_start"][lane] = start


def _fill_indices(case: Case, out: dict[str, Array]) -> None:
    lanes, unit, size = (case.scalars[k] for k in ("num_lanes", "unit", "page_size"))
    window = case.scalars["window"]
    entries: list[int] = []
    for name, end in (("indptr", lanes + 1), ("last_page_len", lanes), ("window_start", lanes)):
        out[name][:end] = 0
    rows = _rows(case)
    for lane in range(lanes):
        if lane < len(rows):
            row, computed, kv_len = rows[lane]
            tokens, start = listed_tokens(computed, kv_len, window, unit)
            if unit == size:
                entries += _pages_of(case, row, tokens)
            else:
                pages = [(_page(case, row, t), t) for t in tokens]
                entries += [page * size + t % size if page else 0 for page, t in pages]
            out["window_start"][lane] = start
            if tokens:
                out["last_page_len"][lane] = (tokens[-1] % unit) + 1
        out["indptr"][lane + 1] = len(entries)
    out["indices"][: len(entries)] = entries
