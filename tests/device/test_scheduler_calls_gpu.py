"""On a GPU: no scheduler call waits for the device, and a manager comes to the state of one on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from operation_log import CONFIGS, assert_same, record, replay
from scheduler_calls import CALLS, prepared

from kvcache.validate import Driver

DEVICE = "cuda"
BATCHES = (1, 7, 256)
LOG_CALLS = 300

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or HIP device"),
]


@contextlib.contextmanager
def no_sync() -> Iterator[None]:
    """Let torch raise at whatever makes the host wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_guard_sees_a_wait() -> None:
    x = torch.zeros(3, device=DEVICE)
    with pytest.raises(RuntimeError, match="synchroniz"), no_sync():
        x.sum().item()


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: f"batch{batch}")
@pytest.mark.parametrize("call", CALLS)
def test_no_call_waits(call: str, batch: int) -> None:
    manager, make = prepared(call, batch, DEVICE)
    torch.cuda.synchronize()
    with no_sync():
        make()
    torch.cuda.synchronize()
    manager.check()


class WatchedDriver(Driver):
    """Makes every call of the manager under the guard."""

    def both(
        self, what: str, manager: Callable[[], Any], oracle: Callable[[Any], Any]
    ) -> tuple[Any, Any] | None:
        def watched() -> Any:
            with no_sync():
                return manager()

        return super().both(what, watched, oracle)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_manager_on_the_gpu_comes_to_the_state_of_one_on_the_cpu(name: str) -> None:
    log = record(f"gpu/{name}", CONFIGS[name], LOG_CALLS)
    assert_same(log, replay(log, WatchedDriver, device=DEVICE), replay(log))
