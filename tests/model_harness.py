"""Runs the examples' engine under poison and compares its logits with the model that has no cache."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import torch

from kvcache import CacheConfig, CapacityError, InvalidInputError, KVCacheManager

EXAMPLES = Path(__file__).parents[1] / "examples"
# float64: what batching and chunking change in the order of sums is about 1e-15
TOLERANCE = 1e-9


def _load(name: str) -> ModuleType:
    """Import an example by path, under the name by which the examples import each other."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


hybrid_model = _load("hybrid_model")
paged_attention = _load("paged_attention")
model_runner = _load("model_runner")
serve = _load("serve")

# calls that move pages or lengths
_CALLS = (
    *("admit", "extend", "step", "advance", "slide", "commit", "finish", "retract", "abort"),
    *("evict", "flush", "drop_namespace"),
)


class PoisonedCache:
    """A manager whose pages hold NaN from the moment they are free until somebody writes them again.

    After each call, by the free stacks: KV of all pages that became free. After `extend` and `step`: KV of
    the pages that rows were given, which may have been evicted in the same call. After `advance`: KV beyond
    the computed length. Always: page 0. Before each call: that nobody wrote to a free page.
    """

    def __init__(self, cache: KVCacheManager, kv: Any) -> None:
        self._cache, self._kv = cache, kv
        config = cache.config
        self._free = [np.zeros(n + 1, np.bool_) for n in (config.full_pages, config.swa_pages)]
        self._poison_free()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._cache, name)
        if name not in _CALLS:
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            self._assert_free_pages_untouched(name)
            held = -(-self._cache.rows.allocated_len // self._cache.config.page_size)
            result = value(*args, **kwargs)
            if name in ("extend", "step"):
                self._poison_new(np.asarray(args[0]), held)
            if name == "advance":
                self._poison_beyond(np.asarray(args[0]))
            self._poison_free()
            return result

        return call

    def _pools(self) -> list[torch.Tensor]:
        """[layers * 2, pages, P, values] of the Full and the SWA pool."""
        page_size = self._cache.config.page_size
        pools = (self._kv.full, self._kv.sliding)
        return [x.flatten(0, 1).flatten(2).unflatten(1, (-1, page_size)) for x in pools]

    def _poison_free(self) -> None:
        pools = self._cache.pools
        tops = pools.tops.tolist()
        for i, (kv, stack) in enumerate(
            zip(self._pools(), (pools.full_stack, pools.swa_stack), strict=True)
        ):
            free = np.zeros_like(self._free[i])
            free[stack[: tops[i]].numpy()] = True
            fresh = np.flatnonzero(free & ~self._free[i])
            kv[:, torch.from_numpy(np.append(fresh, 0))] = torch.nan
            self._free[i] = free

    def _poison_new(self, rows: np.ndarray, held: np.ndarray) -> None:
        pools, page_size = self._cache.pools, self._cache.config.page_size
        full, swa = self._pools()
        for row in rows.tolist():
            end = -(-int(self._cache.rows.allocated_len[row]) // page_size)
            pages = pools.page_table[row, int(held[row]) : end].long()
            full[:, pages] = torch.nan
            if self._cache.config.has_swa:
                swa[:, pools.swa_map[pages].long()] = torch.nan

    def _poison_beyond(self, rows: np.ndarray) -> None:
        pools, page_size, lens = self._cache.pools, self._cache.config.page_size, self._cache.rows
        full, swa = (x.flatten(1, 2) for x in self._pools())
        for row in rows.tolist():
            at = torch.arange(int(lens.computed_len[row]), int(lens.allocated_len[row]))
            slots = pools.page_table[row, at // page_size].long() * page_size + at % page_size
            full[:, slots] = torch.nan
            if self._cache.config.has_swa:
                swa[:, self._cache.translate(slots)] = torch.nan

    def _assert_free_pages_untouched(self, name: str) -> None:
        for kv, free, pool in zip(self._pools(), self._free, ("Full", "SWA"), strict=True):
            if kv.numel():
                pages = torch.from_numpy(np.flatnonzero(free))
                assert kv[:2, pages].isnan().all(), f"before {name}: a free {pool} page was written"


class Setting:
    """A model, a poisoned cache and an engine."""

    def __init__(
        self,
        config: CacheConfig,
        *,
        draft: bool = False,
        adapters: int = 1,
        pairs: int = 2,
        chunk: int = 16,
        propose: Callable[[Any], list[int]] | None = None,
    ) -> None:
        model_config = hybrid_model.ModelConfig(
            window=config.window, draft=draft, num_adapters=adapters, num_pairs=pairs
        )
        self.config = config
        self.model = hybrid_model.HybridModel(model_config)
        self.manager = KVCacheManager(config)
        kv = paged_attention.PagedKV(model_config, config)
        self.cache = PoisonedCache(self.manager, kv)
        self.engine = serve.Engine(self.model, self.cache, kv, chunk_tokens=chunk, propose=propose)
        self.requests: list[Any] = []
        # (name, got, expected): what a scenario found on the way, to compare beside the logits
        self.findings: list[tuple[str, Any, Any]] = []

    def found(self, name: str, got: Any, expected: Any) -> None:
        """Note a finding. It isn't asserted yet: a planted fault must get as far as the logits."""
        self.findings.append((name, got, expected))

    def submit(self, prompt: list[int], num_new: int = 1, **kwargs: Any) -> Any:
        """Queue a request and remember it for the comparison."""
        request = model_runner.Request(prompt, num_new, **kwargs)
        self.engine.submit(request)
        self.requests.append(request)
        return request

    def start(self, prompt: list[int], num_new: int = 1, **kwargs: Any) -> Any:
        """Queue a request and admit it, and nothing else."""
        assert not self.engine.waiting
        request = self.submit(prompt, num_new, **kwargs)
        self.engine.start(self.engine._look_up([request]), [0])
        return request

    def serve(self, prompt: list[int], num_new: int = 1, **kwargs: Any) -> Any:
        """Serve one request to its end."""
        request = self.submit(prompt, num_new, **kwargs)
        self.engine.run()
        return request

    def reused(self, request: Any) -> int:
        """Tokens that the request's first forward did not have to compute."""
        return request.trace[0][0]

    def assert_as_found(self) -> None:
        """Assert that all findings are as expected."""
        for name, got, expected in self.findings:
            assert got == expected, name

    def assert_exact(self) -> None:
        """Assert that each position's logits, each time they were computed, are those without a cache."""
        for i, request in enumerate(self.requests):
            dense = hybrid_model.dense_logits(self.model, request.tokens, request.adapter)
            for start, *computed in request.trace:
                for name, got, want in zip(("target", "draft"), computed, dense, strict=True):
                    if got is None:
                        continue
                    torch.testing.assert_close(
                        got,
                        want[start : start + len(got)],
                        rtol=0,
                        atol=TOLERANCE,
                        msg=lambda text, at=f"logits of request {i} ({name}) from {start}": (
                            f"{at} differ from the model without a cache\n{text}"
                        ),
                    )

    def assert_all_pages_come_back(self) -> None:
        """Flush, and assert that both pools are whole."""
        assert not self.engine.running
        self.cache.flush()
        self.manager.check()
        stats = self.manager.stats()
        assert stats.full_pages_free == self.config.full_pages
        assert stats.swa_pages_free == self.config.swa_pages
        assert stats.nodes == stats.tree_full_pages == 0


class Storm:
    """A random schedule: calls of the engine in random order and size, over requests that share prefixes."""

    # how often each is done, beside the others
    _ACTIONS: ClassVar[dict[str, float]] = {
        "submit": 6,
        "follow": 2,
        "admit": 6,
        "prefill": 10,
        "decode": 12,
        "commit": 2,
        "finish": 1,
        "retract": 1,
        "abort": 1,
        "evict": 1,
        "flush": 0.15,
        "drop": 0.3,
    }

    def __init__(self, setting: Setting, seed: int, *, most: int, hints: bool = False) -> None:
        self.setting, self.engine = setting, setting.engine
        self.rng = np.random.default_rng(seed)
        self.most, self.hints = most, hints  # tokens of a request
        self.counts: Counter[str] = Counter()
        vocab = setting.model.config.vocab_size
        self.documents = [self.rng.integers(0, vocab, most).tolist() for _ in range(3)]
        if setting.engine.propose is not None:
            setting.engine.propose = self.propose

    def run(self, num_actions: int) -> None:
        weights = np.array(list(self._ACTIONS.values()))
        times = np.ceil(weights / weights.sum() * num_actions).astype(int)
        names = self.rng.permutation(np.repeat(list(self._ACTIONS), times)).tolist()
        for i, name in enumerate(names):
            self.counts[name] += getattr(self, name)() is not None
            for request in [r for r in self.engine.running if r.is_done]:
                self.engine.finish([request])
            if i % 5 == 0:
                self.setting.manager.check()
        self.engine.run()
        stats = self.setting.manager.stats()
        self.counts["evicted Full"] = stats.evicted_full_pages
        self.counts["evicted SWA"] = stats.evicted_swa_pages
        self.counts["retractions"] = self.engine.num_retractions
        for request in self.setting.requests:
            self.counts[request.state] += 1
            if request.trace:
                self.counts["reused"] += self.setting.reused(request)

    # actions: not None means that something was done

    def submit(self) -> Any:
        document = self.documents[int(self.rng.integers(3))]
        shared = int(self.rng.integers(0, self.most - 8))
        return self._submit(document[:shared])

    def follow(self) -> Any:
        """The next turn of a conversation, or a fork of a request that runs."""
        begun = [r for r in self.setting.requests if r.trace and len(r.tokens) < self.most - 8]
        if begun:
            other = begun[int(self.rng.integers(len(begun)))]
            return self._submit(other.tokens, adapter=other.adapter, salt=other.salt)
        return None

    def _submit(self, prefix: list[int], **kwargs: Any) -> Any:
        rng, model = self.rng, self.setting.model.config
        if len(self.engine.waiting) > 3:
            return None
        room = self.most - len(prefix)
        tail = int(rng.integers(1, min(room, 12)))
        kwargs.setdefault("adapter", int(rng.integers(model.num_adapters)))
        kwargs.setdefault("salt", (None, None, "a")[int(rng.integers(3))])
        hints = rng.integers(0, self.most, 2).tolist() if self.hints else []
        return self.setting.submit(
            prefix + rng.integers(0, model.vocab_size, tail).tolist(),
            int(rng.integers(1, min(room - tail, 12) + 1)),
            hints=hints,
            seed=int(rng.integers(2**20)),
            **kwargs,
        )

    def admit(self) -> Any:
        waiting, rows = self.engine.waiting, self.setting.manager.capacity().rows
        if not waiting or not rows:
            return None
        batch = self.engine._look_up(waiting)
        self.counts["branch"] += int((batch.branch_len >= 0).sum())
        chosen = self.rng.permutation(len(waiting))[: int(self.rng.integers(1, rows + 1))]
        self.engine.start(batch, chosen.tolist())
        return True

    def prefill(self) -> Any:
        ready = self._some([r for r in self.engine.running if self._missing(r) > 1])
        ends = []
        for r in ready:
            most = min(self._missing(r), 2 * self.engine.chunk_tokens)
            ends.append(self.engine.computed(r) + int(self.rng.integers(1, most + 1)))
        return self._fit(lambda: self.engine.prefill(ready, ends)) if ready else None

    def decode(self) -> Any:
        ready = self._some([r for r in self.engine.running if self._missing(r) == 1])
        if not ready:
            return None
        if self.engine.propose is None or self.rng.random() < 0.3:
            return self._fit(lambda: self.engine.decode(ready))
        drafts = [self.propose(r) for r in ready]
        self.counts["drafts"] += sum(map(len, drafts))
        before = sum(len(r.tokens) for r in ready)
        done = self._fit(lambda: self.engine.verify(ready, drafts))
        if done:
            self.counts["accepted"] += sum(len(r.tokens) for r in ready) - before - len(ready)
        return done

    def propose(self, request: Any) -> list[int]:
        """Up to four drafts: what the model without a cache would draw, with a third of them spoilt."""
        rng, model = self.rng, self.setting.model
        room = len(request.prompt) + request.num_new - len(request.tokens) - 1
        tokens = list(request.tokens)
        for _ in range(min(int(rng.integers(0, 5)), room)):
            logits, _ = hybrid_model.dense_logits(model, tokens, request.adapter)
            token = model_runner.sample(logits[-1], request.seed, len(tokens))
            spoilt = rng.random() < 1 / 3
            tokens.append(int(rng.integers(model.config.vocab_size)) if spoilt else token)
        return tokens[len(request.tokens) :]

    def commit(self) -> Any:
        return self._on_some(self.engine.commit, 3)

    def finish(self) -> Any:
        return self._on_some(self.engine.finish, 1)

    def retract(self) -> Any:
        return self._on_some(self.engine.retract, 2)

    def abort(self) -> Any:
        return self._on_some(self.engine.abort, 1)

    def evict(self) -> Any:
        full, swa = self.rng.integers(0, 6, 2).tolist()
        self.setting.cache.evict(full, swa if self.setting.config.has_swa else 0)
        return True

    def flush(self) -> Any:
        self.setting.cache.flush()
        return True

    def drop(self) -> Any:
        """Drop the namespace of some request, if none runs in it."""
        if not self.setting.requests:
            return None
        request = self.setting.requests[int(self.rng.integers(len(self.setting.requests)))]
        handle = self.setting.cache.namespace((request.adapter, request.salt))
        try:
            self.setting.cache.drop_namespace(handle)
        except InvalidInputError:
            return None
        return True

    def _missing(self, request: Any) -> int:
        return len(request.tokens) - self.engine.computed(request)

    def _some(self, requests: list[Any], most: int = 8) -> list[Any]:
        """A random part of `requests`, in random order."""
        num = int(self.rng.integers(1, most + 1))
        return [requests[i] for i in self.rng.permutation(len(requests))[:num]]

    def _on_some(self, call: Callable[[list[Any]], None], most: int) -> Any:
        some = self._some(self.engine.running, most)
        if some:
            call(some)
            return True
        return None

    def _fit(self, call: Callable[[], None]) -> Any:
        try:
            call()
        except CapacityError:
            self.engine.retract(self.engine.running[-1:])
            return None
        return True
