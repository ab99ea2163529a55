"""The oracle's windows: which are kept, what they are worth, and which one goes (retention `Value`).

Whole numbers throughout, as the manager counts: chances and logarithms are rounded down at the same places.
"""

from __future__ import annotations

import math
from collections import Counter

from kvcache.oracle.tree import Page, ReferenceTree, Window

# classes of checkpoints: rungs of the ladder are 0 .. 15
PROMPT, ANSWER, FORK, HINT, PERIOD, USED_ONCE, USED_OFTEN, CHUNK = range(16, 24)
ONE = 1 << 16
HORIZON = 256
LOCKED, AWAITED = 1 << 29, 1 << 28


def log2(x: int) -> int:
    """log2(x) in 1/256, of x rounded down to 9 significant binary digits."""
    bits = x.bit_length() - 1
    rest = x * 256 // 2**bits - 256
    return 256 * bits + round(256 * math.log2(1 + rest / 256))


class ReferenceWindows(ReferenceTree):
    """Pages that windows keep; with `by_value` False there are none, and all goes by recency."""

    by_value = False
    ladder: tuple[int, int] | None = None  # tokens of the first rung, factor

    def forget_windows(self) -> None:
        """As nothing had ever been kept or learned."""
        self.windows: list[Window] = []  # in the order in which they were made
        self.hits: Counter[int] = Counter()
        self.made: Counter[int] = Counter()
        self.admissions = self.born = self.evicted_key = 0
        self.hand: Window | None = None  # whose key was computed anew last
        self.low_clock = 0

    # worth

    def chance(self, kind: int) -> int:
        return (self.hits[kind] + ONE // 2) * ONE // (self.made[kind] + ONE)

    def key_of(self, window: Window) -> int:
        end = window.pages[-1]
        depth = len(self.path_of(end))
        above = self.fallback(window)
        lost = depth - (len(self.path_of(above.pages[-1])) if above else 0)
        freed = sum(page.windows == 1 and page.swa_locks == 0 for page in window.pages)
        if window.uses:
            chance = self.chance(USED_ONCE if window.uses == 1 else USED_OFTEN)
            if window.gap:
                chance = max(chance, chance * HORIZON * 256 // window.gap)
        else:
            chance = self.chance(window.kind)
        chance += sum(self.chance(kind) for kind in window.inherited - {window.kind})
        key = (
            window.last
            + (window.priority - 16) * 256
            + log2(max(chance, 1))
            + log2(lost)
            - log2(max(freed, 1))
        )
        if end.swa_locks:
            return key + LOCKED
        awaited = window.awaited and self.admissions - window.awaited < 64
        return key + AWAITED if awaited else key

    def fallback(self, window: Window) -> Window | None:
        """The next shallower window on the path."""
        page = window.pages[-1].parent
        while page is not None and page.window is None:
            page = page.parent
        return page.window if page is not None else None

    def rekey(self, window: Window) -> None:
        window.key = self.key_of(window)

    def refresh(self, num: int) -> None:
        for _ in range(min(num, len(self.windows))):
            at = self.windows.index(self.hand) + 1 if self.hand else 0
            self.hand = self.windows[at % len(self.windows)]
            self.rekey(self.hand)

    def least(self) -> Window | None:
        if not self.windows:
            return None
        if len(self.windows) <= 8 * len(self.window(self.page_size << 20)):
            self.refresh(len(self.windows))
            return min(self.windows, key=lambda w: (w.key, w.born))
        for _ in range(16):
            least = min(self.windows, key=lambda w: (w.key, w.born))
            key = self.key_of(least)
            if key <= least.key:
                break
            least.key = key
        return least

    def await_window(self, path: list[Page]) -> None:
        """A waiting request would resume at the end of `path`."""
        if path and path[-1].window is not None:
            path[-1].window.awaited = self.admissions + 1
            self.rekey(path[-1].window)

    # learning

    def note_admission(self, path: list[Page], full_hit: int, priority: int) -> bool:
        """Count an admission; return whether its fork is to be learned yet."""
        self.admissions += 1
        if self.admissions % 100 == 0:
            for counter in (self.hits, self.made):
                for kind in counter:
                    counter[kind] = counter[kind] * 9 // 10
        learns = True
        used = path[-1].window if path else None
        if used is not None:
            if used.uses and len(path) == full_hit:
                self.hits[USED_ONCE if used.uses == 1 else USED_OFTEN] += ONE
                learns = False
            gap = max(self.admissions - used.last, 1) * 256
            used.gap = min((used.gap + gap) // 2 if used.uses else gap, 2**31 - 1)
            self.made[USED_OFTEN if used.uses else USED_ONCE] += ONE
            used.uses = min(used.uses + 1, 2)
            used.last, used.awaited = self.admissions, 0
            used.priority = max(used.priority, priority)
            self.rekey(used)
        self.refresh(64)
        return learns

    def learn_fork(self, path: list[Page]) -> None:
        """A request forks at the end of `path` from what the tree has."""
        if not path:
            return
        hit, page = len(path), path[-1]
        if page.tail > hit:
            behind = (page.tail - hit) * self.page_size
            first, factor = self.ladder or (128, 2)
            reach, rung = max(self.page_size, first), 0
            while reach < behind and rung < 15:
                reach *= factor
                rung += 1
            self.hits[rung] += ONE
        elif hit >= page.answer_tail > page.tail:
            self.hits[ANSWER] += ONE
        else:
            self.hits[PROMPT] += ONE

    @staticmethod
    def note_tails(path: list[Page], prompt: int, end: int) -> None:
        for page in path:
            page.tail, page.answer_tail = prompt, end

    # making and dropping

    def make_window(self, path: list[Page], kind: int, priority: int) -> None:
        """Keep the window at the end of `path`, if all of it is live."""
        pages = [path[i] for i in self.window(len(path) * self.page_size)]
        there = path[-1].window
        if there is not None:
            there.last = self.admissions
            there.priority = max(there.priority, priority)
            if kind == FORK and there.uses < 2:
                there.uses = 2
                self.made[USED_OFTEN] += ONE
            self.rekey(there)
            return
        if any(page.swa_id is None for page in pages):
            return
        uses = 2 if kind == FORK else 0
        window = Window(pages, kind, self.born, self.admissions, uses, priority)
        self.born += 1
        self.made[USED_OFTEN if kind == FORK else kind] += ONE
        for page in pages:
            page.windows += 1
        path[-1].window = window
        self.windows.append(window)
        self.rekey(window)
        self.counts["windows"] += 1
        if kind < PROMPT and self.admissions > 200 and window.key < self.evicted_key:
            self.drop_window(window)
            self.counts["not_admitted"] += 1

    def drop_window(self, window: Window) -> None:
        """Forget a window; what nothing keeps any more goes first, its end last."""
        at = self.windows.index(window)
        if self.hand is window:
            self.hand = self.windows[at - 1] if at else None
        del self.windows[at]
        window.pages[-1].window = None
        for page in reversed(window.pages):
            page.windows -= 1
            if page.windows == 0 and page.swa_locks == 0:
                self.low_clock -= 1
                page.swa_time = self.low_clock

    def give_up(self, window: Window) -> None:
        """Drop the window worth least; the next shallower one takes over its classes."""
        self.evicted_key = window.key
        above = self.fallback(window)
        if above is not None:
            above.inherited |= window.inherited | {window.kind}
        self.drop_window(window)
        self.counts["given_up"] += 1

    # what goes by it

    def remove(self, page: Page) -> None:
        if page.window is not None:
            self.drop_window(page.window)
        super().remove(page)

    def rekey_ends(self, pages: list[Page], locks: int) -> None:
        for page in pages:
            if page.window is not None and page.swa_locks == locks:
                self.rekey(page.window)

    def lock(self, full: list[Page], swa: list[Page]) -> None:
        super().lock(full, swa)
        self.rekey_ends(swa, 1)

    def unlock(self, full: list[Page], swa: list[Page]) -> None:
        super().unlock(full, swa)
        self.rekey_ends(swa, 0)

    def loose(self) -> list[Page]:
        """Live pages that neither a lock nor a window keeps."""
        return [page for page in super().loose() if page.windows == 0]

    def make_loose(self) -> bool:
        """Give up a window, so that pages of it may go; whether there was one."""
        window = self.least()
        if window is not None:
            self.give_up(window)
        return window is not None
