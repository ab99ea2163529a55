"""All sides find the same: full hit, boundary and branching of every match of a random engine run.

The caches have policies of their own, so the run keeps to what they share:

- A request that finds a fork is computed up to it first, and committed there: SGLang gives up the rest of a
  chunk for the fork, we keep both windows.
- SGLang keeps a page more than a window where a commit ends on a page boundary (a token, at P = 1). Forks are
  therefore a multiple of four pages (tokens) into a key, and other lengths are not right behind one.
- Pools are large; what is evicted is all that no request holds. Which of two tails goes first is policy
  (SGLang evicts whole nodes).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from makers import Makers
from side import Ints, Side, SideConfig, Tokens


@dataclass
class Tally:
    """What a run was made of."""

    matches: int = 0
    forks: int = 0
    partial: int = 0  # full hits that reach past what can be reused
    evictions: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Disagreement(AssertionError):
    """Two sides found different lengths for one request."""


def _compare(sides: list[Side], ids: Ints, tally: Tally) -> tuple[Ints, Ints]:
    found = [side.matched(ids) for side in sides]
    for side, other in zip(sides[1:], found[1:], strict=True):
        for name, ours, theirs in zip(found[0]._fields, found[0], other, strict=True):
            if not np.array_equal(ours, theirs):
                raise Disagreement(
                    f"{name}: {sides[0].name} {ours.tolist()}, {side.name} {theirs.tolist()}"
                )
    tally.matches += ids.size
    tally.forks += int((found[0].branch >= 0).sum())
    tally.partial += int((found[0].reuse > 0).sum())
    return found[0].reuse, found[0].branch


def check(make: Makers, page_size: int, window: int, *, requests: int, seed: int) -> Tally:
    """Run a random engine on all sides at once; raise Disagreement at the first difference."""
    rng = np.random.default_rng(seed)
    unit = 4 * page_size
    longest = 6 * max(window, unit) // unit * unit + 8 * unit
    width = longest + 64 + page_size
    total = requests * width // page_size * page_size
    sides = make(SideConfig(page_size, window, total, total, 8, requests, width))
    tokens = rng.integers(1, 50_000, (requests, width)).astype(np.int32)
    spare = 0 if page_size == 1 else int(rng.integers(1, page_size))
    tally = Tally()
    done = 0
    while done < requests:
        ids = np.arange(done, min(done + int(rng.integers(1, 7)), requests))
        _choose_keys(rng, tokens, ids, done, longest // unit, unit)
        prompt = rng.integers(2, longest // unit, ids.size) * unit + spare
        answer = (
            rng.integers(0, 40, ids.size) if page_size > 1 else rng.integers(0, 10, ids.size) * 4
        )
        for side in sides:
            side.load(ids, tokens[ids], prompt + 1)
        _live(rng, sides, ids, prompt, answer, unit, tally)
        done += ids.size
        if rng.random() < 0.15:
            for side in sides:
                side.evict(total, 0)
            tally.evictions += 1
    return tally


def _choose_keys(
    rng: np.random.Generator, tokens: Tokens, ids: Ints, done: int, units: int, unit: int
) -> None:
    """Have each new key repeat an old one up to a fork, mostly."""
    for i in ids.tolist():
        if done > 0 and rng.random() < 0.9:
            old = int(rng.integers(max(done - 40, 0), done))
            fork = int(rng.integers(0, units)) * unit
            tokens[i, :fork] = tokens[old, :fork]


def _live(
    rng: np.random.Generator,
    sides: list[Side],
    ids: Ints,
    prompt: Ints,
    answer: Ints,
    unit: int,
    tally: Tally,
) -> None:
    """Admit a batch, prefill it in chunks, decode, finish; requests of a batch run together."""
    for side in sides:
        side.match(ids)
    reuse, branch = _compare(sides, ids, tally)
    for side in sides:
        side.admit(ids)
    at = reuse.copy()
    forks = branch > 0
    if forks.any():
        chosen = ids[forks]
        at[forks] = branch[forks]
        _to(sides, chosen, at[forks])
    spare = prompt % unit
    most = max(3 * sides[0].config.window // unit, 8)  # up to three windows: forks need gaps
    while (at < prompt).any():
        chunk = rng.integers(1, most, ids.size) * unit
        behind = at < prompt
        at = np.where(behind, np.minimum(at // unit * unit + chunk + spare, prompt), at)
        _to(sides, ids[behind], at[behind])
        if rng.random() < 0.05:
            for side in sides:
                side.evict(1 << 30, 0)
            tally.evictions += 1
    grown = prompt + answer
    for side in sides:
        side.extend(ids, grown)
        side.slide(ids)
        side.finish(ids)


def _to(sides: list[Side], ids: Ints, lens: Ints) -> None:
    for side in sides:
        side.extend(ids, lens)
        side.commit(ids)
