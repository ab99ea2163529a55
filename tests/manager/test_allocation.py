"""Sizes and devices that cannot be had: typed errors that name the bytes, or the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvcache import CacheConfig, CapacityError, InvalidInputError, KVCacheManager
from kvcache.allocation import allocating, zeros

SIZES: dict[str, Any] = {
    "page_size": 4,
    "window": 8,
    "full_pages": 8,
    "swa_pages": 8,
    "max_rows": 2,
    "max_len": 64,
}


def no_memory(*args: Any, **kwargs: Any) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB")


def test_a_page_table_that_no_machine_has_names_its_bytes() -> None:
    config = CacheConfig(**{**SIZES, "max_rows": 2**20, "max_len": 2**30})
    # 2^20 rows of 2^28 pages, 4 bytes each
    with pytest.raises(
        CapacityError,
        match=r"^an int32 array of shape \[1048576, 268435456\] needs 1,125,899,906,842,624 bytes "
        "on cpu, more than can be had$",
    ):
        KVCacheManager(config)


def test_an_array_of_numpy_that_no_machine_has_names_its_bytes() -> None:
    with (
        pytest.raises(
            CapacityError,
            match=r"^an int64 array of shape \[1073741824, 1048576\] needs 9,007,199,254,740,992 bytes "
            "on the host, more than can be had$",
        ),
        allocating(),
    ):
        np.zeros((2**30, 2**20), np.int64)


def test_host_memory_of_a_cache_that_no_machine_has_is_typed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvcache.state.Rows", lambda config: np.zeros((2**30, 2**20), np.int64))
    with pytest.raises(CapacityError, match="needs 9,007,199,254,740,992 bytes on the host"):
        KVCacheManager(CacheConfig(**SIZES))


def test_memory_that_no_array_asked_for_is_typed_too() -> None:
    for error, reason in ((MemoryError(), "out of memory"), (MemoryError("a\nb"), "a")):
        with (
            pytest.raises(CapacityError, match=f"^memory on the host is short: {reason}$"),
            allocating(),
        ):
            raise error


def test_other_errors_of_torch_come_through() -> None:
    with pytest.raises(RuntimeError, match=r"^an illegal memory access$"), allocating():
        raise RuntimeError("an illegal memory access")


def test_a_device_without_room_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "zeros", no_memory)
    with pytest.raises(
        CapacityError, match=r"^an int64 array of shape \[3, 5\] needs 120 bytes on cuda:1, "
    ):
        zeros((3, 5), torch.int64, torch.device("cuda:1"))


def test_buffers_that_come_later_are_typed_and_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = KVCacheManager(CacheConfig(**SIZES))
    before = cache.stats()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", no_memory)
        for view in (cache.views.page_table, cache.views.token_slots):
            with pytest.raises(CapacityError, match=r"bytes on cpu, more than can be had$"):
                view([])
    assert cache.stats() == before
    assert cache.views.page_table([]).page_table.shape[0] == 0


@pytest.mark.parametrize(
    "device", ["meta", "mps", "xpu", "vulkan", "cpu:1", "cuda:-1", "tpu", "", None, 0, b"cpu"]
)
def test_a_device_of_another_kind_is_refused(device: Any) -> None:
    with pytest.raises(
        InvalidInputError, match=rf"^device must be cpu, cuda or cuda:N, got {device!r}$"
    ):
        CacheConfig(**SIZES, device=device)


def test_a_device_that_is_not_there_is_refused() -> None:
    count = torch.cuda.device_count()
    with pytest.raises(
        InvalidInputError,
        match=f"^device must be there, got 'cuda:{count}': {count} CUDA devices found$",
    ):
        CacheConfig(**SIZES, device=f"cuda:{count}")


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")])
def test_the_cpu_has_three_names(device: Any) -> None:
    cache = KVCacheManager(CacheConfig(**SIZES, device=device))
    assert cache.views.page_table([]).page_table.device == torch.device("cpu")
