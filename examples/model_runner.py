"""Requests, and the forward pass that computes them over paged KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from hybrid_model import HybridModel, dense_logits
from paged_attention import PagedAttention, PagedKV
from torch import Tensor

from kvcache import KVCacheManager, MatchBatch

NO_ROW = -1


@dataclass(eq=False)
class Request:
    """One request. While it runs, all of `tokens` but the last have KV, or are about to get it."""

    prompt: list[int]
    num_new: int  # tokens to generate
    adapter: int = 0  # variant of the model
    salt: str | None = None  # requests with different salts share nothing
    hints: list[int] = field(default_factory=list)  # lengths where others are likely to branch off
    seed: int | None = None  # of the sampling; None: greedy

    tokens: list[int] = field(default_factory=list)  # prompt and what was generated
    row: int = NO_ROW
    match: MatchBatch | None = None  # last look-up: hint for the next
    guess: int = 0  # what the draft layer expects after the last of `tokens`
    state: str = "waiting"  # then running, finished, aborted, refused
    # (first position, logits, logits of the draft layer) of each forward, for comparison
    trace: list[tuple[int, Tensor, Tensor | None]] = field(default_factory=list, repr=False)

    @property
    def is_done(self) -> bool:
        return len(self.tokens) == len(self.prompt) + self.num_new


class Chunk(NamedTuple):
    """Tokens of a request that one forward computes."""

    request: Request
    start: int  # first position
    end: int  # one past the last
    drafts: Sequence[int] = ()  # guesses that follow `request.tokens`


class ModelRunner:
    """Computes tokens of requests, which must hold the pages for them, and draws the tokens that follow."""

    def __init__(self, model: HybridModel, cache: KVCacheManager, kv: PagedKV) -> None:
        self.model, self.cache, self.kv = model, cache, kv

    def forward(self, chunks: list[Chunk]) -> list[int]:
        """Compute chunks; a request whose last token is among them gets its next, or several.

        Returns:
            How many tokens of each request are computed now: `end`, or less where drafts were rejected.
        """
        tokens = [[*c.request.tokens, *c.drafts][c.start : c.end] for c in chunks]
        adapters = [[c.request.adapter] * (c.end - c.start) for c in chunks]
        hidden = self.model.hidden(
            self._flat(tokens), self._positions(chunks), self._flat(adapters), self._attend(chunks)
        )
        logits = self.model.logits(hidden)

        computed = []
        for c, of_request in zip(chunks, logits.split([len(t) for t in tokens]), strict=True):
            end, known = c.end, len(c.request.tokens)
            if end >= known:
                self._draw(c, of_request[known - 1 - c.start :])
                end = min(end, len(c.request.tokens) - 1)
            computed.append(end)
            c.request.trace.append((c.start, of_request[: end - c.start], None))
        if self.model.config.draft:
            self._forward_draft_layer(chunks, computed, hidden)
        return computed

    def _draw(self, chunk: Chunk, logits: Tensor) -> None:
        """Append the next token, and more while they are the drafts that `logits` already looked past."""
        request = chunk.request
        for i, of_position in enumerate(logits):
            token = sample(of_position, request.seed, len(request.tokens))
            request.tokens.append(token)
            if request.is_done or i == len(chunk.drafts) or token != chunk.drafts[i]:
                return

    def _forward_draft_layer(self, chunks: list[Chunk], ends: list[int], hidden: Tensor) -> None:
        """Run the draft layer up to `ends`: last, since each position sees the token that follows."""
        true = [Chunk(c.request, c.start, end) for c, end in zip(chunks, ends, strict=True)]
        states = hidden.split([c.end - c.start for c in chunks])
        logits = self.model.draft_logits(
            torch.cat([h[: c.end - c.start] for h, c in zip(states, true, strict=True)]),
            self._flat([c.request.tokens[c.start + 1 : c.end + 1] for c in true]),
            self._positions(true),
            self._attend(true),
        )
        sizes = [c.end - c.start for c in true]
        for c, of_request in zip(true, logits.split(sizes), strict=True):
            start, of_target, _ = c.request.trace[-1]
            c.request.trace[-1] = (start, of_target, of_request)
            c.request.guess = int(of_request[-1].argmax())

    def _attend(self, chunks: list[Chunk]) -> PagedAttention:
        rows = np.array([c.request.row for c in chunks], np.int64)
        starts, ends = [c.start for c in chunks], [c.end for c in chunks]
        return PagedAttention(self.model.config, self.kv, self.cache, rows, starts, ends)

    def _positions(self, chunks: list[Chunk]) -> Tensor:
        return self._flat([list(range(c.start, c.end)) for c in chunks])

    def _flat(self, parts: list[list[int]]) -> Tensor:
        flat = [value for part in parts for value in part]
        return torch.tensor(flat, device=self.model.embedding.device)


def sample(logits: Tensor, seed: int | None, position: int) -> int:
    """Draw the token at a position; the same seed draws the same token, also after a retraction."""
    if seed is None:
        return int(logits.argmax())
    generator = torch.Generator().manual_seed(seed * 1_000_003 + position)
    noise = torch.rand(logits.shape, generator=generator, dtype=logits.dtype)
    # the largest of logits plus Gumbel noise is a draw from their softmax
    return int((logits.cpu() - (-noise.log()).log()).argmax())


def largest_error(model: HybridModel, request: Request) -> float:
    """Return the largest difference of the request's logits from those of the model without a cache."""
    dense, dense_draft = dense_logits(model, request.tokens, request.adapter)
    errors = []
    for start, logits, draft in request.trace:
        errors.append((logits - dense[start : start + len(logits)]).abs().max())
        if draft is not None and dense_draft is not None:
            errors.append((draft - dense_draft[start : start + len(draft)]).abs().max())
    # the maximum of a tensor is NaN if any of it is; Python's max() would pass over it
    return float(torch.stack(errors).max())
