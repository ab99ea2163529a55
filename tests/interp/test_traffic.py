"""What kernels ask of memory, against the least that their jobs must move (perf/kernels)."""

from __future__ import annotations

import pytest
from instruments.traffic import Traffic, count_traffic

from kvcache.bench.case import Bench, Run, Size
from kvcache.bench.cli import load

BENCHES = {bench.name: bench for bench in load([])}
# every program of these adds up the rows before its own, or reads a table that others have in their cache
_RE_READS = {name for name in BENCHES if name.startswith("fill_indices")}


def traffic_of(bench: Bench, size: Size) -> tuple[Traffic, int]:
    """Return what one call loads and stores, and the least that it must."""
    case = bench.make(size)
    with count_traffic() as traffic:
        case.versions[0].run(Run(case, case.versions[0]).state)
    return traffic, case.min_bytes


def test_traffic_counts_lanes_that_are_not_masked() -> None:
    # a row: id and one length loaded, one stored; the block has 128 lanes
    traffic, least = traffic_of(BENCHES["advance"], Size(5, 4, 32, "cpu"))
    assert (traffic.loaded, traffic.stored, least) == (5 * 8, 5 * 4, 5 * 12)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", BENCHES)
def test_moves_little_more_than_the_least(name: str, page_size: int) -> None:
    """And never less: then the least would be wrong, or the kernel leaves something out."""
    traffic, least = traffic_of(BENCHES[name], Size(6, page_size, 5 * page_size, "cpu"))
    assert least <= traffic.moved
    if name not in _RE_READS:
        assert traffic.moved <= 2 * least


@pytest.mark.parametrize("name", ["slide", "decode_slide", "step", "decode_step"])
def test_a_pass_over_256_rows_moves_within_half_more_than_the_least(name: str) -> None:
    traffic, least = traffic_of(BENCHES[name], Size(256, 64, 512, "cpu"))
    assert least <= traffic.moved <= 1.5 * least
