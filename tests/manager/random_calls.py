"""A caller that makes random calls of every kind, with every kind of argument that a call takes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch

from kvcache import (
    CapacityError,
    DecodeStep,
    DeviceKeys,
    KeyBatch,
    KVCacheManager,
    MatchBatch,
    Ragged,
    StaleMatchError,
)

PROMPTS = 6
# a key may begin so many tokens behind its prompt
MOST_SKIPPED = 5
SLOT_DTYPES = (torch.int32, torch.int64)


@dataclass
class Running:
    """What the caller knows of a row."""

    start: int  # of its tokens in the buffers
    computed: int
    allocated: int


class Caller:
    """Drives a manager; a call that finds too few pages or a stale match is one like any other."""

    def __init__(self, cache: KVCacheManager, seed: str) -> None:
        self.cache = cache
        self.rng = Random(seed)
        self.calls: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.noted: Counter[str] = Counter()
        self.rows: dict[int, Running] = {}
        self.row_dtype: Any = np.int64
        self.max_len = cache.config.max_len
        prompts = np.ones((PROMPTS, self.max_len), np.int32)
        for i in range(1, PROMPTS):
            prompts[i, i * self.max_len // PROMPTS :] = i
        tokens = np.append(prompts.reshape(-1), np.ones(MOST_SKIPPED, np.int32))
        self.buffers = [tokens, tokens.astype(np.int64)]
        self.pools = [torch.from_numpy(x).to(cache.config.device) for x in self.buffers]
        for buffer in self.buffers[:]:
            self.buffers.append(buffer.copy())
            self.buffers[-1].flags.writeable = False
        windowed = ("swa_page_table", "swa_indices", "swa_token_slots")
        self.views = ["page_table", "full_indices", "token_slots"]
        self.views += windowed if cache.config.has_swa else ()
        self.decode = DecodeStep(cache, self.views, slot_dtype=self.rng.choice(SLOT_DTYPES))
        self.acts: list[Any] = [
            *(self.begin, self.begin, self.grow, self.grow, self.advance, self.advance),
            *(self.hand_over, self.step, self.step, self.slide, self.abort, self.evict),
            *(self.drop, self.view, self.view, self.run_decode, self.translate),
        ]

    def run(self, calls: int) -> None:
        while self.calls.total() < calls:
            self.rng.choice(self.acts)()

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Make one call; None if it was refused."""
        self.calls[name] += 1
        try:
            return getattr(self.cache, name)(*args, **options)
        except (CapacityError, StaleMatchError):
            self.refused[name] += 1
            return None

    def given(self, values: list[int], dtype: Any = np.int64) -> Any:
        """Values as a list, or as one of the arrays that a caller may have."""
        array = np.array(values, dtype)
        kind = self.rng.randrange(4)
        if kind == 0:
            return values
        if kind == 1:
            return array
        if kind == 2:
            array.flags.writeable = False
            return array
        return np.repeat(array, 2)[::2]

    def some(self) -> dict[int, Running]:
        chosen = [x for x in self.rows.items() if self.rng.random() < 0.6]
        self.rng.shuffle(chosen)
        return dict(chosen)

    def given_rows(self, rows: dict[int, Running]) -> Any:
        return self.given([*rows], self.row_dtype)

    def keys(self, starts: list[int], lens: list[int]) -> KeyBatch:
        buffer = self.rng.choice(self.buffers)
        return KeyBatch(buffer, self.given(starts), self.given(lens))

    # requests

    def begin(self) -> None:
        rng, num = self.rng, self.rng.randint(0, 3)
        starts = [rng.randrange(PROMPTS) * self.max_len for _ in range(num)]
        lens = [rng.randint(0, self.max_len - 1) for _ in range(num)]
        spaces = None
        if rng.random() < 0.5:
            handle = self.call("namespace", rng.choice([None, "a", "b"]))
            spaces = rng.choice([handle, self.given([handle] * num)])
        found: Any
        if rng.random() < 0.3:
            skip = rng.randint(0, MOST_SKIPPED)
            pool = rng.choice(self.pools)
            keys = DeviceKeys(pool[skip:], self.given(starts), self.given(lens, np.int32))
            starts = [start + skip for start in starts]
            if rng.random() < 0.5:
                keys = DeviceKeys(pool, self.given(starts), self.given(lens))
            found = self.call("match", keys, spaces, touch=rng.random() < 0.8, on="device")
            batch = found.wait()
        else:
            touch = rng.random() < 0.8
            found = batch = self.call("match", self.keys(starts, lens), spaces, touch=touch)
            if rng.random() < 0.5:
                found = batch = self.call("match", self.keys(starts, lens), spaces, previous=batch)
            if rng.random() < 0.3:
                found = batch = MatchBatch.concatenate([batch.select([*range(num)])])
        chosen = [i for i in range(num) if rng.random() < 0.8]
        rows = self.call("admit", found, self.given(chosen))
        if rows is None:
            return
        self.row_dtype = rows.dtype
        for i, row in zip(chosen, rows.tolist(), strict=True):
            reuse = int(batch.reuse_len[i])
            self.rows[row] = Running(starts[i], reuse, reuse)

    def grow(self) -> None:
        rows = self.some()
        more = 3 * self.cache.config.page_size
        lens = [
            self.rng.randint(r.computed, min(r.allocated + more, self.max_len))
            for r in rows.values()
        ]
        self.call("extend", self.given_rows(rows), self.given(lens))
        self.take_over(rows, "extend", lens)

    def take_over(self, rows: dict[int, Running], name: str, lens: list[int]) -> None:
        """Note lengths after a call that returns None whether or not it was refused."""
        if self.refused[name] == self.noted[name]:
            for row, n in zip(rows.values(), lens, strict=True):
                row.allocated = max(row.allocated, n)
        self.noted[name] = self.refused[name]

    def step(self) -> None:
        rows = {h: r for h, r in self.some().items() if r.computed < self.max_len}
        self.call("step", self.given_rows(rows))
        self.take_over(rows, "step", [r.computed + 1 for r in rows.values()])

    def advance(self) -> None:
        rows = self.some()
        lens = [self.rng.choice([r.allocated, r.computed]) for r in rows.values()]
        if self.rng.random() < 0.5:
            lens = [r.allocated for r in rows.values()]
            self.call("advance", self.given_rows(rows))
        else:
            self.call("advance", self.given_rows(rows), self.given(lens))
        for row, n in zip(rows.values(), lens, strict=True):
            row.computed = n

    def slide(self) -> None:
        self.call("slide", self.given_rows(self.some()))

    def hand_over(self) -> None:
        name = self.rng.choice(["commit", "commit", "commit", "finish", "retract"])
        rows = self.some()
        keys = self.keys([r.start for r in rows.values()], [r.computed for r in rows.values()])
        hints = None
        if self.rng.random() < 0.5:
            ends = self.given([*range(len(rows) + 1)])
            hints = Ragged(self.given([r.computed // 2 for r in rows.values()]), ends)
        self.call(name, self.given_rows(rows), keys, hints)
        if name != "commit":
            self.forget(rows)

    def abort(self) -> None:
        rows = self.some()
        self.call("abort", self.given_rows(rows))
        self.forget(rows)

    def forget(self, rows: dict[int, Running]) -> None:
        for handle in rows:
            del self.rows[handle]

    # pages

    def evict(self) -> None:
        if self.rng.random() < 0.1:
            self.call("flush")
        else:
            self.call("evict", self.rng.randint(0, 3), self.rng.randint(0, 3))
        self.call("capacity")
        self.call("stats")

    def drop(self) -> None:
        if not self.rows and self.rng.random() < 0.3:
            self.call("drop_namespace", self.call("namespace", "a"))

    # what engines read

    def view(self) -> None:
        rows = self.some()
        lens = self.given([r.computed for r in rows.values()]) if self.rng.random() < 0.5 else None
        name = self.rng.choice(self.views)
        dtype = {"dtype": self.rng.choice(SLOT_DTYPES)} if name.endswith("slots") else {}
        self.calls[name] += 1
        getattr(self.cache.views, name)(self.given_rows(rows), lens, **dtype)

    def run_decode(self) -> None:
        rows = {h: r for h, r in self.some().items() if r.allocated <= r.computed + 1}
        rows = {h: r for h, r in rows.items() if r.computed < self.max_len}
        self.calls["decode"] += 1
        try:
            with self.decode.running(self.given_rows(rows)):
                self.decode.before_forward()
                self.decode.after_forward()
        except CapacityError:
            self.refused["decode"] += 1
            return
        for row in rows.values():
            row.computed += 1
            row.allocated = row.computed

    def translate(self) -> None:
        if not self.cache.config.has_swa:
            return
        slots = torch.zeros(64, dtype=self.rng.choice(SLOT_DTYPES)).to(self.cache.config.device)
        given = slots[self.rng.randint(0, 5) :]
        out = self.rng.choice([None, given, torch.empty_like(slots)[: given.numel()]])
        self.call("translate", given, out=out)
