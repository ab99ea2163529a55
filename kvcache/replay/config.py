"""EngineConfig: the sizes of a replay, and the cache they ask for."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcache.checks import check_device, check_int
from kvcache.config import CacheConfig
from kvcache.errors import InvalidInputError
from kvcache.policies.checkpoints import Branch, CheckpointPolicy, Ladder, check_policies
from kvcache.policies.retention import Retention, Value, check_retention
from kvcache.replay.trace import MAX_REQUEST_TOKENS, Trace


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and policies of the simulated engine. Lengths and pools in tokens.

    Raises:
        InvalidInputError: A value is out of range, or two contradict each other.
    """

    page_size: int = 64
    window: int | None = 128  # None: full attention only
    full_tokens: int | None = None  # Full pool, rounded down to pages; None: never evict
    swa_tokens: int | None = None  # SWA pool, likewise
    chunk: int = 8192  # prompt tokens that all prefills of a step share; 0: whole prompts
    cut_chunks: bool = True  # share no more than CacheConfig.prefill_chunk of a bounded SWA pool
    running: int = 64  # requests that run at a time
    checkpoints: tuple[CheckpointPolicy, ...] = (Branch(), Ladder())
    retention: Retention = field(default_factory=Value)
    decode: bool = True  # False: a request ends with its prompt
    hold_back: bool = True  # let a request wait while a running one computes what it could reuse
    abort_every: int = 0  # every n-th request is cancelled halfway; 0: none
    arrivals: bool = False  # requests come at their times; False: as soon as there is room
    speed: float = 1.0  # with arrivals: how much faster than the trace they come
    step_seconds: float = 0.02  # with arrivals: what a step takes, without its prompt tokens
    prefill_rate: float = 40_000.0  # with arrivals: prompt tokens a second
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_int("page size", self.page_size, low=1, high=2**20)
        if self.window is not None:
            check_int("window", self.window, low=1, high=2**30)
        elif self.swa_tokens is not None:
            raise InvalidInputError("SWA pool: there is none without a window")
        for name, tokens in (("Full pool", self.full_tokens), ("SWA pool", self.swa_tokens)):
            if tokens is not None and check_int(name, tokens, low=0) < self.page_size:
                raise InvalidInputError(
                    f"{name} must hold at least one page of {self.page_size} tokens, got {tokens}"
                )
        check_int("chunk", self.chunk, low=0)
        check_int("running", self.running, low=1, high=2**16)
        check_int("abort every", self.abort_every, low=0)
        for name in ("speed", "step_seconds", "prefill_rate"):
            value = getattr(self, name)
            if not 0 < value < 1e15:
                raise InvalidInputError(f"{name} must be a number > 0, got {value}")
        check_policies(self.checkpoints)
        check_retention(self.retention)
        check_device("device", self.device)

    @property
    def chunk_tokens(self) -> int:
        """Prompt tokens of a step, at most: the chunk, cut to an eighth of the SWA pool, 2,048 at least."""
        most = self.chunk or self.running * MAX_REQUEST_TOKENS
        if self.window is None or self.swa_tokens is None or not self.cut_chunks:
            return most
        return min(most, max(2048, self.swa_tokens // self.page_size * self.page_size // 8))

    def cache_config(self, trace: Trace) -> CacheConfig:
        """Return the cache for a replay of `trace`.

        A pool larger than the trace can fill is cut to what it can fill.
        """
        most = trace.pages_for_all(self.page_size, self.running, outputs=self.decode)
        full, swa = (
            most if tokens is None else min(most, tokens // self.page_size)
            for tokens in (self.full_tokens, self.swa_tokens)
        )
        return CacheConfig(
            page_size=self.page_size,
            window=self.window,
            full_pages=full,
            swa_pages=0 if self.window is None else swa,
            max_rows=min(self.running, len(trace)),
            max_len=trace.max_len,
            checkpoints=self.checkpoints,
            retention=self.retention,
            max_namespaces=1,
            device=self.device,
        )
