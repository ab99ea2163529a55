"""A hybrid transformer served through the manager gives the logits of the same model without a cache.

Every page is full of NaN from the moment it is free until somebody writes it (model_harness.PoisonedCache),
so that a stale read shows. The engine is that of examples/.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from model_harness import EXAMPLES, TOLERANCE, CapturedDecode, Setting, hybrid_model, serve
from model_mutants import MUTANTS
from model_scenarios import SCENARIOS, config, document, draft_layer
from model_storm import Storm

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small: threads would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Case(NamedTuple):
    """A random schedule. Pools in tokens, tiny: five rows of up to 56 tokens want more."""

    page_size: int
    window: int | None
    slack: int = 0
    policy: str = "branch"
    speculative: bool = False  # drafts, a third of them wrong; a draft layer, hence bigram keys
    full: int = 200
    swa: int = 120

    def __str__(self) -> str:
        text = f"P{self.page_size}-W{self.window}-{self.policy}"
        return text + "-slack" * self.slack + "-drafts" * self.speculative


CASES = [
    Case(1, 1),
    Case(1, 3, slack=1, speculative=True),
    Case(1, 100, slack=1, policy="every=7"),
    Case(3, 7),
    Case(4, 2, slack=1),
    Case(4, 4, slack=1, policy="branch,hints"),
    Case(4, 5, slack=1, policy="none"),
    Case(4, 6, speculative=True),
    Case(4, 6, policy="branch,hints,every=8", full=500, swa=300),
    Case(4, 8, policy="branch,hints,every=12", speculative=True),
    Case(4, 100),
    Case(4, None),
    Case(16, 8, policy="hints", full=320, swa=240),
    Case(16, 16, slack=1, speculative=True, full=320, swa=240),
    Case(16, 24, full=400, swa=320),
    Case(16, None, speculative=True, full=320),
]


@pytest.mark.parametrize(("seed", "case"), list(enumerate(CASES)), ids=str)
def test_random_schedules_give_the_logits_of_the_model_without_a_cache(
    seed: int, case: Case
) -> None:
    s = Setting(
        config(
            case.page_size,
            case.window,
            window_slack=case.slack,
            policy=case.policy,
            full=case.full,
            swa=case.swa,
            bigram=case.speculative,
            max_len=64,
        ),
        draft=case.speculative,
        adapters=2,
        pairs=1 if case.speculative else 2,
        propose=(lambda request: []) if case.speculative else None,
    )
    storm = Storm(s, seed, most=56, hints="hints" in case.policy)
    storm.run(150)
    s.assert_exact()
    s.assert_all_pages_come_back()
    happened = {name for name, count in storm.counts.items() if count}
    wanted = {"finished", "aborted", "reused", "retractions", "follow", "commit", "evicted Full"}
    wanted |= {"drafts", "accepted"} if case.speculative else set()
    wanted |= {"evicted SWA"} if case.window else set()
    assert wanted <= happened


@pytest.mark.parametrize(
    ("seed", "page_size", "window", "bigram"),
    [(20, 4, 6, False), (21, 1, 5, True), (22, 4, None, False)],
)
def test_captured_decode_steps_give_the_logits_of_the_model_without_a_cache(
    seed: int, page_size: int, window: int | None, bigram: bool
) -> None:
    s = Setting(config(page_size, window, full=200, swa=120, bigram=bigram, max_len=64), adapters=2)
    storm = Storm(s, seed, most=56, captured=CapturedDecode(s))
    storm.run(100)
    s.assert_exact()
    s.assert_all_pages_come_back()
    assert storm.counts["captured"] > 5


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_gives_the_logits_of_the_model_without_a_cache(name: str) -> None:
    s = SCENARIOS[name]()
    s.assert_as_found()
    s.assert_exact()
    s.manager.check()
    s.engine.run()
    s.assert_all_pages_come_back()


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_fault_shows_in_the_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name].plant(monkeypatch)
    s = SCENARIOS[MUTANTS[name].scenario]()
    with pytest.raises(AssertionError, match="differ from the model without a cache"):
        s.assert_exact()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("slack", [0, 1])
@pytest.mark.parametrize("window", [2, 4, 6, 16, 21])
def test_a_hit_reads_the_window_before_it_and_no_more(
    window: int, slack: int, page_size: int
) -> None:
    """One token of the cached prefix is spoilt: the logits show it exactly if a query looks back so far."""
    hit = 32
    for spoilt in (hit - window, hit - window + 1, hit - 1):
        s = Setting(config(page_size, window, window_slack=slack), pairs=1)
        s.serve(document(0, hit + 1))
        request = s.start(document(0, hit + 1))
        assert s.engine.computed(request) == hit
        (row,) = s.manager.index([request.row])
        page = s.manager.pools.page_table[row, spoilt // page_size].long()
        slot = page * page_size + spoilt % page_size
        s.cache._kv.sliding[:, :, s.manager.translate(slot.reshape(1)).long()] += 1.0
        s.engine.decode([request])
        if spoilt > hit - window:
            with pytest.raises(AssertionError, match="differ from the model"):
                s.assert_exact()
        else:
            s.assert_exact()


def test_a_free_page_that_is_written_is_noticed() -> None:
    s = Setting(config())
    s.cache._kv.full[:, :, 5 * 4] = 0.0
    with pytest.raises(AssertionError, match="a free Full page was written"):
        s.cache.flush()


def test_plain_keys_are_wrong_for_a_layer_whose_kv_depends_on_the_next_token() -> None:
    """Two prompts part at a page edge: the last page before it holds KV of the other one's next token.

    tokens    ... 12 13 14 15 | 16         KV of the draft layer at 15 depends on token 16
    plain     hit [0, 16): position 15 is wrong
    bigram    hit [0, 12): unit 15 is (token 15, token 16)
    """
    s = draft_layer(bigram=False)
    s.assert_as_found()
    with pytest.raises(AssertionError, match=r"\(draft\) from 16 differ from the model"):
        s.assert_exact()
    for request in s.requests:
        request.trace = [(start, logits, None) for start, logits, _ in request.trace]
    s.assert_exact()


@pytest.mark.parametrize("chunk", [2, 5, 16, 64])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_chunks_of_any_size_give_the_same_tokens(page_size: int, chunk: int) -> None:
    s = Setting(config(page_size, 6), chunk=chunk, pairs=1)
    first, second = s.serve(document(0, 45), 6), s.serve(document(0, 45) + document(1, 7), 6)
    s.assert_exact()
    assert second.tokens[:45] == first.tokens[:45]
    assert s.reused(second) > 0


@pytest.mark.parametrize("seed", [0, 1])
def test_scheduler_under_pressure_finishes_everything(seed: int) -> None:
    """The engine's own loop: admission by capacity, retraction of the youngest, smaller chunks, resume."""
    s = Setting(config(full=100, swa=60), adapters=2, chunk=32)
    for i in range(8):
        prompt = document(seed, 30)[: 10 + 2 * i] + document(100 + i, 12)
        s.submit(prompt, 16, adapter=i % 2, seed=seed)
    s.engine.run()
    assert {r.state for r in s.requests} == {"finished"}
    assert s.engine.num_retractions > 0
    s.assert_exact()
    s.assert_all_pages_come_back()


