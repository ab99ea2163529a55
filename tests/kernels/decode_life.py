"""A serving schedule in which rows join, decode together and leave; the decode step is a parameter.

Two lives with the same seed make the same decisions, whatever device and decode step they run on, as
decisions depend on lengths alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from kvcache import CacheConfig, CapacityError, KeyBatch, KVCacheManager

Decode = Callable[[KVCacheManager, list[int]], None]


class DecodeLife:
    """`act` lets a request join, prefill, leave, or (most of the time) all running ones decode a token."""

    def __init__(self, seed: int, config: CacheConfig, decode: Callable[..., Decode]) -> None:
        self.rng = random.Random(seed)
        self.config = config
        self.cache = KVCacheManager(config)
        self.decode = decode(self.cache)
        self.keys: dict[int, Any] = {}
        self.past = [np.zeros(0, np.int32)]
        self.batch: list[int] = []  # rows that decode
        self.steps = self.changes = self.refused = 0

    def act(self) -> str:
        kind = self.rng.choices(["decode", "join", "leave", "commit"], [12, 2, 1, 1])[0]
        try:
            getattr(self, f"_{kind}")()
        except CapacityError:
            self.refused += 1
            self._leave()
        return kind

    def _join(self) -> None:
        if not self.cache.rows.num_free:
            return
        base = self.rng.choice(self.past)
        fresh = [self.rng.randrange(4) for _ in range(self.rng.randint(1, 40))]
        key = np.append(base[: self.rng.randint(0, base.size)], fresh).astype(np.int32)
        key = key[: self.config.max_len // 2]
        row = int(self.cache.admit(self.cache.match(KeyBatch(key, [0], [key.size - 1])))[0])
        try:
            self.cache.extend([row], [key.size])
        except CapacityError:
            self.cache.abort([row])
            raise
        self.cache.advance([row])
        self.cache.slide([row])
        self.keys[row] = key
        self.batch.insert(self.rng.randint(0, len(self.batch)), row)
        self.changes += 1

    def _decode(self) -> None:
        full = [
            r
            for r in self.batch
            if self.cache.rows.computed_len[self.cache.index([r])[0]] == self.config.max_len
        ]
        self._end(full)
        if self.batch:
            self.decode(self.cache, self.batch)
            self.steps += 1
            for row in self.batch:
                self.keys[row] = np.append(self.keys[row], np.int32(self.rng.randrange(4)))

    def _leave(self) -> None:
        if self.batch:
            self._end(self.rng.sample(self.batch, 1))

    def _end(self, rows: list[int]) -> None:
        if rows:
            keys = [self.keys.pop(r) for r in rows]
            self.cache.finish(rows, KeyBatch.pack(keys))
            self.past = (self.past + keys)[-8:]
            self.batch = [r for r in self.batch if r not in rows]
            self.changes += 1

    def _commit(self) -> None:
        rows = self.rng.sample(self.batch, self.rng.randint(0, len(self.batch)))
        self.cache.commit(rows, KeyBatch.pack([self.keys[r] for r in rows]))


def eager(cache: KVCacheManager) -> Decode:
    """Decode with the calls of the manager, one after the other."""

    def decode(cache: KVCacheManager, rows: list[int]) -> None:
        cache.step(rows)
        cache.advance(rows)
        cache.slide(rows)

    return decode


def state_of(cache: KVCacheManager) -> dict[str, Any]:
    """All state of a cache, on the host and on the device (whose tensors may be of `kvdev`)."""
    state: dict[str, Any] = {name: x.tolist() for name, x in vars(cache.pools).items()}
    # what lies above the tops of the stacks is no state
    for i, stack in enumerate(("full_stack", "swa_stack")):
        state[stack] = state[stack][: state["tops"][i]]
    state["rows"] = cache.rows.state.tolist()
    stats = cache.stats()
    for name in ("full_pages_free", "swa_pages_free", "locked_swa_pages", "evicted_full_pages"):
        state[name] = getattr(stats, name)
    return state
