"""What is compiled for GPUs that are not there: every kernel at the specialisations of usual configurations.

Shared by tests/aot and perf/compile_table.py, which writes the table of what comes out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from decode_cases import decode_slide_case, decode_step_case
from instruments.aot import TARGETS, Resources, compiled_variants, resources
from kernel_cases import (
    Case,
    advance_case,
    apply_case,
    extend_case,
    run,
    slide_case,
    step_case,
    translate_case,
)
from match_cases import bind_match_case, match_case, update_mirror_case
from view_cases import fill_indices_case, fill_table_case


class Compiled(NamedTuple):
    """A kernel at one set of flags."""

    op: str  # kernels/<op>.py
    flags: str  # what is special about it; empty: nothing
    make: Callable[[], Case]  # what its wrapper is called with


def _match(**flags: Any) -> Case:
    sizes: dict[str, int] = {"inserts": 3, "num_slots": 30, "key_pages": 3}
    if flags["page_size"] > 1000:
        sizes = {"inserts": 1, "num_slots": 3, "key_pages": 1}
    return match_case(0, num=3, **flags, **sizes)[0]


def _bind(page_size: int) -> Case:
    return bind_match_case(0, num=3, page_size=page_size, inserts=3, num_slots=30, key_pages=3)


def _table(page_size: int = 64, **flags: Any) -> Case:
    return fill_table_case(0, num_rows=3, page_size=page_size, max_pages=40, **flags)


def _indices(unit: int, page_size: int = 64, **flags: Any) -> Case:
    return fill_indices_case(0, num_rows=3, page_size=page_size, max_pages=5, unit=unit, **flags)


def _slide(page_size: int, **flags: Any) -> Case:
    return slide_case(0, num_rows=3, page_size=page_size, max_pages=3, keep=128, **flags)


def _decode_slide(page_size: int, **flags: Any) -> Case:
    return decode_slide_case(0, num_rows=3, page_size=page_size, max_pages=3, keep=128, **flags)


_ALL = [
    Compiled("extend", "", lambda: extend_case(0, num_rows=3, max_pages=5)),
    Compiled("extend", "Full only", lambda: extend_case(0, num_rows=3, max_pages=5, has_swa=False)),
    Compiled("step", "P=64", lambda: step_case(0, num_rows=3, page_size=64)),
    Compiled("step", "P=48", lambda: step_case(0, num_rows=3, page_size=48)),
    Compiled(
        "step", "P=1, Full only", lambda: step_case(0, num_rows=3, page_size=1, has_swa=False)
    ),
    Compiled("advance", "", lambda: advance_case(0, num_rows=3, has_lens=False)),
    Compiled("advance", "to given lengths", lambda: advance_case(0, num_rows=3, has_lens=True)),
    Compiled("slide", "P=64", lambda: _slide(64)),
    Compiled("slide", "P=48, bigram", lambda: _slide(48, bigram=True)),
    Compiled("apply", "", lambda: apply_case(0, num=3, max_pages=5)),
    Compiled("apply", "Full only", lambda: apply_case(0, num=3, max_pages=5, has_swa=False)),
    Compiled("translate", "P=64, int64", lambda: translate_case(0, shape=(40,), page_size=64)),
    Compiled(
        "translate",
        "P=1, int32",
        lambda: translate_case(0, shape=(40,), page_size=1, dtype=np.int32),
    ),
    Compiled("decode_step", "P=64", lambda: decode_step_case(0, num_rows=3, page_size=64)),
    Compiled(
        "decode_step",
        "P=48, Full only",
        lambda: decode_step_case(0, num_rows=3, page_size=48, has_swa=False),
    ),
    Compiled("decode_slide", "P=64", lambda: _decode_slide(64)),
    Compiled("decode_slide", "P=48, bigram", lambda: _decode_slide(48, bigram=True)),
    Compiled("decode_slide", "P=1, Full only", lambda: _decode_slide(1, has_swa=False)),
    Compiled("fill_table", "Full", _table),
    Compiled("fill_table", "SWA", lambda: _table(window=128)),
    Compiled(
        "fill_table",
        "P=48, lengths, odd width",
        lambda: _table(48, has_lens=True, aligned=False),
    ),
    Compiled("fill_indices", "pages, Full", lambda: _indices(64)),
    Compiled("fill_indices", "pages, SWA", lambda: _indices(64, window=128)),
    Compiled("fill_indices", "slots, Full", lambda: _indices(1)),
    Compiled("fill_indices", "slots, SWA, int64", lambda: _indices(1, window=128, dtype=np.int64)),
    Compiled("fill_indices", "P=1, SWA", lambda: _indices(1, page_size=1, window=9)),
    Compiled(
        "fill_indices",
        "P=48, slots, SWA, lengths",
        lambda: _indices(1, page_size=48, window=9, has_lens=True),
    ),
    Compiled("match", "P=64, aligned", lambda: _match(page_size=64, aligned=True)),
    Compiled("match", "P=64", lambda: _match(page_size=64)),
    Compiled("match", "P=64, bigram", lambda: _match(page_size=64, bigram=True)),
    Compiled(
        "match", "P=64, aligned, int64", lambda: _match(page_size=64, aligned=True, dtype=np.int64)
    ),
    Compiled(
        "match", "P=256, bigram, int64", lambda: _match(page_size=256, bigram=True, dtype=np.int64)
    ),
    Compiled("match", "P=16, aligned", lambda: _match(page_size=16, aligned=True)),
    Compiled("match", "P=1", lambda: _match(page_size=1)),
    Compiled("match", "P=4096, aligned", lambda: _match(page_size=4096, aligned=True)),
    Compiled("bind_match", "P=64", lambda: _bind(64)),
    Compiled("bind_match", "P=1", lambda: _bind(1)),
    Compiled("update_mirror", "P=64", lambda: update_mirror_case(0, num=(30, 30, 9), page_size=64)),
    Compiled("update_mirror", "P=1", lambda: update_mirror_case(0, num=(3, 3, 9), page_size=1)),
]
KERNELS: dict[str, Compiled] = {f"{c.op} ({c.flags})" if c.flags else c.op: c for c in _ALL}

# the same kernel over batches, lengths and windows of all sorts; 1, multiples of 16 and others among them
SIZES = (1, 2, 3, 15, 16, 17, 33, 128)
SWEEPS: dict[str, Callable[[int], Case]] = {
    "extend": lambda n: extend_case(n, num_rows=n, max_pages=n),
    "step": lambda n: step_case(n, num_rows=n, page_size=4),
    "advance": lambda n: advance_case(n, num_rows=n, has_lens=True),
    "slide": lambda n: slide_case(n, num_rows=n, page_size=4, max_pages=n, keep=n),
    "apply": lambda n: apply_case(n, num=n, max_pages=5),
    "translate": lambda n: translate_case(n, shape=(n,), page_size=4),
    "decode_step": lambda n: decode_step_case(n, num_rows=n, page_size=4),
    "decode_slide": lambda n: decode_slide_case(n, num_rows=n, page_size=4, max_pages=n, keep=n),
    "fill_table": lambda n: fill_table_case(
        n, num_rows=n, page_size=4, max_pages=n, window=n, aligned=True
    ),
    "fill_indices": lambda n: fill_indices_case(
        n, num_rows=n, page_size=4, max_pages=n, unit=4, window=n, has_lens=True
    ),
    "match": lambda n: match_case(
        n, num=n, page_size=4, keep_pages=n, inserts=min(n, 33), num_slots=16 * n
    )[0],
    "bind_match": lambda n: bind_match_case(
        n, num=n, page_size=4, inserts=min(n, 33), num_slots=16 * n
    ),
    "update_mirror": lambda n: update_mirror_case(n, num=(n, n + 1, n + 2), page_size=4),
}


def variants(target: str, cases: Iterable[Case]) -> list[Any]:
    """Compile what the wrapper launches for each case (all of one op)."""
    cases = list(cases)
    op = cases[0].op
    kernel = getattr(importlib.import_module(f"kvcache.kernels.{op}"), f"_{op}_kernel")
    return compiled_variants(kernel, TARGETS[target], lambda: [run(case) for case in cases])


def compile_kernel(name: str, target: str) -> Resources:
    """Compile one of KERNELS for one of TARGETS; return what it takes."""
    (binary,) = variants(target, [KERNELS[name].make()])
    return resources(binary)


def count_variants(op: str) -> int:
    """How often `op` is compiled over all SIZES (for sm_90)."""
    return len(variants("sm_90", [SWEEPS[op](n) for n in SIZES]))
