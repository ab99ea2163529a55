"""Checkpoint policies: at which lengths an insert keeps a whole SWA window in the tree.

The ends of prompts and of requests always keep one. The policies name further lengths; several may be on at
once, and one insert keeps them all.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.checks import check_int
from kvcache.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class Branch:
    """Keep a window at the fork that the request's match found (SGLang: branching-point caching)."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """Keep the window at the end of every insert, chunks too, as SGLang does and `Lru` always does."""


@dataclass(frozen=True, slots=True)
class Hints:
    """Keep a window at the lengths that the caller names: end of the system prompt, ends of messages."""


@dataclass(frozen=True, slots=True)
class Every:
    """Keep a window at every multiple of `tokens` (rounded down to whole pages)."""

    tokens: int

    def __post_init__(self) -> None:
        check_int("tokens", self.tokens, low=1, high=2**31 - 1)


@dataclass(frozen=True, slots=True)
class Ladder:
    """Keep windows `first`, `first * factor`, `first * factor^2` ... tokens before the end of the prompt.

    A request that forks d tokens before that end then computes at most about (factor - 1) * d more of what
    is cached.
    """

    first: int = 128  # at least a page
    factor: int = 2

    def __post_init__(self) -> None:
        check_int("first", self.first, low=1, high=2**31 - 1)
        check_int("factor", self.factor, low=2, high=2**10)


CheckpointPolicy = Branch | Chunks | Hints | Every | Ladder

_WORDS: dict[str, type[Branch | Chunks | Hints | Ladder]] = {
    "branch": Branch,
    "chunks": Chunks,
    "hints": Hints,
    "ladder": Ladder,
}
_NAMES = "branch, chunks, hints, ladder, every=N"


def parse_checkpoints(text: str) -> tuple[CheckpointPolicy, ...]:
    """Read `none` or a comma-separated list of `branch`, `chunks`, `hints`, `ladder`, `every=N`.

    Raises:
        InvalidInputError: Another word, or a policy named twice.

    Example:
        >>> parse_checkpoints("branch,every=4096")
        (Branch(), Every(tokens=4096))
    """
    if text.strip() == "none":
        return ()
    policies: list[CheckpointPolicy] = []
    for word in (part.strip() for part in text.split(",")):
        name, _, value = word.partition("=")
        if word in _WORDS:
            policies.append(_WORDS[word]())
        elif name == "every" and value.isdecimal():
            policies.append(Every(int(value)))
        else:
            raise InvalidInputError(f"checkpoints must be none or a list of {_NAMES}, got {word!r}")
    check_policies(tuple(policies))
    return tuple(policies)


def check_policies(policies: tuple[CheckpointPolicy, ...]) -> None:
    """Raise InvalidInputError unless `policies` are policies, each kind at most once."""
    if not isinstance(policies, tuple):
        raise InvalidInputError(f"checkpoints must be a tuple of policies, got {policies!r}")
    for policy in policies:
        if not isinstance(policy, CheckpointPolicy):
            raise InvalidInputError(
                f"checkpoints must hold Branch, Chunks, Hints, Ladder, Every, got {policy!r}"
            )
    kinds = [type(policy) for policy in policies]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise InvalidInputError(f"checkpoints must name {kind.__name__} at most once")
