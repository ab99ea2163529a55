"""Small schedules with one difficulty each. Each returns its Setting; the tests compare the logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from model_harness import Setting, hybrid_model, model_runner

from kvcache import CacheConfig, Lru, StaleMatchError, parse_checkpoints

PAGE_SIZE = 4


def config(
    page_size: int = PAGE_SIZE,
    window: int | None = 8,
    *,
    full: int = 400,
    swa: int = 200,
    policy: str = "branch",
    **kwargs: Any,
) -> CacheConfig:
    """A config whose pools are given in tokens."""
    return CacheConfig(
        page_size=page_size,
        window=window,
        full_pages=-(-full // page_size),
        swa_pages=0 if window is None else -(-swa // page_size),
        checkpoints=parse_checkpoints(policy),
        **{"max_rows": 5, "max_len": 96} | kwargs,
    )


def document(seed: int, length: int) -> list[int]:
    """Random tokens of the model's vocabulary."""
    return np.random.default_rng(seed).integers(0, 32, length).tolist()


def _reused(s: Setting) -> list[int]:
    return [s.reused(r) for r in s.requests]


def long_decode() -> Setting:
    """One request decodes through many windows; the SWA pool holds little more than one."""
    s = Setting(config(swa=24))
    s.serve(document(0, 10), 40)
    s.found("state", s.requests[0].state, "finished")
    return s


