"""Both sides of a validation: manager and oracle get the same calls and must stay equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from kvcache.config import CacheConfig
from kvcache.errors import IntegrityError, KVCacheError
from kvcache.manager import KVCacheManager
from kvcache.oracle.manager import Disagreement, ReferenceManager
from kvcache.oracle.state import State
from kvcache.policies.checkpoints import (
    Branch,
    CheckpointPolicy,
    Chunks,
    Every,
    Hints,
    Ladder,
)
from kvcache.policies.retention import Lru, Value
from kvcache.validate.compare import differences
from kvcache.validate.observe import observe, touches_wait


class Failure(Exception):
    """Manager and oracle disagree, or a rule is broken. The text says where."""


class Sides:
    """A manager and an oracle of the same configuration.

    Args:
        branch, hints, every, ladder, chunks: the checkpoint policies; `every` in tokens, 0 = off; `ladder` is
            (tokens of the first rung, factor).
        value: whether windows go by what they are worth.
        device: where the manager's page ids live.
        hash_seed: of the manager's page hashes; what the oracle says does not depend on it.
        check_every: `manager.check()`, which repeats much of what is compared here in another way,
            runs after every so many calls.
        sizes: all else of CacheConfig.
    """

    def __init__(
        self,
        *,
        branch: bool = False,
        hints: bool = False,
        every: int = 0,
        ladder: tuple[int, int] | None = None,
        value: bool = False,
        chunks: bool = False,
        device: str = "cpu",
        hash_seed: int = 0,
        check_every: int = 1,
        **sizes: Any,
    ) -> None:
        policies: list[CheckpointPolicy] = [Branch()] if branch else []
        policies += [Hints()] if hints else []
        policies += [Every(every)] if every else []
        policies += [Ladder(*ladder)] if ladder else []
        policies += [Chunks()] if chunks else []
        self.manager = KVCacheManager(
            CacheConfig(
                checkpoints=tuple(policies),
                retention=Value() if value else Lru(),
                device=device,
                debug=True,
                hash_seed=hash_seed,
                **sizes,
            )
        )
        self.oracle = ReferenceManager(
            branch=branch,
            hints=hints,
            every=every,
            ladder=ladder,
            value=value,
            chunks=chunks,
            **sizes,
        )
        self.oracle.namespace(None, self.manager.namespace(None))
        self.calls = 0
        self.check_every = check_every
        self.refusals: Counter[str] = Counter()  # by call and type, raised by both sides
        self.last = self._compare("the start")

    def both(
        self, what: str, manager: Callable[[], Any], oracle: Callable[[Any], Any]
    ) -> tuple[Any, Any] | None:
        """Make one call on both sides and compare all state.

        Args:
            what: The call, for messages.
            manager: Makes the call.
            oracle: Gets the manager's result (None if it refused).

        Returns:
            Both results; None if both sides refused with the same error and nothing changed.

        Raises:
            Failure: The two sides differ.
        """
        self.calls += 1
        result, refusal = None, None
        expected, expected_refusal = None, None
        try:
            result = manager()
        except KVCacheError as error:
            refusal = error
        try:
            expected = oracle(result)
        except KVCacheError as error:
            expected_refusal = error
        except Disagreement as error:
            raise Failure(f"{what}: manager gave {result!r} ({refusal!r}); {error}") from error
        if type(refusal) is not type(expected_refusal):
            raise Failure(f"{what}: manager raised {refusal!r}, oracle {expected_refusal!r}")
        self.last = self._compare(what)
        if refusal is None:
            return result, expected
        self.refusals[f"{what.partition('(')[0]} {type(refusal).__name__}"] += 1
        return None

    def equal(self, what: str, name: str, seen: Any, expected: list[int]) -> None:
        """Raise Failure unless the array `seen` holds `expected`."""
        if seen.tolist() != expected:
            raise Failure(f"{what}: {name} is {seen.tolist()}, oracle {expected}")

    def _compare(self, what: str) -> State:
        try:
            seen = observe(self.manager)
            if self.calls % self.check_every == 0:
                self.manager.check()
                self.oracle.check()
        except IntegrityError as error:
            raise Failure(f"after {what}: {error}") from error
        expected = self.oracle.state()
        lines = differences(seen, expected, settled=not touches_wait(self.manager))
        if lines:
            raise Failure("\n".join([f"after {what}:", *lines]))
        return expected

    def taken(self) -> Callable[[int, int], tuple[int, int | None]]:
        """What the manager's page table and map say now, for the oracle to take over."""
        pools: Any = self.manager.pools
        table, swa_map = pools.page_table.cpu().tolist(), pools.swa_map.cpu().tolist()

        def read(row: int, page: int) -> tuple[int, int | None]:
            full_id = table[row & 0xFFFFFFFF][page]
            if full_id not in self.oracle.all_full:
                raise Disagreement(f"row {row}, page {page} names Full page {full_id}")
            return full_id, swa_map[full_id] if swa_map else None

        return read