def test_request_that_never_fits_is_refused_and_those_behind_it_run() -> None:
    s = Setting(config(full=32, swa=32))
    for prompt in (document(0, 50), document(1, 12)):
        s.submit(prompt, 4)
    s.engine.run()
    assert [r.state for r in s.requests] == ["refused", "finished"]
    s.assert_exact()
    s.assert_all_pages_come_back()


def test_example_serves_and_compares(capsys: pytest.CaptureFixture[str]) -> None:
    serve.main(["--requests", "10"])
    out = capsys.readouterr().out
    error = re.search(r"without a cache: (\S+)", out)
    assert error is not None, out
    assert float(error[1]) < TOLERANCE
    assert "10 of 10 requests finished" in out
    assert "all pages free again: True" in out


def test_dense_model_sees_the_window_and_nothing_else() -> None:
    """The reference itself: with one pair of layers, a token beyond the window changes nothing through it."""
    positions = torch.arange(7)
    visible = hybrid_model.visible_keys(positions, positions, 3)
    assert visible.sum(-1).tolist() == [1, 2, 3, 3, 3, 3, 3]
    assert visible[6].tolist() == [False] * 4 + [True] * 3


def _excerpts() -> list[Any]:
    page = (ROOT / "docs" / "engine.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    assert blocks
    return blocks


@pytest.mark.parametrize("block", _excerpts(), ids=lambda block: block.split("(")[0].split()[-1])
def test_documentation_quotes_the_example(block: str) -> None:
    source = "".join((EXAMPLES / f"{name}.py").read_text() for name in ("serve", "paged_attention"))
    assert any(textwrap.indent(block, " " * depth) in source for depth in (0, 4, 8, 12))
