"""Host time of every public call, beside that of another checkout: `python perf/calls.py --against X`.

Each checkout runs in a process of its own, and the two take turns, round by round, so that what else the
machine does meets both. Times are CPU time of the thread, medians over the rounds; a ratio above 1 is
slower than the other checkout. Argument checks, plans, staging and CPU twins are in it: it is the whole call.

    git worktree add /tmp/before HEAD~1
    python perf/calls.py --against /tmp/before --json out.json
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE, WINDOW, LENGTH, SHARED = 64, 128, 4096, 2048


class Calls:
    """The calls of one checkout, on a cache in the middle of its work."""

    def __init__(self, page: int) -> None:
        import numpy as np

        from kvcache import CacheConfig, KeyBatch, KVCacheManager

        self.np, self.batch_of = np, KeyBatch
        self.rng = np.random.default_rng(0)
        pages = 300 * LENGTH // page
        self.cache = KVCacheManager(CacheConfig(page, WINDOW, pages, pages // 2, 256, 8192))
        self.tokens = self.rng.integers(1, 100_000, (192, LENGTH + 200)).astype(np.int32)
        self.tokens[:, :SHARED] = self.tokens[0, :SHARED]
        self.flat = self.tokens.reshape(-1)
        for first in range(0, 64, 16):
            self.put(np.arange(first, first + 16), LENGTH)

    def keys(self, ids: Any, length: int) -> Any:
        starts = ids.astype(self.np.int64) * self.tokens.shape[1]
        return self.batch_of(self.flat, starts, self.np.full(ids.size, length, self.np.int64))

    def put(self, ids: Any, length: int) -> None:
        keys = self.keys(ids, length)
        rows = self.cache.admit(self.cache.match(keys))
        self.cache.extend(rows, self.np.full(ids.size, length))
        self.cache.advance(rows)
        self.cache.finish(rows, keys)

    def round(self) -> dict[str, float]:
        """Return nanoseconds a call, of every call, for batches of 1 and 64."""
        found: dict[str, float] = {}
        for batch in (1, 64):
            self._requests(batch, found)
        self._evictions(found)
        return found

    def _requests(self, batch: int, found: dict[str, float]) -> None:
        cache, np = self.cache, self.np
        ids = np.arange(batch)
        keys = self.keys(ids, LENGTH)
        most = 4 if batch > 1 else 60
        spent: dict[str, list[int]] = {}

        def timed(name: str, call: Callable[[], Any]) -> Any:
            begin = time.thread_time_ns()
            result = call()
            spent.setdefault(name, []).append(time.thread_time_ns() - begin)
            return result

        for _ in range(most):
            for _ in range(3):
                timed("KeyBatch", lambda: self.keys(ids, LENGTH))
                match = timed("match", lambda: cache.match(keys))
                timed("match again", lambda m=match: cache.match(keys, previous=m))
            rows = timed("admit", lambda m=match: cache.admit(m))
            timed("abort", lambda r=rows: cache.abort(r))
            # a prompt whose second half is new: computed in two chunks, then decoded
            fresh = ids + 64
            self.tokens[fresh, SHARED:] = self.rng.integers(
                1, 100_000, (batch, LENGTH + 200 - SHARED)
            )
            keys_of = {n: self.keys(fresh, n) for n in (3072, LENGTH, LENGTH + 8)}
            rows = cache.admit(cache.match(keys_of[LENGTH]))
            for end in (3072, LENGTH):
                ends = np.full(batch, end)
                timed("extend", lambda r=rows, e=ends: cache.extend(r, e))
                timed("advance, other rows", lambda r=rows: cache.advance(r))
                timed("commit", lambda r=rows, k=keys_of[end]: cache.commit(r, k))
                timed("slide a chunk", lambda r=rows: cache.slide(r))
            for _ in range(8):
                timed("step", lambda r=rows: cache.step(r))
                timed("swa_page_table", lambda r=rows: cache.swa_page_table(r))
                timed("advance", lambda r=rows: cache.advance(r))
                timed("slide", lambda r=rows: cache.slide(r))
            timed("commit, nothing new", lambda r=rows, k=keys_of[LENGTH + 8]: cache.commit(r, k))
            timed("finish", lambda r=rows, k=keys_of[LENGTH + 8]: cache.finish(r, k))
            rows = cache.admit(cache.match(keys_of[LENGTH + 8]))
            timed("retract", lambda r=rows, k=keys_of[LENGTH + 8]: cache.retract(r, k))
            cache.evict(batch * (LENGTH + 200 - SHARED) // self.cache.config.page_size)
        for name, times in spent.items():
            found[f"{name}, batch {batch}"] = statistics.median(times)

    def _evictions(self, found: dict[str, float]) -> None:
        cache, np = self.cache, self.np
        ids, size = np.arange(128, 192), self.cache.config.page_size
        for _ in range(8):
            self.tokens[ids, : 2 * size] = self.rng.integers(1, 100_000, (64, 2 * size))
            self.put(ids, size + 1)
        cache.evict(2)
        times = []
        for _ in range(100):
            begin = time.thread_time_ns()
            cache.evict(1)
            times.append(time.thread_time_ns() - begin)
        found["evict a page"] = statistics.median(times)
        begin = time.thread_time_ns()
        cache.evict(300)
        found["evict 300 pages"] = time.thread_time_ns() - begin
        for name, call in (
            ("capacity", cache.capacity),
            ("namespace", lambda: cache.namespace(None)),
        ):
            begin = time.thread_time_ns()
            for _ in range(200):
                call()
            found[name] = (time.thread_time_ns() - begin) / 200


def work(page: int) -> None:
    """Answer each line of stdin with one round, as JSON."""
    import torch

    torch.set_num_threads(1)
    calls = Calls(page)
    calls.round()
    gc.collect()
    gc.disable()
    for _ in sys.stdin:
        print(json.dumps(calls.round()), flush=True)


def start(checkout: Path, page: int) -> Any:
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(page)]
    return subprocess.Popen(
        command,
        env=environment,
        cwd=checkout,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def measure(checkouts: list[Path], page: int, rounds: int) -> list[dict[str, float]]:
    """Return medians for each checkout, after rounds taken in turn."""
    workers = [start(checkout, page) for checkout in checkouts]
    seen: list[list[dict[str, float]]] = [[] for _ in workers]
    for i in range(rounds + 1):
        for worker, rows in zip(workers, seen, strict=True):
            worker.stdin.write("\n")
            worker.stdin.flush()
            line = worker.stdout.readline()
            if not line:
                raise SystemExit(f"{worker.args} ended with {worker.wait()}")
            if i:  # the first round warms caches
                rows.append(json.loads(line))
    for worker in workers:
        worker.stdin.close()
        worker.wait()
    return [{name: statistics.median(r[name] for r in rows) for name in rows[0]} for rows in seen]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--against", type=Path, help="another checkout of the project")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--page-size", type=int, default=PAGE)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        work(args.worker)
        return 0
    checkouts = [ROOT] if args.against is None else [ROOT, args.against.resolve()]
    found = measure(checkouts, args.page_size, args.rounds)
    for name, mine in found[0].items():
        row = f"{name:32}{mine / 1e3:10.2f} us"
        if len(found) > 1:
            row += f"{found[1][name] / 1e3:10.2f} us  x {mine / found[1][name]:.3f}"
        print(row)
    if args.json is not None:
        machine = {"machine": platform.machine(), "python": platform.python_version()}
        report = {"command": sys.argv, **machine, "checkouts": [str(c) for c in checkouts]}
        args.json.write_text(json.dumps({**report, "ns": found}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
