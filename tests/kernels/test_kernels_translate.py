"""kernels/translate.py: the CPU twin against the contract, known faults, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import assert_same, run, translate_case
from kernel_contract import expected

from kvcache.errors import InvalidInputError
from kvcache.kernels.translate import translate

INT = torch.int32


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("page_size", [1, 4, 16, 48, 64, 256])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 0), (5, 33), (2, 3, 4), (5000,)])
def test_reads_what_the_contract_reads(shape: tuple[int, ...], page_size: int, dtype: Any) -> None:
    case = translate_case(page_size, shape=shape, page_size=page_size, dtype=dtype)
    assert_same(run(case), expected(case))


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_a_freed_entry_never_leaves_as_a_negative_slot(page_size: int) -> None:
    swa_map = torch.tensor([0, -1, 3], dtype=INT)
    slots = torch.arange(page_size, 2 * page_size)
    assert translate(slots, swa_map, page_size=page_size).tolist() == [0] * page_size


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_padding_slots_read_zero(page_size: int) -> None:
    swa_map = torch.full((4,), 9, dtype=INT)  # even if page 0 had an entry
    slots = torch.tensor([0, page_size - 1, -1, -page_size, -(2**31)])
    assert translate(slots, swa_map, page_size=page_size).tolist() == [0] * 5


def test_page_ids_are_not_sent_through_as_tokens() -> None:
    swa_map = torch.zeros(8, dtype=INT)
    swa_map[3], swa_map[7] = 10, 2
    slots = torch.tensor([3, 7]) * 16
    assert translate(slots, swa_map, page_size=16).tolist() == [160, 32]
    assert translate(slots + 15, swa_map, page_size=16).tolist() == [175, 47]


def test_slots_beyond_int32_survive() -> None:
    page_size = 2**30
    swa_map = torch.tensor([0, 0, 0, 7], dtype=INT)
    slots = torch.tensor([3 * page_size + 5])
    assert translate(slots, swa_map, page_size=page_size).tolist() == [7 * page_size + 5]


def test_writes_into_out_and_returns_it() -> None:
    swa_map = torch.tensor([0, 2], dtype=INT)
    slots = torch.tensor([4, 5, 0], dtype=INT)
    out = torch.empty_like(slots)
    assert translate(slots, swa_map, page_size=4, out=out) is out
    assert out.tolist() == [8, 9, 0]
    assert translate(slots, swa_map, page_size=4, out=slots) is slots
    assert slots.tolist() == [8, 9, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": torch.zeros(4)}, "slots must be torch.int32 or torch.int64, got torch.float32"),
        ({"slots": torch.zeros((4, 4), dtype=INT).T}, "slots must be contiguous"),
        ({"swa_map": torch.zeros(4)}, "swa_map must be torch.int32, got torch.float32"),
        ({"swa_map": torch.zeros(0, dtype=INT)}, "swa_map must have an entry per Full page"),
        ({"page_size": 0}, "page_size must be >= 1, got 0"),
        ({"out": torch.zeros(3, dtype=INT)}, r"out must be \(4, 4\)|out must be 2-D"),
        ({"out": torch.zeros((4, 3), dtype=INT)}, r"out must be \(4, 4\), got \(4, 3\)"),
        ({"out": torch.zeros((4, 4))}, "out must be torch.int32, got torch.float32"),
    ],
)
def test_refuses_what_does_not_fit(changes: dict[str, Any], message: str) -> None:
    args = {
        "slots": torch.arange(16, dtype=INT).view(4, 4),
        "swa_map": torch.zeros(4, dtype=INT),
        "page_size": 4,
        "out": torch.zeros((4, 4), dtype=INT),
    }
    args.update(changes)
    with pytest.raises(InvalidInputError, match=message):
        translate(args.pop("slots"), args.pop("swa_map"), **args)
