"""Where the time of a public call goes: `python perf/peers/profile_calls.py` (in .venv; needs no SGLang).

Every compiled function that Python calls is wrapped with a clock. What a call takes without the clocks, less
what its compiled functions took, is Python: argument checks, views, numba's unboxing of arguments. Writes
perf/results/cpu/profile.md.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import w_tree
from ours_side import OursSide
from side import SideConfig

RESULTS = Path(__file__).parents[1] / "results" / "cpu" / "profile.md"
COMPILED = {
    "kvcache.keys": ("first_bad_span",),
    "kvcache.requests": ("first_bad_row", "fill_requests"),
    "kvcache.rows": (
        *("first_long", "start_rows", "plan_extend", "set_lens", "catch_up"),
        *("note_inserted", "own_pages", "clear_rows"),
    ),
    "kvcache.device.plan": ("fill_plan",),
    "kvcache.device.data_plane": ("apply_twin", "extend_twin", "advance_twin"),
    "kvcache.tree.radix_tree": (
        *("match_and_note", "still_holds", "admit", "apply_touches", "first_bad_key", "insert"),
        *("unlock", "evict"),
    ),
}


class Clocks:
    """Times what compiled functions take inside the call that is under way."""

    def __init__(self) -> None:
        self.us: dict[str, float] = defaultdict(float)
        self._kept: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Clocks:
        for name, functions in COMPILED.items():
            module = importlib.import_module(name)
            for function in functions:
                self._kept.append((module, function, getattr(module, function)))
                setattr(module, function, self._wrap(function, getattr(module, function)))
        return self

    def __exit__(self, *error: object) -> None:
        for module, name, function in self._kept:
            setattr(module, name, function)
        self._kept.clear()

    def _wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.thread_time_ns()
            result = function(*args)
            self.us[name] += (time.thread_time_ns() - start) / 1e3
            return result

        return call


def calls_of(side: OursSide, tokens: Any, batch: int, timed: Callable[..., None]) -> None:
    """Go once through the calls of a request; `timed(name, call, *args)` calls."""
    rng = np.random.default_rng(int(time.perf_counter_ns()))
    fresh = w_tree.random_tokens(rng, batch, tokens.shape[1])
    fresh[:, : w_tree.SHARED] = tokens[0, : w_tree.SHARED]
    new = 128 + np.arange(batch)
    lens = np.full(batch, w_tree.LEN, np.int64)
    side.load(new, fresh, lens)
    side.match(new)
    side.admit(new)
    timed("extend and advance", side.extend, new, lens)
    timed("finish, 2,048 new tokens", side.finish, new)
    timed("evict that", side.evict, batch * (w_tree.LEN - w_tree.SHARED), 0)
    cached = np.arange(batch)
    side.match(cached)
    timed("match 4,096 cached tokens, hot", side.match, cached)
    timed("admit them", side.admit, cached)
    side.drop(cached)
    timed("evict one tail", side.evict, side.config.page_size, 0)


class Profile:
    """Samples of calls: whole ones, and in other rounds what their compiled functions take."""

    def __init__(self) -> None:
        self._whole: dict[str, list[float]] = defaultdict(list)
        self._parts: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.clocks = Clocks()

    def plain(self, name: str, call: Callable[..., Any], *args: Any) -> None:
        start = time.thread_time_ns()
        call(*args)
        self._whole[name].append((time.thread_time_ns() - start) / 1e3)

    def clocked(self, name: str, call: Callable[..., Any], *args: Any) -> None:
        self.clocks.us.clear()
        call(*args)
        for function, us in self.clocks.us.items():
            self._parts[name][function].append(us)

    def table(self, title: str) -> list[str]:
        lines = [
            f"{title}, us a call (medians):",
            "",
            "| call | whole | Python | compiled functions |",
            "| --- | --: | --: | --- |",
        ]
        for name, samples in self._whole.items():
            inside = {f: statistics.median(us) for f, us in self._parts[name].items()}
            total = statistics.median(samples)
            longest = sorted(inside.items(), key=lambda x: -x[1])
            listed = ", ".join(f"{f} {us:.1f}" for f, us in longest)
            lines.append(
                f"| {name} | {total:.1f} | {total - sum(inside.values()):.1f} | {listed} |"
            )
        return lines


def measure(batch: int, repeats: int) -> list[str]:
    page_size, kept = 64, 128
    tokens_in_all = w_tree.SHARED + (kept + batch) * 2048 + 128 * page_size
    side = OursSide(
        SideConfig(page_size, 128, tokens_in_all, tokens_in_all, 64, kept + 129, w_tree.LEN + 128)
    )
    tokens = w_tree.shared_sequences(np.random.default_rng(0), kept - 1)
    w_tree.prefill(side, tokens, np.arange(kept), w_tree.SHARED)
    profile = Profile()
    for _ in range(repeats):  # in turn: what else the machine does changes
        calls_of(side, tokens, batch, profile.plain)
        with profile.clocks:
            calls_of(side, tokens, batch, profile.clocked)
    return profile.table(f"P = {page_size}, batch of {batch}")


def turns(page_size: int, window: int) -> list[str]:
    """W5, turns 21 to 30 of 64 conversations, 256 tokens a turn: whole calls and clocks in turn."""
    num, more, last = 64, 256, 30
    total = num * (last * more + page_size)
    side = OursSide(
        SideConfig(page_size, window, total, total, num, num, last * more + 2 * page_size)
    )
    tokens = w_tree.random_tokens(np.random.default_rng(5), num, last * more)
    ids, profile = np.arange(num), Profile()
    for turn in range(1, last + 1):
        lens = np.full(num, turn * more, np.int64)
        side.load(ids, tokens, lens)
        timed = profile.plain if turn % 2 else profile.clocked
        with contextlib.nullcontext() if turn % 2 else profile.clocks:
            for name, call in (("match", side.match), ("admit", side.admit)):
                if turn > 20:
                    timed(name, call, ids)
                else:
                    call(ids)
            side.extend(ids, lens)
            side.slide(ids)
            if turn > 20:
                timed("finish", side.finish, ids)
            else:
                side.finish(ids)
    return profile.table(f"W5, turns 21 to 30, P = {page_size}, W = {window}, batch of {num}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    lines = [
        "# Where the time of a call goes",
        "",
        "`.venv/bin/python perf/peers/profile_calls.py`: W = 128. Python is what the call takes less",
        "its compiled functions; in a compiled function's time is the unboxing of its arguments: 0.3 us",
        "and some 0.08 us an array. These are single calls, between which other data went through the",
        "processor's caches: in a loop, on an idle machine, a match of one takes 8 us and one eviction 11.",
        "",
        *measure(1, args.repeats),
        "",
        *measure(64, args.repeats),
        "",
        *turns(64, 128),
        "",
        *turns(1, 128),
    ]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
