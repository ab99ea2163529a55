"""Random schedules of the examples' engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from model_harness import CapturedDecode, Setting, hybrid_model, model_runner

from kvcache import CapacityError, InvalidInputError


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

    def __init__(
        self,
        setting: Setting,
        seed: int,
        *,
        most: int,
        hints: bool = False,
        captured: CapturedDecode | None = None,
    ) -> None:
        self.setting, self.engine, self.captured = setting, setting.engine, captured
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
        if self.captured is not None and self.rng.random() < 0.8:
            captured = self.captured
            self.counts["captured"] += 1
            return self._fit(lambda: captured.decode(ready))
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
