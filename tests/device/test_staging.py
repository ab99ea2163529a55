"""The ring of staging buffers: one copy a call, no buffer written while a copy out of it is under way."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from instruments.fakedev import NAME, HostSync, accelerator, no_host_sync

from kvcache.device.staging import Staging

WORDS = 64


class Event:
    """A copy event that is done when the test says so; it counts how often it was asked."""

    made: list[Event]

    def __init__(self) -> None:
        self.recorded = 0
        self.done = True
        self.asked = 0
        Event.made.append(self)

    def record(self) -> None:
        self.recorded += 1
        self.done = False

    def query(self) -> bool:
        self.asked += 1
        return self.done


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Event]]:
    """Staging on the accelerator whose copies end at the test's word; the events, in the ring's order."""
    with accelerator(run_kernels=False):
        Event.made = []
        monkeypatch.setattr("kvcache.device.staging.copy_event", Event)
        yield Event.made


def send(staging: Staging, *values: int) -> torch.Tensor:
    """Upload some words in one call; return where they are on the device."""
    staging.begin()
    where = staging.part(len(values))
    staging.host_part(where)[:] = values
    staging.upload()
    return staging.device_part(where)


def test_a_buffer_is_taken_again_once_its_copy_is_done(events: list[Event]) -> None:
    staging = Staging(NAME, WORDS)
    first = send(staging, 1)
    events[0].done = True
    second = send(staging, 2)
    assert first.data_ptr() == second.data_ptr()
    assert [event.recorded for event in events] == [2] + [0] * (staging.buffers - 1)


def test_a_buffer_under_way_is_left_alone(events: list[Event]) -> None:
    staging = Staging(NAME, WORDS)
    first = send(staging, 1)
    second = send(staging, 2)
    assert first.tolist() == [1]
    assert second.tolist() == [2]
    assert first.data_ptr() != second.data_ptr()


def test_the_ring_takes_another_buffer_where_none_is_free(events: list[Event]) -> None:
    staging = Staging(NAME, WORDS)
    buffers = staging.buffers
    sent = [send(staging, i) for i in range(buffers + 3)]
    assert staging.buffers == len(events) == buffers + 3
    assert len({x.data_ptr() for x in sent}) == buffers + 3
    assert [x.tolist() for x in sent] == [[i] for i in range(buffers + 3)]


def test_buffers_are_taken_in_the_order_in_which_their_copies_began(events: list[Event]) -> None:
    """So that where the next one is not free none is: at most two events are asked a call."""
    staging = Staging(NAME, WORDS)
    order: list[Event] = []
    sent: list[torch.Tensor] = []
    for i in range(5 * staging.buffers):
        if len(order) == 11:  # eleven copies are under way at a time
            order.pop(0).done = True
        recorded = [event.recorded for event in events]
        asked = sum(event.asked for event in events)
        sent.append(send(staging, i))
        assert sum(event.asked for event in events) - asked <= 2
        used = [e for e, n in zip(events, [*recorded, 0], strict=False) if e.recorded > n]
        assert len(used) == 1
        order += used
    assert staging.buffers == 11
    assert len({x.data_ptr() for x in sent}) == 11
    assert [x.tolist() for x in sent[-11:]] == [[i] for i in range(len(sent) - 11, len(sent))]


def test_a_call_that_needs_no_upload_leaves_its_buffer_free(events: list[Event]) -> None:
    staging = Staging(NAME, WORDS)
    staging.begin()
    staging.part(4)
    staging.begin()
    assert staging.part(4) == slice(0, 4)
    assert staging.uploads == 0
    assert all(event.recorded == 0 for event in events)


def test_parts_are_aligned_and_do_not_overlap(events: list[Event]) -> None:
    staging = Staging(NAME, WORDS)
    staging.begin()
    parts = [staging.part(words) for words in (1, 3, 4, 5, 0, 8)]
    assert parts == [
        slice(0, 1),
        slice(4, 7),
        slice(8, 12),
        slice(12, 17),
        slice(20, 20),
        slice(20, 28),
    ]
    staging.upload()
    for part in parts:
        assert staging.device_part(part).data_ptr() % 16 == 0
    assert staging.upload_bytes == 4 * 28


@pytest.mark.parametrize("device", ["cpu", NAME])
def test_growth_keeps_the_parts_written_before(device: str, events: list[Event]) -> None:
    staging = Staging(device, WORDS)
    buffers = staging.buffers
    staging.begin()
    sizes = [3, WORDS - 8, 6 * WORDS, 1, 40 * WORDS]
    parts = []
    for i, size in enumerate(sizes):
        parts.append(staging.part(size))
        staging.host_part(parts[-1])[:] = np.arange(size) + 1000 * i
    staging.upload()
    for i, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        want = (np.arange(size) + 1000 * i).tolist()
        assert staging.host_part(part).tolist() == want
        assert staging.device_part(part).tolist() == want
    assert staging.buffers == buffers
    assert staging.uploads == 1
    # the larger buffer stays
    staging.begin()
    where = staging.part(40 * WORDS)
    assert staging.host_part(where).size == 40 * WORDS


def test_growth_at_least_doubles(events: list[Event]) -> None:
    """So that descriptors which come one by one are not copied again and again."""
    staging = Staging(NAME, WORDS)
    made = len(events)
    staging.begin()
    for _ in range(100 * WORDS // 4):
        staging.part(4)
    assert len(events) - made <= 7


def test_the_device_copy_is_of_the_words_in_use_only(events: list[Event]) -> None:
    staging = Staging(NAME, WORDS)
    send(staging, *range(40))
    events[0].done = True
    where = send(staging, 7)
    assert staging.upload_bytes == 4 * (40 + 4)
    # what lay behind is as it was
    assert staging.device_part(slice(4, 40)).tolist() == [*range(4, 40)]
    assert where.tolist() == [7]


def test_a_part_can_go_straight_to_where_it_stays(events: list[Event]) -> None:
    staging = Staging(NAME, WORDS)
    target = torch.zeros(8, dtype=torch.int32, device=NAME)
    with no_host_sync() as seen:
        staging.begin()
        where = staging.part(3)
        staging.host_part(where)[:] = [5, 6, 7]
        staging.upload_to(target[2:5], where)
    assert target.tolist() == [0, 0, 5, 6, 7, 0, 0, 0]
    assert seen.uploads == staging.uploads == 1
    assert staging.upload_bytes == 16
    assert events[0].recorded == 1


def test_on_the_host_there_is_one_buffer_and_no_copy() -> None:
    staging = Staging("cpu", WORDS)
    for i in range(20):
        assert send(staging, i, i + 1).tolist() == [i, i + 1]
    assert staging.buffers == 1
    staging.begin()
    where = staging.part(1)
    assert staging.device_part(where).data_ptr() == staging.host_part(where).ctypes.data
    assert staging.uploads == 20


def test_sending_neither_waits_nor_allocates(events: list[Event]) -> None:
    staging = Staging(NAME, WORDS)
    with no_host_sync() as seen:
        for i in range(staging.buffers):
            send(staging, i)
        for event in events:
            event.done = True
        for i in range(100):
            send(staging, i)
            for event in events:
                event.done = True
    assert seen.pinned == 0
    assert not any("empty" in op for op in seen.ops)


def send_ten() -> Staging:
    staging = Staging(NAME, WORDS)
    for i in range(10):
        send(staging, i)
    return staging


def test_copies_that_lag_behind_make_the_ring_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.device.staging._FIRST_BUFFERS", 2)
    with accelerator(run_kernels=False, lag=3):
        assert send_ten().buffers == 4


def test_a_ring_that_asks_no_event_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.device.staging._Buffer.is_free", lambda buffer: True)
    with (
        accelerator(run_kernels=False, lag=3),
        pytest.raises(AssertionError, match="pinned memory was written"),
    ):
        send_ten()


def test_a_blocking_copy_would_be_caught(events: list[Event]) -> None:
    staging = Staging(NAME, WORDS)
    staging.begin()
    part = staging.part(1)
    device, host = staging.device_part(part), torch.from_numpy(staging.host_part(part))
    with no_host_sync(), pytest.raises(HostSync, match="blocking"):
        device.copy_(host)
