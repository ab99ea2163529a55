"""A small hybrid transformer: full and sliding-window attention in turn, rotary positions, random weights.

The model does not know how keys and values are stored: every layer hands its q, k and v to `attend`, as
engines do with their attention backend. `dense_logits` runs it without any cache: one sequence, one mask.
`serve.py` runs it over the paged pools of a KVCacheManager.

With `draft=True` there is one more layer, as in EAGLE: at position i it reads the hidden state of position i
and the *next* token, i + 1, and predicts token i + 2. So its KV at position i depends on tokens 0 .. i + 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

FULL, SLIDING = "full", "sliding"

# (layer, q, k, v), each [num_tokens, num_heads, head_dim] -> what the tokens attended to, same shape
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the model."""

    window: (
        int | None
    )  # sliding layers: a token at q attends to (q - window, q]; None: all are full
    draft: bool = False  # whether there is a draft layer (full attention)
    num_adapters: int = 1  # variants of the model; their KV differs from position 0 on
    num_pairs: int = 2  # pairs of a full and a sliding layer
    vocab_size: int = 32
    num_heads: int = 2
    head_dim: int = 8
    dtype: torch.dtype = torch.float64

    @property
    def hidden_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """Kind of attention of each layer; the draft layer, if any, comes last."""
        pair = (FULL, FULL if self.window is None else SLIDING)
        return pair * self.num_pairs + (FULL,) * self.draft


class HybridModel:
    """Weights and forward pass. All token inputs are flat: [num_tokens], whatever request they belong to."""

    def __init__(self, config: ModelConfig, *, seed: int = 0, device: str = "cpu") -> None:
        self.config = config
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> Tensor:
            w = torch.randn(shape, generator=generator, dtype=torch.float64) / math.sqrt(shape[-1])
            return w.to(device=device, dtype=config.dtype)

        d = config.hidden_size
        # times sqrt(d): rows of unit variance
        self.embedding = weight(config.vocab_size, d) * math.sqrt(d)
        self.adapters = weight(config.num_adapters, d) * math.sqrt(d)
        self.qkv = [weight(3 * d, d) for _ in config.layer_kinds]
        self.out = [weight(d, d) for _ in config.layer_kinds]
        self.up = [weight(2 * d, d) for _ in config.layer_kinds]
        self.down = [weight(d, 2 * d) for _ in config.layer_kinds]
        self.head = weight(config.vocab_size, d)
        self.draft_in = weight(d, 2 * d)
        half = torch.arange(config.head_dim // 2, dtype=config.dtype, device=device)
        self.frequencies = 100.0 ** (-half / half.numel())

    def hidden(self, tokens: Tensor, positions: Tensor, adapters: Tensor, attend: Attend) -> Tensor:
        """Return the last hidden state of each token, [num_tokens, hidden_size].

        Args:
            tokens, positions, adapters: [num_tokens] int64.
            attend: Stores k and v of these tokens and lets q attend to all that came before.
        """
        x = self.embedding[tokens] + self.adapters[adapters]
        for layer in range(2 * self.config.num_pairs):
            x = self._layer(layer, x, positions, attend)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [num_tokens, vocab_size]: the prediction of the next token."""
        return _normalise(hidden) @ self.head.T

    def draft_logits(
        self, hidden: Tensor, next_tokens: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """Return [num_tokens, vocab_size]: the draft layer's prediction of the token after the next one."""
        both = torch.cat((_normalise(hidden), _normalise(self.embedding[next_tokens])), dim=-1)
        layer = 2 * self.config.num_pairs
        return self.logits(self._layer(layer, both @ self.draft_in.T, positions, attend))

    def _layer(self, layer: int, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        config = self.config
        qkv = _normalise(x) @ self.qkv[layer].T
        q, k, v = qkv.view(-1, 3, config.num_heads, config.head_dim).unbind(1)
        attended = attend(layer, self._rotate(q, positions), self._rotate(k, positions), v)
        x = x + attended.reshape(-1, config.hidden_size) @ self.out[layer].T
        inner = torch.nn.functional.silu(_normalise(x) @ self.up[layer].T)
        return x + inner @ self.down[layer].T

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        angle = positions[:, None, None] * self.frequencies
        a, b = x.chunk(2, dim=-1)
        return torch.cat(
            (a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), dim=-1
        )


def _normalise(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6)


def attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Softmax attention.

    Args:
        q: [..., num_queries, num_heads, head_dim].
        k, v: [..., num_keys, num_heads, head_dim].
        visible: [..., num_queries, num_keys] bool, at least one key for each query.
    """
    scores = torch.einsum("...qhd,...khd->...hqk", q, k) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~visible.unsqueeze(-3), -math.inf)
    return torch.einsum("...hqk,...khd->...qhd", scores.softmax(dim=-1), v)


def visible_keys(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Return which positions `keys` a query at each of `queries` attends to; [..., queries, keys] bool.

    Example, window 3:
        >>> visible_keys(torch.tensor([4]), torch.arange(6), 3).int()
        tensor([[0, 0, 1, 1, 1, 0]], dtype=torch.int32)
    """
    queries, keys = queries.unsqueeze(-1), keys.unsqueeze(-2)
    visible = keys <= queries
    return visible if window is None else visible & (keys > queries - window)


def dense_logits(
    model: HybridModel, tokens: list[int], adapter: int = 0
) -> tuple[Tensor, Tensor | None]:
    """Run one sequence without any cache.

    Returns:
        ([len(tokens), vocab_size] logits, [len(tokens) - 1, vocab_size] logits of the draft layer or None).
    """
    config = model.config
    device = model.embedding.device
    ids = torch.tensor(tokens, device=device)
    positions = torch.arange(len(tokens), device=device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        window = config.window if config.layer_kinds[layer] == SLIDING else None
        at = positions[: q.shape[0]]
        return attention(q, k, v, visible_keys(at, at, window))

    hidden = model.hidden(ids, positions, torch.full_like(ids, adapter), attend)
    draft = None
    if config.draft:
        draft = model.draft_logits(hidden[:-1], ids[1:], positions[:-1], attend)
    return model.logits(hidden), draft
