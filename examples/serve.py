"""A miniature engine: serves `hybrid_model.py` from paged KV that a KVCacheManager gives out.

What a serving engine does, at toy size: continuous batching, chunked prefill, batched decode, speculative
decoding, retraction and resume, adapters in namespaces of their own. docs/engine.md walks through it.

    python examples/serve.py [--device cuda]

serves a small workload and compares the logits of every position with the same model run without a cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import torch
from hybrid_model import HybridModel, ModelConfig
from model_runner import NO_ROW, Chunk, ModelRunner, Request, largest_error
from paged_attention import PagedKV

from kvcache import (
    CacheConfig,
    CapacityError,
    KeyBatch,
    KVCacheManager,
    MatchBatch,
    Ragged,
    parse_checkpoints,
)


class Engine:
    """Serves requests, oldest first.

    Args:
        model: The model.
        cache: Manager of the pages.
        kv: Where keys and values lie.
        chunk_tokens: Prompt tokens that one forward computes, over all requests.
        propose: Draft tokens of a request whose next token is `tokens[-1]`; None: no speculation.
    """

    def __init__(
        self,
        model: HybridModel,
        cache: KVCacheManager,
        kv: PagedKV,
        *,
        chunk_tokens: int = 16,
        propose: Callable[[Request], list[int]] | None = None,
    ) -> None:
        self.runner, self.cache = ModelRunner(model, cache, kv), cache
        self.chunk_tokens, self.propose = chunk_tokens, propose
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_retractions = 0

    # the scheduler

    def submit(self, request: Request) -> None:
        """Put a request into the queue."""
        longest = len(request.prompt) + request.num_new - 1
        if not request.prompt or longest > self.cache.config.max_len:
            raise ValueError(f"a request holds 1 to {self.cache.config.max_len} tokens of KV")
        request.tokens = list(request.prompt)
        request.match = self._look_up([request], touch=False)
        self.waiting.append(request)

    def run(self) -> None:
        """Serve until nothing waits or runs."""
        while self.waiting or self.running:
            self.step()

    def step(self) -> None:
        """Admit, then compute a prefill chunk and one round of decoding."""
        self.admit()
        self._fit(self.chunk_tokens, self._prefill_some)
        self._fit(len(self.running), self._decode_some)
        for request in [r for r in self.running if r.is_done]:
            self.finish([request])

    def _fit(self, budget: int, compute: Callable[[int], None]) -> None:
        """Compute; while pages are lacking, retract the youngest request, then do less at a time."""
        while self.running:
            try:
                return compute(budget)
            except CapacityError:
                if len(self.running) > 1:
                    self.retract(self.running[-1:])
                elif budget > 1:
                    budget //= 2
                else:
                    self.abort(self.running[:], state="refused")

    def _prefill_some(self, budget: int) -> None:
        requests, ends = [], []
        for request in self.running:
            start, total = self.computed(request), len(request.tokens)
            if total - start > 1 and budget > 0:
                requests.append(request)
                ends.append(min(total, start + budget))
                budget -= ends[-1] - start
        if requests:
            self.prefill(requests, ends)

    def _decode_some(self, num: int) -> None:
        ready = [r for r in self.running if self.computed(r) == len(r.tokens) - 1 and not r.is_done]
        if ready and self.propose is not None:
            self.verify(ready, [self.propose(r) for r in ready])
        elif ready:
            self.decode(ready)

    # a request begins

    def admit(self) -> None:
        """Start the requests at the head of the queue that there is room for."""
        if not self.waiting:
            return
        batch = self._look_up(self.waiting)
        # what each holds after its first chunk
        lens = [len(request.tokens) for request in self.waiting]
        ends = np.minimum(lens, batch.reuse_len + self.chunk_tokens)
        num = self.cache.admit_as_many(batch, ends)
        # alone, a request goes on with what there is
        self.start(batch, list(range(num if self.running else max(num, 1))))

    def start(self, batch: MatchBatch, chosen: list[int]) -> None:
        """Admit some of the waiting requests; `batch` is a fresh look-up of all."""
        started = [self.waiting[i] for i in chosen]
        for request, row in zip(started, self.cache.admit(batch, chosen), strict=True):
            request.row, request.state = int(row), "running"
        self.running += started
        self.waiting = [r for r in self.waiting if r.row == NO_ROW]

    def _look_up(self, requests: list[Request], *, touch: bool = True) -> MatchBatch:
        # the last token is computed in any case: it gives the logits that the next is drawn from
        keys = KeyBatch.pack([r.tokens[:-1] for r in requests])
        # one namespace for each adapter and salt: their KV must never mix
        handles = self.cache.namespaces([(r.adapter, r.salt) for r in requests])
        previous = MatchBatch.concatenate([r.match for r in requests if r.match is not None])
        hint = previous if len(previous) == len(requests) else None
        batch = self.cache.match(keys, handles, previous=hint, touch=touch)
        for i, request in enumerate(requests):
            request.match = batch.select([i])
        return batch

    # a request runs

    def prefill(self, requests: list[Request], ends: list[int]) -> None:
        """Compute a chunk of each request's tokens, up to `ends`, and hand it to the cache."""
        rows = self._rows(requests)
        self.cache.extend(rows, ends)
        self.runner.forward(
            [Chunk(r, self.computed(r), end) for r, end in zip(requests, ends, strict=True)]
        )
        self.cache.advance(rows)
        self.commit(requests)
        self.cache.slide(rows)

    def decode(self, requests: list[Request]) -> None:
        """Compute the last token of each request, which gives the next."""
        rows, ends = self._rows(requests), [len(r.tokens) for r in requests]
        self.cache.step(rows)
        self.runner.forward([Chunk(r, end - 1, end) for r, end in zip(requests, ends, strict=True)])
        # rows that verified drafts hold pages beyond: then say how far they are computed
        self.cache.advance(rows, None if self.propose is None else ends)
        self.cache.slide(rows)

    def verify(self, requests: list[Request], drafts: list[list[int]]) -> None:
        """Compute the last token and drafts of those that follow it; keep the drafts that come true."""
        rows = self._rows(requests)
        chunks = [
            Chunk(r, len(r.tokens) - 1, len(r.tokens) + len(d), d)
            for r, d in zip(requests, drafts, strict=True)
        ]
        self.cache.extend(rows, [c.end for c in chunks])
        self.cache.advance(rows, self.runner.forward(chunks))
        self.cache.slide(rows)

    def commit(self, requests: list[Request]) -> None:
        """Hand what is computed to the cache, for other requests to reuse."""
        self.cache.commit(self._rows(requests), *self._keys(requests))

    # a request ends

    def finish(self, requests: list[Request]) -> None:
        """Hand over what is computed and end the requests."""
        self.cache.finish(self._rows(requests), *self._keys(requests))
        self._leave(requests, "finished")

    def abort(self, requests: list[Request], *, state: str = "aborted") -> None:
        """End requests without handing anything over."""
        self.cache.abort(self._rows(requests))
        self._leave(requests, state)

    def retract(self, requests: list[Request]) -> None:
        """Take the pages from requests and put them back into the queue; they go on where they were."""
        batch = self.cache.retract(self._rows(requests), *self._keys(requests))
        for i, request in enumerate(requests):
            request.match = batch.select([i])
        self._leave(requests, "waiting")
        self.waiting = requests + self.waiting
        self.num_retractions += len(requests)

    def _leave(self, requests: list[Request], state: str) -> None:
        for request in requests:
            request.row, request.state = NO_ROW, state
            self.running.remove(request)

    # shared

    def computed(self, request: Request) -> int:
        """Return how many tokens of a running request have KV. Host knowledge."""
        (index,) = self.cache.index([request.row])
        return int(self.cache.rows.computed_len[index])

    def _rows(self, requests: list[Request]) -> np.ndarray:
        return np.array([r.row for r in requests], np.int64)

    def _keys(self, requests: list[Request]) -> tuple[KeyBatch, Ragged]:
        # a real engine has its tokens in one buffer and names starts and lens
        return KeyBatch.pack([r.tokens for r in requests]), Ragged.pack([r.hints for r in requests])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Serve a tiny model from a paged prefix cache.")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ...")
    parser.add_argument("--requests", type=int, default=24, help="to serve (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.requests < 1:
        parser.error(f"--requests must be >= 1, got {args.requests}")
    # tensors this small: threads would wait for each other
    torch.set_num_threads(1)

    model_config = ModelConfig(window=8, draft=True, num_adapters=2)
    cache_config = CacheConfig(
        page_size=4,
        window=8,
        full_pages=44,
        swa_pages=24,
        max_rows=6,
        max_len=96,
        bigram=True,  # the draft layer's KV at position i depends on token i + 1
        checkpoints=parse_checkpoints("branch,hints"),
        device=args.device,
    )
    model = HybridModel(model_config, device=args.device)
    cache = KVCacheManager(cache_config)
    engine = Engine(model, cache, PagedKV(model_config, cache_config), propose=lambda r: [r.guess])

    rng = np.random.default_rng(0)
    system = rng.integers(0, model_config.vocab_size, 32).tolist()
    requests = [
        Request(
            system + rng.integers(0, model_config.vocab_size, int(rng.integers(1, 24))).tolist(),
            num_new=int(rng.integers(1, 16)),
            adapter=i % 2,
            hints=[len(system)],
            seed=i,
        )
        for i in range(args.requests)
    ]
    for request in requests:
        engine.submit(request)
    engine.run()

    finished = [r for r in requests if r.state == "finished"]
    error = max(largest_error(model, r) for r in finished)
    held = sum(len(r.tokens) - 1 for r in finished)
    computed = sum(len(logits) for r in finished for _, logits, _ in r.trace)
    cache.flush()
    stats = cache.stats()
    free = stats.full_pages_free == cache_config.full_pages
    print(f"{len(finished)} of {len(requests)} requests finished")
    print(f"{engine.num_retractions} retractions")
    print(f"{computed} tokens computed for {held} tokens of KV")
    print(f"largest error of the logits against the model without a cache: {error:.1e}")
    print(f"{stats.launches} launches, {stats.uploads} uploads; all pages free again: {free}")


if __name__ == "__main__":
    main()
