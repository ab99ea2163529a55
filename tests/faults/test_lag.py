"""One step behind: an overlapped scheduler learns of a token one step after it was computed."""

from __future__ import annotations

import random

import pytest
from by_hand import ByHand, run_of

from kvcache import KeyBatch


@pytest.mark.parametrize("call", ["commit", "retract", "finish"])
def test_what_the_host_does_not_know_yet_is_handed_over_later(call: str) -> None:
    cache = ByHand(4, 8)
    known = run_of(1, 10)
    row = cache.start(known)
    cache.compute(row, 10)
    cache.m.step([row])
    cache.m.advance([row])  # 11 are computed, the host knows 10
    getattr(cache.m, call)([row], KeyBatch.pack([known]))
    cache.m.check()
    assert cache.match(known) == (8, 8, None)
    if call == "commit":
        cache.finish(row, [*known, 7, 8])
        assert cache.match([*known, 7, 8]) == (8, 8, None)  # the 12th was never computed


@pytest.mark.parametrize("bigram", [False, True])
def test_a_key_shorter_than_the_prefix_hands_over_nothing(bigram: bool) -> None:
    cache = ByHand(4, 8, bigram=bigram)
    key = run_of(1, 33)
    cache.put(key)
    row = cache.start(key)
    cache.compute(row, 33)
    for length in (0, 1, 5, 8):
        assert cache.commit(row, key[:length]) == (28 if bigram else 32)
    cache.finish(row, key[:9])
    assert cache.match(key)[0] >= 28


def test_a_stop_token_that_is_found_a_step_late_is_a_shorter_key() -> None:
    """Three tokens were computed behind the stop; they are freed, nobody can hit them."""
    cache = ByHand(1, 4)
    key = run_of(1, 12)
    row = cache.start(key)
    cache.compute(row, 12)
    for _ in range(3):
        cache.m.step([row])
        cache.m.advance([row])
        cache.slide(row)
    cache.finish(row, key)
    assert cache.match([*key, 1, 2, 3])[0] == 12
    cache.drain()


class LaggingEngine:
    """Knows of the tokens of a step only after the next one was launched; verifies drafts."""

    def __init__(self, seed: int, page_size: int, window: int, bigram: bool) -> None:
        self.rng = random.Random(seed)
        pages = 480 // page_size
        self.cache = ByHand(
            page_size, window, bigram=bigram, full_pages=pages, swa_pages=pages * 3 // 4
        )
        self.truth: dict[int, list[int]] = {}  # all tokens, by row
        self.seen: dict[int, int] = {}  # how many of them the host knows

    def begin(self, name: int) -> None:
        text = run_of(name % 3, self.rng.randint(6, 40)) + run_of(10 + name, 3)
        row = self.cache.start(text)
        self.cache.compute(row, len(text))
        self.truth[row], self.seen[row] = text, len(text)

    def step(self) -> None:
        """Launch a step of 1 + drafts tokens, some of which are rejected; then learn of the step before."""
        rows = [*self.truth]
        m = self.cache.m
        learned = {row: len(self.truth[row]) for row in rows}
        base = m.rows.computed_len[m.index(rows)].tolist()
        drafts = self.rng.randint(0, 3)
        m.extend(rows, [n + 1 + drafts for n in base])
        taken = [n + self.rng.randint(1, 1 + drafts) for n in base]
        m.advance(rows, taken)
        for row, n in zip(rows, taken, strict=True):
            new = n - len(self.truth[row])
            self.truth[row] += [self.rng.randrange(50) for _ in range(new)]
        m.slide(rows)
        m.check()
        self.seen.update(learned)

    def known(self, row: int) -> list[int]:
        return self.truth[row][: self.seen[row]]


@pytest.mark.parametrize("bigram", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_an_engine_that_always_lags_by_one_step(seed: int, page_size: int, bigram: bool) -> None:
    engine = LaggingEngine(seed, page_size, 6, bigram)
    cache, rng = engine.cache, engine.rng
    for name in range(40):
        if len(engine.truth) < 4:
            engine.begin(name)
        for _ in range(rng.randint(1, 4)):
            engine.step()
        for row in [*engine.truth]:
            known = engine.known(row)
            assert len(known) <= int(cache.m.rows.computed_len[cache.index(row)])
            what = rng.choice(["commit", "commit", "finish", "retract", "none"])
            if len(engine.truth[row]) > 60:
                what = "finish"
            if what == "commit":
                cache.commit(row, known)
            elif what == "finish":
                cache.finish(row, known)
                units = len(known) - bigram
                # whole pages of what the host knew are there; nothing of what it did not
                assert cache.match(engine.truth[row])[0] == units // page_size * page_size
                del engine.truth[row]
            elif what == "retract":
                found = cache.m.retract([row], KeyBatch.pack([known]))
                assert found.full_hit_len[0] == (len(known) - bigram) // page_size * page_size
                del engine.truth[row]
    cache.drain()
