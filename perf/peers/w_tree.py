"""W1 match, W2 insert, W3 evict, W8 re-match: one call at a time on a tree that stands.

Keys are 4,096 cached tokens that share their first 2,048, and one token more (a match leaves the last token
off). All sides get the same batches, so that their caches are as full of other requests' tokens; sides that
loop over requests get fewer of them.
"""

from __future__ import annotations

import ctypes
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


def fewer(side: Side, batches: list[Ints]) -> list[Ints]:
    """Return all batches for us, a quarter of them for a side that loops: it is slow, and its calls long."""
    return batches if side.batched else batches[: max(1, len(batches) // 4)]


def resident_bytes() -> int:
    """Return the bytes of this process that are in memory, without what was freed."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
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
    side.fill(root, 1)
    lens = np.full(ids.size, tokens.shape[1] - 1, np.int64)
    side.load(ids, tokens, lens)
    before = resident_bytes()
    # what is filled at a time is live as a whole, so it must be little
    side.fill(ids, max(1, min(32, 2 * LEN // (tokens.shape[1] - shared))))
    held = resident_bytes() - before
    side.set_lens(ids, lens + 1)
    return held


def _match_all(side: Side, batches: list[Ints]) -> None:
    for ids in batches:
        side.match(ids)


def match(bench: Bench, make: Makers) -> None:
    """W1 and W8. Hot: the same batch again and again. Cold: batches out of 2,000 sequences (48 MiB)."""
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
        # what the process grew by; our arrays stand from the start, and say themselves how much is in use
        bench.notes[f"memory, {side.name}"] = side.memory() or {"tree_bytes": grown}
        bench.notes[f"memory, {side.name}"]["cached_tokens"] = cached
        side.load(partial, astray, np.full(extra, LEN + 1))
        side.load(miss, random_tokens(rng, extra, LEN + 1), np.full(extra, LEN + 1))

    def run(case: str, batches: Callable[[], list[Ints]], *, hot: bool) -> None:
        for _ in range(bench.repeats(16, 6)):
            calls = batches()
            found = []
            for side in sides:
                chosen = fewer(side, calls)
                if hot:  # the first calls of a side find the caches full of the others'
                    _match_all(side, chosen)
                bench.time(case, side, sum(map(len, chosen)), _match_all, side, chosen)
                side.match(calls[-1])  # not timed: what was timed last may be another batch
                found.append([x.tolist() for x in side.matched(calls[-1])])
            assert all(f == found[0] for f in found), f"{case}: the sides disagree"

    for size, calls in ((1, 32), (16, 16), (64, 8), (256, 4)):
        run(
            f"W1 match hot, batch {size}",
            lambda size=size, calls=calls: [ids[:size]] * calls,
            hot=True,
        )
    for size, calls in ((1, 64), (64, 8), (256, 4)):
        run(
            f"W1 match cold, batch {size}",
            lambda size=size, calls=calls: [
                rng.choice(num, size, replace=False) for _ in range(calls)
            ],
            hot=False,
        )
    run("W1 match partial, batch 64", lambda: [partial] * 4, hot=True)
    run("W1 match miss, batch 64", lambda: [miss] * 4, hot=True)

    queue = ids[: min(1000, num)]
    for _ in range(bench.repeats(6, 2)):
        for side in sides:
            side.match(queue)
            bench.time(
                "W8 re-match, queue of 1,000",
                side,
                queue.size,
                side.rematch,
                queue,
                calls=3 if side.batched else 1,
            )


def insert(bench: Bench, make: Makers) -> None:
    """W2, and the admissions that lead to it."""
    rng = np.random.default_rng(2)
    batch = 64
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
        for _ in range(bench.repeats(6, 3) * (1 if size > 1 else 4)):
            fresh = random_tokens(rng, size, LEN + 1)
            fresh[:, :SHARED] = tokens[0, :SHARED]
            for side in sides:
                new = ids[:size]
                lens = np.full(new.size, LEN, np.int64)
                for op, hand_over in (("commit", side.commit), ("finish", side.finish)):
                    fresh[:, SHARED] = rng.integers(1, VOCAB, size)
                    side.load(new, fresh, lens)
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
                chosen = np.arange(size)
                side.match(chosen)
                side.admit(chosen)  # once untimed, as above
                side.drop(chosen)
                side.match(chosen)
                bench.time(f"W2 admit 4,096 tokens{name}", side, chosen.size, side.admit, chosen)
                side.drop(chosen)


def _tails(bench: Bench, make: Makers, leaves: int, tail: int) -> list[Side]:
    """Caches full of tails of `tail` tokens behind a shared prompt of 2,048."""
    rng = np.random.default_rng(3)
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
    for side in sides:
        prefill(side, tokens, np.arange(leaves), SHARED)
    return sides


def evict(bench: Bench, make: Makers, leaves: int) -> None:
    """W3: tails of 64 tokens behind a shared prompt of 2,048; the pool is full."""
    tail = 64
    bulk = min(1000, leaves // 4)
    sides = _tails(bench, make, leaves, tail)
    for _ in range(bench.repeats(10, 4)):
        for side in sides:
            side.evict(tail, 0)  # the first call of a side finds the caches full of the others'
            bench.time("W3 evict one tail", side, 1, side.evict, tail, 0, calls=32)
    for _ in range(bench.repeats(6, 2)):
        for side in sides:
            side.evict(0, tail)
            bench.time("W3 evict SWA of one tail", side, 1, side.evict, 0, tail, calls=16)
    for _ in range(1 if bench.quick else 2):
        for side in sides:
            bench.time(f"W3 evict {bulk:,} tails", side, bulk, side.evict, bulk * tail, 0)


def evict_growth(bench: Bench, make: Makers) -> None:
    """W3: one tail out of 5,000 leaves and out of 50,000, in turn."""
    tail = 64
    beds = [(leaves, _tails(bench, make, leaves, tail)) for leaves in (5_000, 50_000)]
    for _ in range(bench.repeats(10, 4)):
        for leaves, sides in beds:
            for side in sides:
                side.evict(tail, 0)
                case = f"W3 evict one tail of {leaves:,}"
                bench.time(case, side, 1, side.evict, tail, 0, calls=32)
