"""W1 match, W2 insert, W3 evict, W8 re-match: one call at a time on a tree that stands.

Keys are 4,096 cached tokens that share their first 2,048, as in ../../../shared/host_tree.md, and one token more
(a match leaves the last token off). Sides that loop over requests are given fewer of them: what a request
costs them does not depend on the batch.
"""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable, Sequence

import numpy as np
from makers import Makers
from side import Ints, Side, SideConfig, Tokens
from timing import Bench

SHARED = 2048
LEN = 4096
VOCAB = 100_000


def arrange(ids: Sequence[int] | Ints) -> Ints:
    return np.asarray(ids, np.int64)


def random_tokens(rng: np.random.Generator, num: int, length: int) -> Tokens:
    return rng.integers(1, VOCAB, (num, length)).astype(np.int32)


def few(side: Side, ids: Ints, most: int) -> Ints:
    """Return `ids` for us, at most `most` of them for a side that loops."""
    return ids if side.batched else ids[:most]


def resident_bytes() -> int:
    """Return the bytes of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def shared_sequences(rng: np.random.Generator, num: int) -> Tokens:
    """Return [num + 1, LEN + 1] tokens: all rows share SHARED tokens."""
    tokens = random_tokens(rng, num + 1, LEN + 1)
    tokens[:, :SHARED] = tokens[0, :SHARED]
    return tokens


def prefill(side: Side, tokens: Tokens, ids: Ints, shared: int) -> int:
    """Have the tree hold the first `shared` tokens with a window of their own, then all rows but their last.

    Returns:
        Bytes by which the process grew with the latter.
    """
    root = arrange([side.config.max_requests - 1])
    side.load(root, tokens[:1], arrange([shared]))
    side.fill(root)
    lens = np.full(ids.size, tokens.shape[1] - 1, np.int64)
    side.load(ids, tokens, lens)
    gc.collect()
    before = resident_bytes()
    side.fill(ids)
    gc.collect()
    held = resident_bytes() - before
    side.set_lens(ids, lens + 1)
    return held


def match(bench: Bench, make: Makers) -> None:
    """W1 and W8."""
    rng = np.random.default_rng(1)
    num = 300 if bench.quick else 2000
    # beyond the cached ones: the same keys gone elsewhere at 3,072 (partial) and at once (miss)
    extra = 64
    cached = SHARED + num * (LEN - SHARED)
    sides = make(
        SideConfig(
            bench.page_size,
            bench.window,
            full_tokens=cached + 64 * bench.page_size,
            swa_tokens=min(cached, num * (bench.window + bench.page_size) + 4 * LEN)
            + 64 * bench.page_size,
            max_running=256,
            max_requests=num + 2 * extra + 1,
            max_len=LEN + bench.page_size,
        )
    )
    tokens = shared_sequences(rng, num - 1)
    ids = np.arange(num)
    partial, miss = num + np.arange(extra), num + extra + np.arange(extra)
    astray = tokens[:extra].copy()
    astray[:, 3072:] = random_tokens(rng, extra, LEN + 1 - 3072)
    for side in sides:
        grown = prefill(side, tokens, ids, SHARED)
        bench.notes[f"resident bytes per cached token, {side.name}"] = grown / cached
        if side.memory():
            bench.notes[f"memory, {side.name}"] = side.memory()
        side.load(partial, astray, np.full(extra, LEN + 1))
        side.load(miss, random_tokens(rng, extra, LEN + 1), np.full(extra, LEN + 1))

    def run(case: str, choose: Callable[[], Ints], repeats: int, loop: int) -> None:
        for _ in range(repeats):
            batch = choose()
            found = []
            for side in sides:
                chosen = few(side, batch, loop)
                bench.time(case, side, chosen.size, side.match, chosen)
                found.append([x[:loop].tolist() for x in side.matched(chosen)])
            assert all(f == found[0] for f in found), f"{case}: the sides disagree"

    n = bench.repeats(40, 8)
    for size in (1, 16, 64, 256):
        run(f"W1 match hot, batch {size}", lambda size=size: ids[:size], n, 4)
    for size in (64, 256):
        run(
            f"W1 match cold, batch {size}",
            lambda size=size: rng.choice(num, size, replace=False),
            n,
            8,
        )
    run("W1 match partial, batch 64", lambda: partial, n, 4)
    run("W1 match miss, batch 64", lambda: miss, n, 8)

    queue = ids[: min(1000, num)]
    for side in sides:
        side.match(queue)
    for _ in range(bench.repeats(8, 2)):
        for side in sides:
            chosen = few(side, queue, 100)
            bench.time("W8 re-match, queue of 1,000", side, chosen.size, side.rematch, chosen)


def insert(bench: Bench, make: Makers) -> None:
    """W2, and the admissions that lead to it."""
    rng = np.random.default_rng(2)
    batch, loop = 64, 8
    kept = 128  # sequences that stay
    live = batch * (LEN - SHARED)
    sides = make(
        SideConfig(
            bench.page_size,
            bench.window,
            full_tokens=SHARED + kept * (LEN - SHARED) + live + 128 * bench.page_size,
            swa_tokens=SHARED + kept * (LEN - SHARED) + live + 128 * bench.page_size,
            max_running=batch,
            max_requests=kept + 2 * batch + 1,
            max_len=LEN + 2 * bench.page_size,
        )
    )
    tokens = shared_sequences(rng, kept - 1)
    for side in sides:
        prefill(side, tokens, np.arange(kept), SHARED)
    ids = kept + np.arange(batch)
    for name, size in (("", batch), (", batch 1", 1)):
        for _ in range(bench.repeats(12, 4) * (1 if size > 1 else 2)):
            fresh = random_tokens(rng, size, LEN + 1)
            fresh[:, :SHARED] = tokens[0, :SHARED]
            for side in sides:
                new = few(side, ids[:size], loop)
                lens = np.full(new.size, LEN, np.int64)
                for op, hand_over in (("commit", side.commit), ("finish", side.finish)):
                    fresh[:, SHARED] = rng.integers(1, VOCAB, size)
                    side.load(new, fresh[: new.size], lens)
                    side.match(new)
                    side.admit(new)
                    side.extend(new, lens)
                    bench.time(f"W2 {op} 2,048 new tokens{name}", side, new.size, hand_over, new)
                    if op == "commit":
                        side.finish(new)
                    side.evict(new.size * (LEN - SHARED), 0)
    # an admission that binds 4,096 tokens
    for name, size in (("", batch), (", batch 1", 1)):
        for _ in range(bench.repeats(20, 5)):
            for side in sides:
                chosen = few(side, np.arange(size), loop)
                side.match(chosen)
                bench.time(f"W2 admit 4,096 tokens{name}", side, chosen.size, side.admit, chosen)
                side.drop(chosen)


def evict(bench: Bench, make: Makers, leaves: int, *, label: str = "") -> None:
    """W3: tails of 64 tokens behind a shared prompt of 2,048; the pool is full."""
    rng = np.random.default_rng(3)
    tail = 64
    width = SHARED + tail + 1
    full = SHARED + leaves * tail
    sides = make(
        SideConfig(
            bench.page_size,
            bench.window,
            full_tokens=full,
            swa_tokens=full,
            max_running=64,
            max_requests=leaves + 1,
            max_len=width + bench.page_size,
        )
    )
    tokens = random_tokens(rng, leaves, width)
    tokens[:, :SHARED] = tokens[0, :SHARED]
    bulk = min(1000, leaves // 4)
    for side in sides:
        prefill(side, tokens, np.arange(leaves), SHARED)
    ones = bench.repeats(60, 15)
    for _ in range(ones):
        for side in sides:
            bench.time(f"W3 evict one tail{label}", side, 1, side.evict, tail, 0)
    for _ in range(bench.repeats(30, 8)):
        for side in sides:
            bench.time(f"W3 evict SWA of one tail{label}", side, 1, side.evict, 0, tail)
    for _ in range(1 if bench.quick else 2):
        for side in sides:
            bench.time(f"W3 evict {bulk:,} tails{label}", side, bulk, side.evict, bulk * tail, 0)
