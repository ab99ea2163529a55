"""W4 out-of-window pass, W5 conversations, W6 shared prompts, W7 a scheduler step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from makers import Makers
from side import Ints, Side, SideConfig
from timing import Bench
from w_tree import random_tokens


def start(side: Side, ids: Ints, lens: Ints) -> None:
    side.match(ids)
    side.admit(ids)
    side.extend(ids, lens)


def slide(bench: Bench, make: Makers) -> None:
    """W4: 256 running requests, each of which has one page that fell out of the window."""
    rng = np.random.default_rng(4)
    page, running = bench.page_size, 256
    passes = bench.repeats(8, 3)
    prompt = bench.window + 4 * 64
    longest = prompt + (passes + 2) * page
    total = running * (longest + page)
    sides = make(SideConfig(page, bench.window, total, total, running, running, longest + page))
    tokens = random_tokens(rng, running, longest)
    ids = np.arange(running)
    lens = np.full(running, prompt, np.int64)
    for side in sides:
        side.load(ids, tokens, np.full(running, longest))
        start(side, ids, lens)
        side.slide(ids)
    for _ in range(passes):
        lens = lens + page
        for side in sides:
            side.extend(ids, lens)
            bench.time("W4 out-of-window pass, 256 requests", side, running, side.slide, ids)


def conversations(bench: Bench, make: Makers) -> None:
    """W5: every turn adds 256 tokens; a turn is match, admit, finish. SGLang: 16 of the conversations."""
    rng = np.random.default_rng(5)
    turns, more = 30, 256
    num, loop = (64, 4) if bench.quick else (200, 16)
    for size, make_some in ((num, make.batched), (num if bench.full else loop, make.looping)):
        length = turns * more
        total = size * (length + bench.page_size)
        sides = make_some(
            SideConfig(
                bench.page_size,
                bench.window,
                total,
                total,
                64,
                size,
                length + 2 * bench.page_size,
            )
        )
        tokens = random_tokens(rng, size, length)
        for turn in range(1, turns + 1):
            lens = np.full(size, turn * more, np.int64)
            timed = turn in (1, 10, 20, 30)
            for side in sides:
                side.load(np.arange(size), tokens, lens)
                for first in range(0, size, 64):
                    ids = np.arange(first, min(first + 64, size))
                    _turn(bench, side, ids, lens[ids], f"W5 turn {turn}" if timed else "")


def _turn(bench: Bench, side: Side, ids: Ints, lens: Ints, case: str) -> None:
    def do(op: str, call: Callable[[Ints], None]) -> None:
        if case:
            bench.time(f"{case}, {op}", side, ids.size, call, ids)
        else:
            call(ids)

    do("match", side.match)
    do("admit", side.admit)
    side.extend(ids, lens)
    side.slide(ids)
    do("finish", side.finish)


def shared_prompts(bench: Bench, make: Makers) -> None:
    """W6: eight system prompts, unique questions, pools that hold a fraction of it: who hits more?"""
    rng = np.random.default_rng(6)
    page = bench.page_size
    num, at_a_time = (96, 8) if bench.quick else (400, 8)
    system, question, answer = 2048, 512, 64
    length = system + question + answer
    live = at_a_time * (length + 2 * page)
    sides = make(
        SideConfig(
            page,
            bench.window,
            full_tokens=4 * system + live + 30 * (question + answer) // page * page,
            swa_tokens=live + 12 * max(bench.window, page) // page * page,
            max_running=at_a_time,
            max_requests=num,
            max_len=length + 2 * page,
        )
    )
    prompts = random_tokens(rng, 8, system)
    tokens = random_tokens(rng, num, length + 1)
    tokens[:, :system] = prompts[np.minimum(rng.zipf(1.3, num) - 1, 7)]
    hits = {}
    for side in sides:
        hits[side.name] = 0
        side.load(np.arange(num), tokens, np.full(num, length))
    for first in range(0, num, at_a_time):
        ids = np.arange(first, min(first + at_a_time, num))
        for side in sides:
            bench.time("W6 shared prompt, whole request", side, ids.size, _whole, side, ids, hits)
    asked = num * (length - 1)
    for name, tokens_hit in hits.items():
        bench.notes[f"W6 hit rate, {name}"] = tokens_hit / asked


def _whole(side: Side, ids: Ints, hits: dict[str, int]) -> None:
    side.match(ids)
    hits[side.name] += int(side.matched(ids).reuse.sum())
    side.admit(ids)
    lens = np.full(ids.size, 2048 + 512, np.int64)
    side.extend(ids, lens)
    side.commit(ids)
    side.extend(ids, lens + 64)
    side.slide(ids)
    side.finish(ids)


def scheduler(bench: Bench, make: Makers) -> None:
    """W7: 256 running requests; a step admits 8, decodes all, ends 8. The pool is full, so it evicts too."""
    rng = np.random.default_rng(7)
    page, running, some = bench.page_size, 256, 8
    life = running // some
    shared, own = 1024, 512
    if bench.window > shared:
        own = 1024
    prompt, length = shared + own, shared + own + life + 1
    warm, steps = life + 8, bench.repeats(16, 4)
    num = (warm + steps + 1) * some
    live = (running + 2 * some) * (length - shared + page)
    sides = make(
        SideConfig(
            page,
            bench.window,
            full_tokens=(shared + live + 8 * some * own) // page * page,
            swa_tokens=(shared + live + 8 * some * own) // page * page,
            max_running=running + some,
            max_requests=num,
            max_len=length + 2 * page,
        )
    )
    tokens = random_tokens(rng, num, length)
    tokens[:, :shared] = tokens[0, :shared]
    ids = np.arange(num)
    for side in sides:
        side.load(ids, tokens, np.full(num, prompt))
    # sides take turns of four steps: a scheduler's steps follow one another
    for first in range(0, warm + steps, 4):
        for side in sides:
            for step in range(first, first + 4):
                new = ids[step * some : (step + 1) * some]
                old = ids[max(step - life, 0) * some : max(step - life + 1, 0) * some]
                old = old if step >= life else ids[:0]
                running_now = ids[max(step - life, 0) * some : (step + 1) * some]
                args = side, new, running_now, old, prompt
                if step < warm:
                    _step(*args)
                else:
                    bench.time("W7 scheduler step", side, 1, _step, *args)


def _step(side: Side, new: Ints, running: Ints, old: Ints, prompt: int) -> None:
    side.match(new)
    side.admit(new)
    side.extend(new, np.full(new.size, prompt, np.int64))
    side.commit(new)
    side.tick(running)
    side.step(running)
    if old.size:
        side.finish(old)
