"""The fake accelerator sees what makes a GPU's host wait, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from instruments.fakedev import FakeGraph, HostSync, accelerator, no_host_sync, pinned_empty

DEVICE = "kvdev"


@pytest.fixture(autouse=True)
def fake_accelerator() -> Iterator[None]:
    with accelerator():
        yield


def device_ints(*values: int) -> torch.Tensor:
    return torch.from_numpy(np.array(values, np.int64)).to(DEVICE)


# what a GPU's host waits for; x: [4] int64 on the device, host: [4] int64 on the host
WAITS: dict[str, Callable[[Any, Any], Any]] = {
    "item": lambda x, host: x[0].item(),
    "int": lambda x, host: int(x[0]),
    "float": lambda x, host: float(x[0]),
    "bool": lambda x, host: bool(x[0]),
    "index": lambda x, host: [0, 1, 2, 3][x[0]],
    "if": lambda x, host: 1 if x[0] > 0 else 2,
    "any": lambda x, host: any(x > 2),
    "in": lambda x, host: 3 in x,
    "range": lambda x, host: range(x[0]),
    "slice bound": lambda x, host: x[: x[0]],
    "tolist": lambda x, host: x.tolist(),
    "repr": lambda x, host: repr(x),
    "format": lambda x, host: f"{x}",
    "cpu": lambda x, host: x.cpu(),
    "to cpu": lambda x, host: x.to("cpu"),
    "to cpu, non_blocking": lambda x, host: x.to("cpu", non_blocking=True),
    "copy to host": lambda x, host: host.copy_(x),
    "nonzero": lambda x, host: x.nonzero(),
    "argwhere": lambda x, host: torch.argwhere(x),
    "where of one": lambda x, host: torch.where(x > 2),
    "mask": lambda x, host: x[x > 2],
    "mask written with many": lambda x, host: x.__setitem__(x > 2, x[:2]),
    "masked_select": lambda x, host: x.masked_select(x > 2),
    "unique": lambda x, host: x.unique(),
    "unique_consecutive": lambda x, host: torch.unique_consecutive(x),
    "bincount": lambda x, host: x.bincount(),
    "repeat_interleave": lambda x, host: x.repeat_interleave(x),
    "equal": lambda x, host: torch.equal(x, x),
    "list index": lambda x, host: x[[0, 2]],
    "host index": lambda x, host: x[host],
    "host index written": lambda x, host: x.__setitem__(host, 0),
    "from_numpy to device": lambda x, host: host.to(DEVICE),
    "pageable, non_blocking": lambda x, host: host.to(DEVICE, non_blocking=True),
    "copy_ of pageable": lambda x, host: x.copy_(host, non_blocking=True),
    "tensor of a list": lambda x, host: torch.tensor([1, 2], device=DEVICE),
    "tensor of a number": lambda x, host: torch.tensor(1, device=DEVICE),
    "as_tensor": lambda x, host: torch.as_tensor([1, 2], device=DEVICE),
    "blocking copy of pinned": lambda x, host: x[:1].copy_(pinned_empty(1)),
    "synchronize": lambda x, host: torch.cuda.synchronize(),
}
# what it does not wait for
RUNS_ON: dict[str, Callable[[Any, Any], Any]] = {
    "shape": lambda x, host: (x.shape, x.numel(), x.stride(), x.device, x.dtype, len(x)),
    "view": lambda x, host: x.view(2, 2)[:, 1].reshape(-1),
    "arithmetic": lambda x, host: (x + 1) * x - 2,
    "in place": lambda x, host: x.add_(1),
    "reduction": lambda x, host: x.sum() + x.max(),
    "factory": lambda x, host: torch.zeros(3, dtype=torch.int32, device=DEVICE),
    "arange": lambda x, host: torch.arange(4, device=DEVICE),
    "like": lambda x, host: torch.empty_like(x),
    "copy on the device": lambda x, host: torch.zeros_like(x).copy_(x),
    "pinned, non_blocking": lambda x, host: x[:1].copy_(pinned_empty(1), non_blocking=True),
    "device index": lambda x, host: x[x],
    "device index written": lambda x, host: x.__setitem__(x + 0, x + 1),
    "masked fill": lambda x, host: x.masked_fill_(x > 2, 0),
    "mask written with one": lambda x, host: x.__setitem__(x > 2, 0),
    "where of three": lambda x, host: torch.where(x > 2, x, 0),
    "number written": lambda x, host: x.__setitem__(0, 7),
    "repeat_interleave of known size": lambda x, host: x.repeat_interleave(x, output_size=6),
    "cumsum": lambda x, host: x.cumsum(0),
    "host work": lambda x, host: host[host > 2].tolist(),
}


@pytest.mark.parametrize("snippet", WAITS)
def test_the_guard_catches(snippet: str) -> None:
    x, host = device_ints(0, 1, 2, 3), torch.arange(4)
    with no_host_sync(), pytest.raises(HostSync):
        WAITS[snippet](x, host)


@pytest.mark.parametrize("snippet", RUNS_ON)
def test_the_guard_lets_pass(snippet: str) -> None:
    x, host = device_ints(0, 1, 2, 3), torch.arange(4)
    with no_host_sync():
        RUNS_ON[snippet](x, host)


def test_waiting_is_allowed_outside_the_guard() -> None:
    x = torch.tensor([3, 0, 1, 2], device=DEVICE)
    assert x[x > 1].tolist() == [3, 2]
    assert x[[0, 2]].tolist() == [3, 1]
    assert int(x[0]) == 3
    assert x.cpu().numpy().tolist() == [3, 0, 1, 2]


def test_numpy_refuses_a_device_tensor() -> None:
    for convert in (lambda x: x.numpy(), np.asarray, np.array):
        with pytest.raises(TypeError, match="can't convert a kvdev tensor to numpy"):
            convert(device_ints(1, 2))


def test_host_and_device_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="expected all tensors on one device"):
        device_ints(1, 2) + torch.arange(2)


def test_operations_and_uploads_are_counted() -> None:
    x, pinned = torch.zeros(8, dtype=torch.int32, device=DEVICE), pinned_empty(8)
    with no_host_sync() as seen:
        x[:4].copy_(pinned[:4], non_blocking=True)
        x.add_(1)
        x[4:].copy_(x[:4])
    assert seen.ops == {"aten.slice": 3, "aten.copy_": 2, "aten.add_": 1}
    assert seen.uploads == 1
    assert seen.pinned == 0


class Counts:
    """A step on the device: `length` grows by one, `total` by the length."""

    def __init__(self) -> None:
        self.length, self.total = device_ints(5), device_ints(0)
        self.steps = 0

    def step(self) -> None:
        self.length.add_(1)
        self.total.add_(self.length * 2)

    def step_with_a_host_number(self) -> None:
        self.steps += 1
        self.length.add_(self.steps)

    def step_in_a_new_tensor(self) -> None:
        self.length = self.length + 1
        self.total.add_(self.length)

    def state(self) -> list[int]:
        return [int(self.length), int(self.total)]


def captured_and_eager(step: Callable[[Counts], None]) -> tuple[list[int], list[int]]:
    """State after 1 + 3 steps: captured and replayed, and run."""
    captured, eager = Counts(), Counts()
    graph = FakeGraph()
    with graph.capture():
        step(captured)
    for _ in range(3):
        graph.replay()
    for _ in range(4):
        step(eager)
    return captured.state(), eager.state()


def test_a_replay_does_what_the_step_did() -> None:
    captured, eager = captured_and_eager(Counts.step)
    assert captured == eager == [9, 2 * (6 + 7 + 8 + 9)]


@pytest.mark.parametrize("step", [Counts.step_with_a_host_number, Counts.step_in_a_new_tensor])
def test_a_replay_shows_what_cannot_be_captured(step: Callable[[Counts], None]) -> None:
    captured, eager = captured_and_eager(step)
    assert captured != eager


def test_a_capture_refuses_to_wait() -> None:
    x = device_ints(1)
    with FakeGraph().capture(), pytest.raises(HostSync):
        x.item()
