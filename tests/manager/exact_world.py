"""A manager in the middle of its work, for tests that a call which raises changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from instruments.fakedev import Seen, no_host_sync
from snapshot import changes, snapshot

from kvcache import (
    CacheConfig,
    Hints,
    KeyBatch,
    KVCacheManager,
)
from kvcache.device.decode_step import DecodeStep
from kvcache.device.device_match import DeviceKeys
from kvcache.device.views import Views
from kvcache.policies.checkpoints import Branch

FULL_PAGES, SWA_PAGES, MAX_LEN = 48, 40, 60


def tokens(family: int, length: int) -> list[int]:
    """The tokens of a family of requests; families share the first eight."""
    return [*range(min(length, 8)), *range(100 * family + 8, 100 * family + length)]


def pack(*keys: list[int]) -> KeyBatch:
    return KeyBatch.pack(keys)


class World:
    """A manager in the middle of its work: every kind of thing that a call can get wrong is there."""

    def __init__(self, device: str, bigram: bool) -> None:
        self.device = device
        self.m = KVCacheManager(
            CacheConfig(
                page_size=4,
                window=8,
                full_pages=FULL_PAGES,
                swa_pages=SWA_PAGES,
                max_rows=6,
                max_len=MAX_LEN,
                bigram=bigram,
                checkpoints=(Branch(), Hints()),
                max_namespaces=3,
                debug=True,
                device=device,
            )
        )
        self.ns_running, self.ns_dropped = self.m.namespace("a"), self.m.namespace("dropped")
        # a match whose prefix goes, in a namespace that stands and in one that goes
        self._serve(tokens(1, 21))
        self._serve(tokens(1, 21), self.ns_dropped)
        self.stale = self.m.match(pack(tokens(2, 9), tokens(1, 21)))
        self.of_dropped = self.m.match(pack(tokens(1, 21)), self.ns_dropped)
        assert self.stale.reuse_len[1] == self.of_dropped.reuse_len[0] == 20
        self.m.drop_namespace(self.ns_dropped)
        self.m.flush()
        # live windows, tombstones and a fork in the tree
        self._serve(tokens(1, 33))
        self._serve(tokens(2, 33))
        self.ns_cached = self.m.namespace("b")
        self._serve(tokens(1, 13), self.ns_cached)
        # two rows behind a cached prefix, one at max_len, one in a namespace, one that has ended
        self.key, self.other_key = tokens(1, 40), tokens(2, 40)
        self.row = self._start(self.key, 35)
        self.other = self._start(self.other_key, 37)
        self.full = self._start(tokens(3, MAX_LEN), MAX_LEN)
        self.in_namespace = self._start(tokens(1, 10), 9, self.ns_running)
        self.ended = self._start(tokens(4, 10), 9)
        self.m.abort([self.ended])
        self.m.slide([self.full])
        # token slots on the device
        self.one, self.two = (torch.zeros(n, dtype=torch.int64, device=device) for n in (1, 2))
        self.floats, self.int32 = self.one.float(), self.one.int()
        self.device_keys = DeviceKeys(self.two, [0], [2])
        self.decode = DecodeStep(self.m, views=("token_slots",), num_lanes=3, max_slots=80)
        self.few_slots = Views(self.m, max_slots=40)
        # recency that waits
        self.found = self.m.match(pack(tokens(2, 30), tokens(1, 14), tokens(5, 14)))
        assert self.found.reuse_len.max() > 0
        # as many requests, in the namespace of the same handle, but of another cache
        another = KVCacheManager(
            replace(self.m.config, full_pages=4 * FULL_PAGES, max_len=4 * MAX_LEN)
        )
        self.of_another = another.match(pack([1], [2], [3]))
        assert self.of_another.namespaces.tobytes() == self.found.namespaces.tobytes()
        self.of_another_on_device = another.match(self.device_keys, on="device")
        # given out, and no match has used it yet: it makes no room
        assert self.m.namespace("b") == self.ns_cached

    def _start(self, key: list[int], length: int, namespace: int | None = None) -> int:
        (row,) = self.m.admit(self.m.match(pack(key[:-1]), namespace))
        self.m.extend([row], [length])
        self.m.advance([row])
        return int(row)

    def _serve(self, key: list[int], namespace: int | None = None) -> None:
        self.m.finish([self._start(key, len(key), namespace)], pack(key))


def unchanged(
    manager: KVCacheManager, call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    """Make a call that is refused, and compare all state before and after."""
    before, stats = snapshot(manager), manager.stats()
    with no_host_sync() as seen, pytest.raises(error, match=message):
        call()
    assert changes(before, snapshot(manager)) == []
    assert manager.stats() == stats
    assert seen == Seen()


def run_decode_step(decode: DecodeStep, rows: Any) -> None:
    with decode.running(rows):
        decode.before_forward()
        decode.after_forward()


def started(m: KVCacheManager, keys: list[list[int]], length: int | None = None) -> Any:
    """Rows that have computed their keys, or `length` tokens of each."""
    rows = m.admit(m.match(pack(*[key[:0] for key in keys])))
    m.extend(rows, [length or len(key) for key in keys])
    m.advance(rows)
    return rows
