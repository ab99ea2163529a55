"""`advance`: the computed length of every row catches up with the allocated one."""

from __future__ import annotations

from kvcache.bench.case import OURS, TORCH, Bench, Case, Size, State, Version, outputs
from kvcache.bench.scene import aligned, pools, rng_of
from kvcache.kernels.advance import advance
from kvcache.kernels.layout import ALLOCATED, COMPUTED


def min_bytes(num_rows: int) -> int:
    """Bytes that any implementation must move: a row's id and one length read, one length written."""
    return 12 * num_rows


def _ours(s: State) -> None:
    advance(s["rows"], None, s["row_state"], num_rows=s["rows"].shape[0])


def _torch(s: State) -> None:
    rows = s["rows"].long()
    s["row_state"][COMPUTED, rows] = s["row_state"][ALLOCATED, rows]


def make(size: Size) -> Case:
    """Rows of random lengths; SGLang keeps these on the host, so there is no sequence of it."""
    rng = rng_of(size)
    computed = aligned(rng, size, 0, size.pages - 1)
    s = pools(size, rng, computed=computed, allocated=computed + 1)
    changed = ("row_state",)
    versions = (
        Version(OURS, _ours, outputs(*changed), changed, captured=True),
        Version(TORCH, _torch, outputs(*changed), changed, captured=True),
    )
    return Case(s, versions, min_bytes(size.batch))


BENCHES = (Bench("advance", "", "computed = allocated for every row", make),)
