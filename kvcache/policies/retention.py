"""Retention policies: what is given up first where pages are needed."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class Lru:
    """The least recently used pages go first, of both pools, and the end of every insert keeps its window."""


@dataclass(frozen=True, slots=True)
class Value:
    """Whole windows go, the one that is worth least first: kvcache.tree.value and docs/policies.md.

    A window is kept at the end of a prompt and of a request, and where the checkpoint policies say; at the
    ends of chunks only while the row needs it, unless `Chunks` is on. Full pages go as with `Lru`, and those
    that no window reaches any more go with the window. To be used with `Ladder`, which gives it windows to
    choose from.
    """


Retention = Lru | Value


def parse_retention(text: str) -> Retention:
    """Read `lru` or `value`.

    Raises:
        InvalidInputError: Another word.
    """
    for policy in (Lru(), Value()):
        if text.strip() == type(policy).__name__.lower():
            return policy
    raise InvalidInputError(f"retention must be lru or value, got {text!r}")


def check_retention(policy: Retention) -> None:
    """Raise InvalidInputError unless `policy` is one."""
    if not isinstance(policy, (Lru, Value)):
        raise InvalidInputError(f"retention must be Lru() or Value(), got {policy!r}")
