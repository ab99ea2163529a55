"""`decode_step`: `step` as a graph can hold it, the number of rows on the device; every row begins a page."""

from __future__ import annotations

import dataclasses

import torch

from kvcache.bench import step as step_bench
from kvcache.bench.case import OURS, Bench, Case, Size, State, call, outputs
from kvcache.kernels.decode_step import decode_step
from kvcache.kernels.layout import ERROR_FIELDS

_NAMES = (
    "rows",
    "num_rows",
    "page_table",
    "full_stack",
    "swa_stack",
    "swa_map",
    "row_state",
    "tops",
    "error",
)
CHANGED = ("page_table", "swa_map", "row_state", "tops", "error")


def min_bytes(num_rows: int, num_new_pages: int) -> int:
    """Bytes that any implementation must move: as `step`, and the number of rows and the error word."""
    return step_bench.min_bytes(num_rows, num_new_pages) + 8


def run_ours(s: State) -> None:
    call(
        decode_step,
        s,
        _NAMES,
        page_size=s["page_size"],
        has_swa=True,
    )


def make(size: Size) -> Case:
    """The case of `step`; torch and SGLang do the same as there, without looking for faults."""
    case = step_bench.make(size)
    case.state["error"] = torch.zeros(ERROR_FIELDS, dtype=torch.int32, device=size.device)
    versions = tuple(
        dataclasses.replace(v, run=run_ours, read=outputs(*CHANGED), changes=CHANGED)
        if v.name == OURS
        else v
        for v in case.versions
    )
    return Case(case.state, versions, min_bytes(size.batch, size.batch))


BENCHES = (Bench("decode_step", "", "step in a graph, every row begins a page", make),)
