"""CacheState: what one cache is made of, shared by the manager, its views, decode steps and checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from inspect import Signature, signature
from typing import Any, NoReturn, TypeVar, cast

from kvcache.config import CacheConfig
from kvcache.device.data_plane import NO_RANGES, DataPlane
from kvcache.device.stream import indexed
from kvcache.errors import (
    BrokenError,
    CapacityError,
    ClosedError,
    ConcurrentCallError,
    InvalidInputError,
)
from kvcache.pins import Pins
from kvcache.policies.retention import Value
from kvcache.rows import Int32Array, Rows
from kvcache.tree.radix_tree import RadixTree
from kvcache.uncopied import Uncopied

_F = TypeVar("_F", bound=Callable[..., Any])


class CacheState(Uncopied):
    """Tree, rows and data plane of one cache, and whether calls may change them now.

    Attributes:
        tree: The radix tree; it knows lengths.
        rows: Lengths and locks of the running requests.
        pins: Prefixes that stay whatever is evicted.
        plane: The device; it knows pages. Gone once the cache is closed.
        inside: Whether a call is under way. A second one would be of another thread.
        stepping: Whether the body of DecodeStep.running is.
        broken: Why the cache can no longer be trusted; None: it can.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.config = config = replace(config, device=indexed(config.device))
        self.rows = Rows(config)
        self.tree = RadixTree(
            page_size=config.page_size,
            keep_pages=config.keep_pages,
            bigram=config.bigram,
            num_slots=config.full_pages,
            max_locks=config.max_rows + config.max_pins,
            max_roots=config.max_namespaces,
            hash_seed=config.hash_seed,
            by_value=isinstance(config.retention, Value),
            chunks=config.keeps_chunks,
            ladder=(config.ladder.first, config.ladder.factor) if config.ladder else None,
        )
        self.pins = Pins(config)
        self.plane = DataPlane(config)
        self.evicted_full = 0
        self.evicted_swa = 0
        self.inside = False
        self.stepping = False
        self.broken: str | None = None
        self.closed = False

    # -- whether a call may run ------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise unless the cache is open and whole."""
        if self.closed:
            raise ClosedError("the manager was closed")
        if self.broken is not None:
            raise BrokenError(
                f"{self.broken}; call reset(), which ends all rows and frees all pages"
            )

    def check_stream(self, *, captured: bool = False) -> None:
        """Raise unless the cache is open, and its device and stream are the current ones (StreamGuard)."""
        self.check_open()
        if self.plane.guard is not None:
            self.plane.guard.check(captured=captured)

    def check_idle(self, *, launches: bool = True) -> None:
        """Raise unless the cache is open, and no decode step is between its launches and its counts.

        Args:
            launches: Whether the call may launch or upload: then as check_stream, too.
        """
        if self.closed or self.broken is not None:
            self.check_open()
        if launches and self.plane.guard is not None:
            self.plane.guard.check()
        if self.stepping:
            raise InvalidInputError(
                "this call must wait until DecodeStep.running is left: its body may only replay the step"
            )

    # -- pages -----------------------------------------------------------------------------------------------

    def make_room(self, pages: int) -> Int32Array:
        """Evict until `pages` pages of each pool are free; return the ranges that the device must free.

        Raises:
            CapacityError: Too few pages even with everything evictable gone; nothing was evicted.
        """
        tree, plane = self.tree, self.plane
        full = pages - plane.full_top
        swa = pages - plane.swa_top if self.config.has_swa else 0
        if full <= 0 and swa <= 0:
            return NO_RANGES
        for name, need, evictable in (
            ("Full", full, tree.full_pages - tree.locked_full_pages),
            ("SWA", swa, tree.swa_pages - tree.locked_swa_pages),
        ):
            if need > evictable:
                raise CapacityError(
                    f"{pages} {name} pages needed, {pages - need} are free and {evictable} evictable"
                )
        ranges, freed_full, freed_swa = tree.evict(max(full, 0), max(swa, 0))
        self.evicted_full += freed_full
        self.evicted_swa += freed_swa
        return ranges

    def reset(self) -> None:
        """End all rows and free all pages, on host and device."""
        if self.closed:
            raise ClosedError("the manager was closed")
        if self.stepping:
            raise InvalidInputError("reset must wait until DecodeStep.running is left")
        if self.plane.guard is not None:
            self.plane.guard.check()
        self.rows.reset()
        self.pins.reset()
        self.tree.reset()
        self.plane.reset()
        self.broken = None


def state_of(cache: Any) -> CacheState:
    """Return the state of a manager, or raise InvalidInputError if `cache` is none."""
    state = getattr(cache, "_state", None)
    if not isinstance(state, CacheState):
        raise InvalidInputError(f"cache must be a KVCacheManager, got {type(cache).__name__}")
    return state


_EXCLUSIVE = """
def call{signature}:
    state = self._state
    if state.inside:
        refuse(method.__name__)
    state.inside = True
    try:
        return method({passed})
    finally:
        state.inside = False
"""


def exclusive(method: _F) -> _F:
    """Refuse a call that begins while another one is under way; for methods of what has a `_state`.

    A flag, not a lock: nothing ever waits, and two threads that are inside at once are noticed. The wrapper
    takes what the method takes: *args and **kwargs would cost half a microsecond a call.
    """

    names: dict[str, Any] = {"method": method, "refuse": _refuse_inside}
    passed = []
    for parameter in signature(method).parameters.values():
        by_name = parameter.kind is parameter.KEYWORD_ONLY
        passed.append(f"{parameter.name}={parameter.name}" if by_name else parameter.name)
    exec(_EXCLUSIVE.format(signature=_plain(signature(method)), passed=", ".join(passed)), names)
    call: Any = wraps(method)(names["call"])
    call.__defaults__ = method.__defaults__
    call.__kwdefaults__ = method.__kwdefaults__
    return cast(_F, call)


def _plain(of: Signature) -> Signature:
    """Return a signature without annotations, and with None for every default."""
    plain = [
        p.replace(annotation=p.empty, default=p.empty if p.default is p.empty else None)
        for p in of.parameters.values()
    ]
    return of.replace(parameters=plain, return_annotation=of.empty)


def _refuse_inside(name: str) -> NoReturn:
    raise ConcurrentCallError(
        f"{name} must wait until the call that is under way has returned: one thread at a time"
    )
