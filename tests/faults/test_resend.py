"""An identical prompt that is sent again: it leaves its last token off, and still finds a whole window."""

from __future__ import annotations

import pytest
from by_hand import ByHand, run_of


@pytest.mark.parametrize("bigram", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 16, 64, 256])
@pytest.mark.parametrize("window", [1, 6, 128])
def test_the_second_identical_prompt_reuses_all_but_its_last_unit(
    page_size: int, window: int, bigram: bool
) -> None:
    near = {page_size * k + d for k in (1, 2, 3, 5) for d in (-1, 0, 1, 2)} | {window, window + 1}
    for length in sorted(n for n in near if n >= 2):
        cache = ByHand(page_size, window, bigram=bigram, full_pages=2000, swa_pages=2000)
        prompt = run_of(1, length)
        units = length - 1 if bigram else length
        again = (units - 1) // page_size * page_size
        reused = [cache.put(prompt) for _ in range(3)]
        assert reused == [0, again, again], (page_size, window, bigram, length)


@pytest.mark.parametrize("checkpoints", ["branch", "hints", "every=12", "branch,hints,every=20"])
def test_a_prompt_comes_again_beside_other_checkpoints(checkpoints: str) -> None:
    cache = ByHand(4, 8, checkpoints=checkpoints)
    prompt = run_of(1, 40)
    assert [cache.put(prompt, hints=[16]) for _ in range(3)] == [0, 36, 36]
    assert cache.match(prompt) == (40, 40, None)
    cache.drain()


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_prompt_comes_again_after_its_answer_was_decoded(page_size: int) -> None:
    cache = ByHand(page_size, 8)
    prompt, answer = run_of(1, 40), run_of(2, 30)
    row = cache.start(prompt)
    cache.compute(row, 40)
    cache.commit(row, prompt)
    for n in range(41, 71):
        cache.m.step([row])
        cache.m.advance([row])
        cache.slide(row)
        assert cache.index(row) == 0
        del n
    cache.finish(row, prompt + answer)
    assert cache.match(prompt[:-1])[1] == (40 - 1) // page_size * page_size
    assert cache.match((prompt + answer)[:-1])[1] == (70 - 1) // page_size * page_size