def branching() -> Setting:
    """B forks where no window is left and computes it; C, at the same fork, finds B's window."""
    s = Setting(config(), chunk=48)
    trunk = document(0, 40)
    s.serve(trunk)
    b = s.serve(trunk[:24] + document(1, 10), 3)
    before = s.manager.stats()
    c = s.serve(trunk[:24] + document(2, 10), 3)
    s.found("A and B compute all, C only its end", _reused(s), [0, 0, 24])
    s.found("B's fork", (b.match.full_hit_len[0], b.match.branch_len[0]), (24, 24))
    s.found("C's fork", (c.match.reuse_len[0], c.match.branch_len[0]), (24, -1))
    more = s.manager.stats().tree_full_pages - before.tree_full_pages
    s.found("C's pages below the trunk", more, (34 + 3 - 1) // 4 - 6)
    return s


def adoption() -> Setting:
    """A window that B recomputed goes under the tree's Full pages, which A's next turn reads."""
    s = Setting(config(policy="none"), chunk=48)
    trunk = document(3, 40)
    s.serve(trunk)
    b = s.start(trunk[:24], 2)
    rows = np.array([b.row], np.int64)
    s.cache.extend(rows, [24])
    s.engine.runner.forward([model_runner.Chunk(b, 0, 24)])
    s.cache.advance(rows)
    table, swa_map = s.manager.pools.page_table[s.manager.index(rows)[0]], s.manager.pools.swa_map
    computed = swa_map[table[3:6].long()].clone()
    own = table[:6].clone()
    s.engine.commit([b])
    s.found("B's row names pages of its own", bool(torch.isin(table[:6], own).any()), False)
    adopted = swa_map[table[:6].long()].tolist()
    # the windows before 20, where the same key comes again, and before 24
    s.found("SWA pages under the tree's Full pages", adopted, [0, 0, 0, *computed.tolist()])
    s.engine.run()
    s.serve(trunk[:24] + document(4, 9), 4)
    s.found("the next request reuses what B put there", _reused(s), [0, 0, 24])
    return s


def checkpoints() -> Setting:
    """Hints and periodic checkpoints keep windows inside one commit; requests fork at each."""
    s = Setting(config(policy="hints,every=10"), chunk=64)
    trunk = document(6, 44)
    s.serve(trunk, hints=[26, 27])
    # every 10, floored: 8, 20, 28, 40; hints: 24; the end: 44
    for fork, reuse in ((11, 8), (22, 20), (27, 24), (31, 28), (39, 28), (42, 40)):
        request = s.submit(trunk[:fork] + document(70 + fork, 5), 2)
        s.engine.admit()
        s.found(f"reused at a fork at {fork}", s.engine.computed(request), reuse)
        s.engine.prefill([request], [len(request.tokens)])
        # handing nothing over leaves the trunk's windows as they are
        s.engine.abort([request])
    return s


def same_prefix_at_once() -> Setting:
    """Two requests compute the same prompt side by side; the second's copy is freed, its row repointed."""
    s = Setting(config(), chunk=64)
    prompt = document(5, 26)
    pair = [s.submit(prompt, 8, seed=i) for i in range(2)]
    s.engine.admit()
    s.engine.prefill(pair, [14, 12])
    s.engine.prefill(pair, [26, 26])
    rows = s.manager.index([r.row for r in pair])
    a, b = (s.manager.pools.page_table[row, :6].tolist() for row in rows)
    s.found("both rows name the tree's pages", a, b)
    s.found("each owns its unfinished page", s.manager.stats().row_full_pages, 2)
    s.engine.run()
    return s


def rejected_drafts() -> Setting:
    """Drafts of which 0 to 4 come true, from each offset in a page; then somebody reuses the result."""
    s = Setting(config(), propose=lambda request: [], pairs=1)
    for offset in range(4):
        for right in range(5):
            prompt = document(100 + 5 * offset + right, 8 + offset)
            request = s.start(prompt, 9)
            s.engine.prefill([request], [len(prompt)])
            truth = _continuation(s, request, 5)
            wrong = [(token + 1) % 32 for token in truth[right:]]
            drafts = (truth[:right] + wrong)[:4]
            s.engine.verify([request], [drafts])
            s.found("computed", s.engine.computed(request), len(prompt) + 1 + right)
            s.engine.commit([request])
            s.engine.decode([request])
            s.engine.verify([request], [[0, 0, 0]])
            s.engine.finish([request])
            # the last token has no KV, and a key leaves off one more
            follower = s.serve([*request.tokens, 0, 0])
            s.found("reused", s.reused(follower), (len(request.tokens) - 1) // 4 * 4)
    return s


def _continuation(s: Setting, request: Any, num: int) -> list[int]:
    tokens = list(request.tokens)
    for _ in range(num):
        logits, _ = hybrid_model.dense_logits(s.model, tokens, request.adapter)
        tokens.append(model_runner.sample(logits[-1], request.seed, len(tokens)))
    return tokens[len(request.tokens) :]


def retraction() -> Setting:
    """A request loses its pages in mid decode and goes on, with all, some or none of them cached."""
    s = Setting(config(retention=Lru()), pairs=1)
    resumed = {}
    for seed, lost in enumerate([(0, 0), (1, 0), (2, 0), (0, 1), (0, 2), (100, 100)]):
        s.cache.flush()
        request = s.start(document(20 + seed, 17), 20)
        s.engine.prefill([request], [17])
        for _ in range(6):
            s.engine.decode([request])
        s.engine.retract([request])
        s.cache.evict(*lost)
        s.engine.run()
        resumed[lost] = request.trace[7][0]
    # windows stood at 16 and at 20, [8, 16) and [12, 20); the older page goes first
    s.found("resumed", list(resumed.values()), [20, 16, 0, 20, 0, 0])
    return s


def adapters() -> Setting:
    """The same prompt under two adapters and a salt: KV of one is wrong for the other."""
    s = Setting(config(), adapters=2)
    prompt = document(30, 25)
    for adapter, salt in ((0, None), (1, None), (0, "a"), (1, None), (0, "a"), (0, None)):
        s.serve(prompt, 3, adapter=adapter, salt=salt)
    s.found("reused", _reused(s), [0, 0, 0, 24, 24, 24])
    return s


def evicted_since_the_match() -> Setting:
    """What a match found is evicted and overwritten before the request is admitted."""
    s = Setting(config(full=64, swa=64))
    prompt = document(40, 33)
    s.serve(prompt)
    request = s.submit(prompt + document(41, 5), 2)
    batch = s.engine._look_up([request])
    s.found("matched", batch.reuse_len.tolist(), [32])
    s.cache.flush()
    other = s.submit(document(42, 40), 2)
    s.engine.start(s.engine._look_up(s.engine.waiting), [1])
    s.engine.prefill([other], [40])
    with pytest.raises(StaleMatchError):
        s.engine.start(batch, [0])
    s.engine.run()
    return s


def eviction_beside_a_reader() -> Setting:
    """All that can be evicted is, between a request's admission and its first forward."""
    s = Setting(config())
    prompt = document(50, 33)
    s.serve(prompt)
    s.serve(document(51, 20))
    request = s.start(prompt + document(52, 5), 4)
    s.cache.evict(1000, 1000)
    s.found("what is locked stays", s.manager.stats().tree_full_pages, 8)
    s.engine.run()
    s.found("reused", s.reused(request), 32)
    return s


def draft_layer(*, bigram: bool) -> Setting:
    """Prompts that part at each offset of a page, with a layer whose KV depends on the next token."""
    s = Setting(config(bigram=bigram), draft=True)
    trunk = document(60, 24)
    s.serve(trunk, 2)
    for fork in range(13, 21):
        other = [(trunk[fork] + 1) % 32, *document(61 + fork, 6)]
        request = s.serve(trunk[:fork] + other, 2)
        hit = int(request.match.full_hit_len[0])
        s.found(f"hit of a fork at {fork}", hit, (fork - bigram) // 4 * 4)
    return s


SCENARIOS = {
    "long_decode": long_decode,
    "branching": branching,
    "adoption": adoption,
    "checkpoints": checkpoints,
    "same_prefix_at_once": same_prefix_at_once,
    "rejected_drafts": rejected_drafts,
    "retraction": retraction,
    "adapters": adapters,
    "evicted_since_the_match": evicted_since_the_match,
    "eviction_beside_a_reader": eviction_beside_a_reader,
    "draft_layer": lambda: draft_layer(bigram=True),
}
