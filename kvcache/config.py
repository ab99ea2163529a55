"""CacheConfig: everything that is fixed when a manager is built."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvcache.checks import check_device, check_int
from kvcache.errors import InvalidInputError
from kvcache.policies.checkpoints import (
    Branch,
    CheckpointPolicy,
    Chunks,
    Every,
    Hints,
    Ladder,
    check_policies,
)
from kvcache.policies.retention import Retention, Value, check_retention

_MAX_INT32 = 2**31 - 1
# at a time: each has a lock
_MOST_PINS = 1024


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Sizes and policies of a cache. Pages are counted without the padding page 0.

    `hash_seed` keys the hashes of pages. It changes no result, only who can foretell which pages collide. The
    default is known to everyone who reads this: with it, a client can make prompts whose first pages have one
    hash, and every match beside them walks through all of them. A service that takes prompts from strangers
    draws 64 random bits (`secrets.randbits(64)`), the same on all replicas, and keeps them to itself.

    Raises:
        InvalidInputError: A value is out of range, or two contradict each other.

    Example:
        >>> CacheConfig(page_size=64, window=128, full_pages=1000, swa_pages=200,
        ...             max_rows=8, max_len=4096).keep_pages
        2
    """

    page_size: int  # tokens per page, of both pools
    window: int | None  # tokens that a SWA layer attends to; None: full attention only
    full_pages: int  # pages of the Full pool that can be given out
    swa_pages: int  # pages of the SWA pool; 0 if and only if window is None
    max_rows: int  # requests running at a time
    max_len: int  # tokens that one request may hold
    bigram: bool = False  # EAGLE keys: unit i of a key covers tokens i and i + 1
    window_slack: int = 0  # keep window - slack tokens before a boundary (vLLM: 1, SGLang: 0)
    # at which lengths windows are kept, and what goes first: kvcache.policies, docs/policies.md
    checkpoints: tuple[CheckpointPolicy, ...] = (Branch(), Ladder())
    max_namespaces: int = 4096  # namespaces at a time, the default one among them
    hash_seed: int = field(default=0, repr=False)  # secret of the page hashes, see above
    device: str = "cpu"  # where the page ids live: "cpu", "cuda", "cuda:1", ...
    retention: Retention = field(default_factory=Value)
    pin_share: float = 0.25  # of each pool: what pins may hold, in [0, 1]
    debug: bool = False  # compare whole prefixes with a commit's keys, not their last page alone

    def __post_init__(self) -> None:
        check_int("page_size", self.page_size, low=1, high=2**20)
        check_int("max_rows", self.max_rows, low=1, high=2**20)
        check_int("max_len", self.max_len, low=1, high=_MAX_INT32 - self.page_size)
        check_int("max_namespaces", self.max_namespaces, low=1, high=2**24)
        check_int("hash_seed", self.hash_seed, low=0, high=2**64 - 1)
        # token slots are int32 in the attention backends
        most = _MAX_INT32 // self.page_size - 1
        check_int("full_pages", self.full_pages, low=1, high=most)
        check_int("window_slack", self.window_slack, low=0, high=1)
        for name in ("bigram", "debug"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidInputError(f"{name} must be a bool, got {getattr(self, name)!r}")
        if self.window is None:
            check_int("swa_pages without a window", self.swa_pages, low=0, high=0)
        else:
            check_int("window", self.window, low=1, high=_MAX_INT32 // 2)
            check_int("window - window_slack", self.window - self.window_slack, low=1)
            check_int("swa_pages", self.swa_pages, low=1, high=most)
        share: Any = self.pin_share
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
            raise InvalidInputError(f"pin_share must be a number in [0, 1], got {share!r}")
        check_policies(self.checkpoints)
        check_retention(self.retention)
        check_device("device", self.device)

    @property
    def has_swa(self) -> bool:
        """Whether there is an SWA pool."""
        return self.window is not None

    @property
    def keep_tokens(self) -> int:
        """Tokens of a window that are kept before a boundary: `window - window_slack`; 0 without SWA."""
        return 0 if self.window is None else self.window - self.window_slack

    @property
    def keep_pages(self) -> int:
        """Pages that hold a kept window which ends at a page boundary."""
        return -(-self.keep_tokens // self.page_size)

    @property
    def prefill_chunk(self) -> int:
        """Tokens that the prefills of a step should take at most: an eighth of the SWA pool, 2,048 at least.

        What is computed takes SWA pages, and so pushes windows out, before any policy can choose. Without an
        SWA pool there is no such limit, and this is `max_rows * max_len`.
        """
        if not self.has_swa:
            return self.max_rows * self.max_len
        return max(2048, self.swa_pages * self.page_size // 8)

    @property
    def max_pages_per_row(self) -> int:
        """Width of the page table."""
        return -(-self.max_len // self.page_size)

    @property
    def pin_budget(self) -> tuple[int, int]:
        """Pages that pins may hold: Full, SWA."""
        return int(self.pin_share * self.full_pages), int(self.pin_share * self.swa_pages)

    @property
    def max_pins(self) -> int:
        """Pins at a time."""
        return min(self.pin_budget[0], _MOST_PINS)

    @property
    def keeps_branches(self) -> bool:
        """Whether the policy `Branch` is on."""
        return any(isinstance(policy, Branch) for policy in self.checkpoints)

    @property
    def keeps_chunks(self) -> bool:
        """Whether the policy `Chunks` is on."""
        return any(isinstance(policy, Chunks) for policy in self.checkpoints)

    @property
    def keeps_hints(self) -> bool:
        """Whether the policy `Hints` is on."""
        return any(isinstance(policy, Hints) for policy in self.checkpoints)

    @property
    def ladder(self) -> Ladder | None:
        """The policy `Ladder`, if it is on."""
        return next((p for p in self.checkpoints if isinstance(p, Ladder)), None)

    @property
    def checkpoint_period(self) -> int:
        """Tokens between periodic checkpoints, 0 if the policy `Every` is off."""
        return next((p.tokens for p in self.checkpoints if isinstance(p, Every)), 0)
