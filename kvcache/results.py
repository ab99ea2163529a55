"""What a manager reports about itself. All of it is host knowledge: asking costs no device work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Capacity(NamedTuple):
    """What fits now, with everything evictable counted as free."""

    rows: int
    full_pages: int
    swa_pages: int


class CommitResult(NamedTuple):
    """Outcome of `commit` and `finish`."""

    owned_len: npt.NDArray[np.int32]  # [n] int32 tokens of each key that the tree now owns
    matched_len: npt.NDArray[
        np.int32
    ]  # [n] int32 tokens that the tree already had when the row handed them over


class EvictResult(NamedTuple):
    """Pages freed by `evict`, `flush` or `drop_namespace`."""

    full_pages: int
    swa_pages: int


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts of a manager. Pages unless the name says otherwise; page 0 is never counted."""

    full_pages_free: int
    swa_pages_free: int
    tree_full_pages: int
    tree_swa_pages: int
    locked_full_pages: int
    locked_swa_pages: int
    row_full_pages: int  # owned by rows
    row_swa_pages: int
    running_rows: int
    pins: int  # prefixes that are pinned
    namespaces: int
    nodes: int
    launches: int  # since the manager was built
    uploads: int
    upload_bytes: int
    evicted_full_pages: int
    evicted_swa_pages: int
    host_bytes: int  # host memory in use by the tree
    device_bytes: int
