"""The oracle between admission and insert: what requests match, hold, compute and slide past."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

from kvcache.errors import CapacityError, InvalidInputError, ReceiptError, StaleMatchError
from kvcache.oracle.tree import Page
from kvcache.oracle.windows import ReferenceWindows

# (row handle, page index) -> the Full page and the SWA page (None without an SWA pool) that were put there
Taken = Callable[[int, int], "tuple[int, int | None]"]


def index_of(handle: int) -> int:
    """The row that a handle names: its low half."""
    return handle & 0xFFFFFFFF


class Disagreement(Exception):
    """The manager did something that the oracle rules out."""


def agree(holds: bool, rule: str) -> None:
    """Raise Disagreement unless the rule holds."""
    if not holds:
        raise Disagreement(rule)


@dataclass(eq=False)
class Row:
    """One running request: pages of the tree first (`path`), then its own."""

    namespace: int
    path: list[Page]
    own: list[tuple[int, int | None]]  # (Full page, SWA page or None below the frontier)
    computed: int
    allocated: int
    frontier: int
    branch: int
    swa_locked: list[Page]  # the window that this row locks; empty after an early release
    prompt: int = 0  # tokens of the prompt
    learns: bool = False  # whether it is to be learned yet where it forks
    priority: int = 0


class Pin(NamedTuple):
    """A prefix that stays."""

    namespace: int
    path: list[Page]
    window: list[Page]
    until: int | None  # admissions


class Match(NamedTuple):
    """What `match` found for one request. Lengths in tokens; branch -1 = none."""

    namespace: int
    full_hit: int
    reuse: int
    branch: int
    path: list[Page]  # the pages of [0, reuse)
    lost_behind: int  # pages behind `path` that had left the tree
    key_len: int  # tokens of the key


class ReferenceRequests(ReferenceWindows):
    """Rows: matching, admission, growth, sliding. The arguments are those of ReferenceManager."""

    def __init__(
        self,
        *,
        page_size: int,
        window: int | None,
        full_pages: int,
        swa_pages: int,
        max_rows: int,
        max_len: int,
        bigram: bool = False,
        window_slack: int = 0,
        branch: bool = False,
        hints: bool = False,
        every: int = 0,
        ladder: tuple[int, int] | None = None,
        value: bool = False,
        chunks: bool = False,
        pin_share: float = 0.25,
        max_namespaces: int = 4096,
    ) -> None:
        super().__init__(
            page_size=page_size,
            keep=0 if window is None else window - window_slack,
            full_pages=full_pages,
            swa_pages=swa_pages,
            bigram=bigram,
        )
        self.has_swa = window is not None
        self.attention_window = window or 0
        self.max_rows, self.max_len, self.max_namespaces = max_rows, max_len, max_namespaces
        self.with_branch, self.with_hints, self.every = branch, hints, every
        self.with_chunks = chunks
        self.ladder, self.by_value = ladder if self.has_swa else None, value and self.has_swa
        self.forget_windows()
        # the default first, then in the order of look-up
        self.namespaces: dict[Hashable, int] = {}
        self.looked_up: set[Hashable] = set()  # since the last match
        self.rows: dict[int, Row] = {}  # by handle
        self.handles: set[int] = set()  # every one that was ever given out
        self.pin_share = pin_share
        self.pins: dict[int, Pin] = {}  # by receipt
        self.num_admitted = 0

    # namespaces

    def namespace(self, key: Hashable, handle: int | None) -> None:
        """Name a namespace; `handle` is the one that the manager gave (None: it refused).

        The first one named is the default.
        """
        self.look_up([key], None if handle is None else [handle])

    def look_up(self, keys: list[Hashable], handles: list[int] | None) -> None:
        """Name the namespaces of a queue, all or none; `handles` are what the manager gave.

        Where all are in use, others give up what they have, the one looked up longest ago first: but not
        those that are asked for, nor those that a row runs in (they count as looked up now), nor any that was
        looked up since the last match.
        """
        new = [key for key in dict.fromkeys(keys) if key not in self.namespaces]
        room = self.max_namespaces - len(self.namespaces)
        running: list[Hashable] = []
        given_up: list[Hashable] = []
        for key in [*self.namespaces][1:]:
            if room + len(given_up) >= len(new) or key in self.looked_up:
                break
            if key not in keys:
                (running if self.in_use(self.namespaces[key]) else given_up).append(key)
        if room + len(given_up) < len(new):
            raise CapacityError(f"namespaces: {self.max_namespaces} are in use")
        for key in running:
            self.note_look_up(key)
        for key in given_up:
            self.forget(self.namespaces[key])
        agree(handles is not None and len(handles) == len(keys), "a namespace has a handle")
        for key, handle in zip(keys, handles or [], strict=True):
            if key in self.namespaces:
                agree(handle == self.namespaces[key], "a known namespace keeps its handle")
            else:
                agree(handle not in self.roots, "a new namespace has its own handle")
                self.namespaces[key] = handle
                self.roots[handle] = Page((), None, 0, None)
            self.note_look_up(key)

    def note_look_up(self, key: Hashable) -> None:
        if self.namespaces[key] != self.default:
            self.namespaces[key] = self.namespaces.pop(key)  # the last one now
            self.looked_up.add(key)

    @property
    def default(self) -> int:
        return next(iter(self.namespaces.values()))

    def in_use(self, handle: int) -> bool:
        holders: list[Row | Pin] = [*self.rows.values(), *self.pins.values()]
        return any(holder.namespace == handle for holder in holders)

    def forget(self, handle: int) -> tuple[int, int]:
        self.namespaces = {key: owner for key, owner in self.namespaces.items() if owner != handle}
        self.looked_up &= self.namespaces.keys()
        return self.drop_root(handle)

    def drop_namespace(self, handle: int) -> tuple[int, int]:
        """Free all its pages; return how many: Full, SWA."""
        if handle not in self.roots or handle == self.default or self.in_use(handle):
            raise InvalidInputError("handle must be of a namespace, not the default, not in use")
        return self.forget(handle)

    # matching and admission

    def match(self, requests: list[tuple[int, list[int]]], *, touch: bool = True) -> list[Match]:
        """Match (namespace handle, tokens) of each request, in order."""
        self.check_handles([handle for handle, _ in requests])
        if requests:
            self.looked_up.clear()
        matches = [self.match_one(handle, tokens, touch) for handle, tokens in requests]
        self.counts["branch_points"] += sum(match.branch >= 0 for match in matches)
        return matches

    def check_handles(self, handles: list[int]) -> None:
        for handle in handles:
            if handle not in self.roots:
                raise InvalidInputError(f"namespace must be a known handle, got {handle}")

    def match_one(self, handle: int, tokens: list[int], touch: bool) -> Match:
        path: list[Page] = []
        page: Page | None = self.roots[handle]
        for unit_key in self.unit_pages(tokens):
            assert page is not None
            page = page.children.get(unit_key)
            if page is None:
                break
            path.append(page)
        lengths = range(len(path), -1, -1)
        reuse = next(n for n in lengths if self.live(path[:n]))
        window = self.window(reuse * self.page_size)
        if touch:
            self.touch_full(path)
            self.touch_swa([path[i] for i in window])
            self.await_window(path[:reuse])
        branch = len(path) * self.page_size if len(path) > reuse else -1
        size = self.page_size
        lost = path[reuse - 1].lost_behind if reuse else 0
        return Match(
            handle, len(path) * size, reuse * size, branch, path[:reuse], lost, len(tokens)
        )

    def stale(self, match: Match) -> bool:
        """Whether something that `match` would reuse has gone since."""
        if not all(page.attached for page in match.path):
            return True
        return match.namespace not in self.roots or not self.live(match.path)

    def disturbed(self, match: Match) -> bool:
        """Whether something behind the reusable pages has gone since: `admit` may refuse then too.

        The manager finds the prefix by the end of an edge of its tree, which may be gone then. That edge can
        have grown since the match: what went need not have been there.
        """
        return bool(match.path) and match.path[-1].lost_behind != match.lost_behind

    def admit(
        self, matches: list[Match], rows: list[int] | None, priorities: list[int] | None = None
    ) -> None:
        """Give each match a row; `rows` are the handles that the manager chose (None: it refused)."""
        if len(matches) > self.max_rows - len(self.rows):
            raise CapacityError(f"rows: {len(matches)} needed")
        refused = rows is None
        if any(self.stale(m) or (refused and self.disturbed(m)) for m in matches):
            raise StaleMatchError("a match must still hold")
        agree(rows is not None, "the manager refuses an admission only if it must")
        assert rows is not None
        priorities = priorities or [0] * len(matches)
        for match, row, priority in zip(matches, rows, priorities, strict=True):
            agree(0 <= index_of(row) < self.max_rows, f"{row} is the handle of a row")
            in_use = {index_of(other) for other in self.rows}
            agree(index_of(row) not in in_use, "a new row was not in use")
            agree(row not in self.handles, "a handle is of one request for ever")
            self.handles.add(row)
            learns = self.by_value and self.note_admission(
                match.path, match.full_hit // self.page_size, priority
            )
            window = [match.path[i] for i in self.window(match.reuse)]
            self.lock(match.path, window)
            reuse = match.reuse
            self.rows[row] = Row(
                match.namespace,
                [*match.path],
                [],
                reuse,
                reuse,
                0,
                match.branch,
                window,
                match.key_len + 1,
                learns,
                priority,
            )
        self.num_admitted += len(matches)
        ended = [r for r, pin in self.pins.items() if pin.until and pin.until <= self.num_admitted]
        self.counts["pins_ended"] += len(ended)
        self.unpin(ended)

    def pin(
        self, requests: list[tuple[int, list[int]]], ttl: int | None, receipts: list[int] | None
    ) -> list[int]:
        """Pin what is cached of each key, under the receipts that the manager gave; the lengths that stay."""
        self.check_handles([handle for handle, _ in requests])
        matches = [self.match_one(handle, tokens, touch=False) for handle, tokens in requests]
        standing = [*self.pins.values()]
        paths = [pin.path for pin in standing] + [match.path for match in matches]
        windows = [len(self.window(len(path) * self.page_size)) for path in paths]
        full_budget, swa_budget = (
            int(self.pin_share * len(pool)) for pool in (self.all_full, self.all_swa)
        )
        if len(paths) > min(full_budget, 1024):
            raise CapacityError("pins: too many")
        if sum(map(len, paths)) > full_budget or sum(windows) > swa_budget:
            raise CapacityError("pins: too many for the budget")
        if requests:
            self.looked_up.clear()
        agree(receipts is not None and len({*receipts, *self.pins}) == len(paths), "a receipt each")
        for receipt, match in zip(receipts or [], matches, strict=True):
            window = [match.path[i] for i in self.window(match.reuse)]
            self.lock(match.path, window)
            until = None if ttl is None else self.num_admitted + ttl
            self.pins[receipt] = Pin(match.namespace, match.path, window, until)
            self.counts["pinned"] += bool(match.path)
        return [match.reuse for match in matches]

    def unpin(self, receipts: list[int]) -> None:
        for i, receipt in enumerate(receipts):
            if receipt not in self.pins or receipt in receipts[:i]:
                raise ReceiptError(f"pins must be receipts of standing pins, once, got {receipt}")
        for receipt in receipts:
            pin = self.pins.pop(receipt)
            self.unlock(pin.path, pin.window)

    def capacity(self) -> tuple[int, int, int]:
        full, swa = self.unlocked()
        free_rows = self.max_rows - len(self.rows)
        return free_rows, len(self.free_full) + full, len(self.free_swa) + swa

    # running requests

    def running(self, rows: list[int]) -> list[Row]:
        for i, row in enumerate(rows):
            if row in rows[:i]:
                raise InvalidInputError(f"rows must be distinct, got {row} twice")
            if row not in self.rows:
                raise ReceiptError(f"rows must be handles of running requests, got {row}")
        return [self.rows[row] for row in rows]

    def extend(self, rows: list[int], new_lens: list[int], taken: Taken) -> None:
        states = self.running(rows)
        for state, new_len in zip(states, new_lens, strict=True):
            if not state.computed <= new_len <= self.max_len:
                raise InvalidInputError(f"new_len must be in [{state.computed}, {self.max_len}]")
        self.grow(rows, [max(s.allocated, n) for s, n in zip(states, new_lens, strict=True)], taken)

    def step(self, rows: list[int], taken: Taken) -> None:
        states = self.running(rows)
        if any(state.computed + 1 > self.max_len for state in states):
            raise InvalidInputError(f"rows must have room for a token, max_len is {self.max_len}")
        self.grow(rows, [max(s.allocated, s.computed + 1) for s in states], taken)

    def grow(self, rows: list[int], allocated: list[int], taken: Taken) -> None:
        """Take the pages for `allocated` tokens of each row, evicting what must go first."""
        states = [self.rows[row] for row in rows]
        held = [self.num_pages(state.allocated) for state in states]
        wanted = [self.num_pages(tokens) for tokens in allocated]
        need = sum(wanted) - sum(held)
        swa_need = need if self.has_swa else 0
        _, full_room, swa_room = self.capacity()
        if need > full_room or swa_need > swa_room:
            raise CapacityError(f"pages: {need} needed, got room for {full_room}, SWA {swa_room}")
        self.evict(max(0, need - len(self.free_full)), max(0, swa_need - len(self.free_swa)))
        for i, (row, state) in enumerate(zip(rows, states, strict=True)):
            state.allocated = allocated[i]
            for page in range(held[i], wanted[i]):
                full_id, swa_id = taken(row, page)
                agree(full_id in self.free_full, f"row {row} got a free page, not {full_id}")
                self.free_full.remove(full_id)
                if self.has_swa:
                    agree(swa_id in self.free_swa, f"row {row} got a free SWA page, not {swa_id}")
                    assert swa_id is not None
                    self.free_swa.remove(swa_id)
                state.own.append((full_id, swa_id))

    def advance(self, rows: list[int], lens: list[int] | None = None) -> None:
        states = self.running(rows)
        lens = [state.allocated for state in states] if lens is None else lens
        for state, computed in zip(states, lens, strict=True):
            if not state.computed <= computed <= state.allocated:
                raise InvalidInputError(f"lens must be in [{state.computed}, {state.allocated}]")
        for state, computed in zip(states, lens, strict=True):
            state.computed = computed

    def slide(self, rows: list[int]) -> None:
        states = self.running(rows)
        for state in states if self.has_swa else []:
            state.frontier = max(state.frontier, self.frontier(state.computed))
            owned = len(state.path)
            for i, (full_id, swa_id) in enumerate(state.own):
                if (owned + i) * self.page_size < state.frontier and swa_id is not None:
                    self.free_swa.add(swa_id)
                    state.own[i] = (full_id, None)
            if state.frontier >= owned * self.page_size and state.swa_locked:
                self.unlock([], state.swa_locked)
                state.swa_locked = []
                self.counts["early_releases"] += 1
