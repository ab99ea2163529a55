"""The oracle below the requests: a trie of pages, its recency and locks, the free pages, eviction.

A page of the tree is one page of key units. `full_time` and `swa_time` are ticks of a logical
clock: the page with the smallest one goes first. Within one touch, Full pages tick from the deepest
up, so a path is eaten from its end; SWA pages tick from the shallowest down, so a window is eaten
from its start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from kvcache.oracle.state import TreePage


@dataclass(eq=False)
class Page:
    """One page of the tree. A root has no parent and no ids of its own."""

    unit_key: tuple[object, ...]
    parent: Page | None
    full_id: int
    swa_id: int | None  # None: a tombstone
    children: dict[tuple[object, ...], Page] = field(default_factory=dict)
    full_locks: int = 0
    swa_locks: int = 0
    full_time: int = 0
    swa_time: int = 0
    attached: bool = True  # False once it has left the tree
    lost_behind: int = 0  # pages below it that have left the tree
    window: Window | None = None  # that ends with it
    windows: int = 0  # that cover it
    tail: int = 0  # pages of the last prompt through it
    answer_tail: int = 0  # the same with its answer


@dataclass(eq=False)
class Window:
    """The kept SWA pages that end at a checkpoint."""

    pages: list[Page]
    kind: int
    born: int
    last: int
    uses: int
    priority: int
    awaited: int = 0  # clock of the last match that would resume there, and 1; 0: none
    gap: int = 0  # admissions between uses, in 1/256; 0: unknown
    inherited: set[int] = field(default_factory=set)
    key: int = 0


class ReferenceTree:
    """Roots by namespace handle, and the pages that nobody holds."""

    def __init__(
        self, *, page_size: int, keep: int, full_pages: int, swa_pages: int, bigram: bool
    ) -> None:
        self.page_size, self.keep, self.bigram = page_size, keep, bigram
        self.all_full = frozenset(range(1, full_pages + 1))
        self.all_swa = frozenset(range(1, swa_pages + 1))
        self.free_full, self.free_swa = set(self.all_full), set(self.all_swa)
        self.roots: dict[int, Page] = {}
        self.clock = 0
        self.counts: Counter[str] = Counter()

    # lengths

    def floor(self, tokens: int) -> int:
        return tokens - tokens % self.page_size

    def num_pages(self, tokens: int) -> int:
        return len(range(0, tokens, self.page_size))

    def end(self, computed: int) -> int:
        """What a commit inserts: whole pages of units; a bigram unit needs the token after it."""
        return self.floor(max(0, computed - 1) if self.bigram else computed)

    def window(self, end: int) -> list[int]:
        """Indices of the pages with a token of [end - keep, end)."""
        return sorted({t // self.page_size for t in range(max(0, end - self.keep), end)})

    def resend_end(self, tokens: int) -> int:
        """What the same key can reuse when it comes again without its last unit."""
        return self.end(max(0, tokens - 1))

    def frontier(self, computed: int) -> int:
        """Where the first page begins that the windows before both ends still need."""
        end = self.resend_end(computed)
        needed = self.window(end)
        return needed[0] * self.page_size if needed else end

    def units(self, tokens: list[int]) -> list[object]:
        return [*pairwise(tokens)] if self.bigram else [*tokens]

    def unit_pages(self, tokens: list[int]) -> list[tuple[object, ...]]:
        """The whole pages of a key, each the tuple of its units."""
        units, size = self.units(tokens), self.page_size
        return [tuple(units[i : i + size]) for i in range(0, len(units) - size + 1, size)]

    # pages of the tree

    def pages(self) -> Iterator[tuple[int, Page]]:
        """Every page with its namespace, parents before children."""
        for handle, root in self.roots.items():
            todo = [*root.children.values()]
            while todo:
                page = todo.pop()
                todo.extend(page.children.values())
                yield handle, page

    def path_pages(self, root: Page) -> list[Page]:
        """Every page below `root`."""
        below = [*root.children.values()]
        for page in below:
            below.extend(page.children.values())
        return below

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def touch_full(self, pages: list[Page]) -> None:
        for page in reversed(pages):
            page.full_time = self.tick()

    def touch_swa(self, pages: list[Page]) -> None:
        for page in pages:
            page.swa_time = self.tick()

    def live(self, path: list[Page]) -> bool:
        """Whether the end of `path` is a reusable length: its whole window is live."""
        return all(path[i].swa_id is not None for i in self.window(len(path) * self.page_size))

    def path_of(self, page: Page) -> list[Page]:
        path = []
        walk: Page | None = page
        while walk is not None and walk.parent is not None:
            path.append(walk)
            walk = walk.parent
        return path[::-1]

    def remove(self, page: Page) -> None:
        assert page.parent is not None
        assert not page.children
        self.drop_swa(page)
        self.free_full.add(page.full_id)
        del page.parent.children[page.unit_key]
        page.attached = False
        above: Page | None = page.parent
        while above is not None:
            above.lost_behind += 1
            above = above.parent

    def drop_swa(self, page: Page) -> None:
        if page.swa_id is not None:
            self.free_swa.add(page.swa_id)
            page.swa_id = None

    # locks

    def lock(self, full: list[Page], swa: list[Page]) -> None:
        for page in full:
            page.full_locks += 1
        for page in swa:
            assert page.swa_id is not None
            page.swa_locks += 1

    def unlock(self, full: list[Page], swa: list[Page]) -> None:
        """Take locks away; what nobody locks any more is as recent as if it were touched now."""
        for page in full:
            page.full_locks -= 1
        for page in swa:
            page.swa_locks -= 1
        self.touch_full([page for page in full if page.full_locks == 0])
        self.touch_swa(
            [p for p in swa if p.swa_locks == 0 and p.swa_id is not None and p.windows == 0]
        )

    def unlocked(self) -> tuple[int, int]:
        """Pages of the tree that eviction could free: Full, SWA."""
        pages = [page for _, page in self.pages()]
        full = sum(page.full_locks == 0 for page in pages)
        return full, sum(page.swa_locks == 0 and page.swa_id is not None for page in pages)

    # eviction

    def loose(self) -> list[Page]:
        """Live pages that nothing keeps."""
        return [p for _, p in self.pages() if p.swa_id is not None and p.swa_locks == 0]

    def make_loose(self) -> bool:
        """Give up something that keeps pages; whether there was anything."""
        return False

    def evict(self, full_need: int, swa_need: int) -> tuple[int, int]:
        """Free at least so many pages, or all that may go; return how many: Full, SWA."""
        full_before, swa_before = len(self.free_full), len(self.free_swa)
        while len(self.free_full) - full_before < full_need:
            leaves = [p for _, p in self.pages() if not p.children and p.full_locks == 0]
            if not leaves:
                break
            self.remove_and_trim(min(leaves, key=lambda page: page.full_time))
        while len(self.free_swa) - swa_before < swa_need:
            loose = self.loose()
            if not loose:
                if self.make_loose():
                    continue
                break
            victim = min(loose, key=lambda page: page.swa_time)
            if victim.children or victim.full_locks > 0:
                self.drop_swa(victim)
                self.counts["tombstoned"] += 1
            else:
                self.remove_and_trim(victim)
        freed = len(self.free_full) - full_before, len(self.free_swa) - swa_before
        self.counts["evicted_full"] += freed[0]
        self.counts["evicted_swa"] += freed[1]
        return freed

    def remove_and_trim(self, page: Page) -> None:
        """Remove a leaf, and the leaves that this leaves behind without a window."""
        parent = page.parent
        self.remove(page)
        while (
            parent is not None
            and parent.parent is not None
            and not parent.children
            and parent.full_locks == 0
            and not self.live(self.path_of(parent))
        ):
            parent, tombstone = parent.parent, parent
            self.remove(tombstone)
            self.counts["trimmed"] += 1

    def flush(self) -> tuple[int, int]:
        return self.evict(len(self.all_full), len(self.all_swa))

    def drop_root(self, handle: int) -> tuple[int, int]:
        """Remove a namespace with all its pages; none may be locked. How many: Full, SWA."""
        pages = [page for owner, page in self.pages() if owner == handle]
        freed = len(pages), sum(page.swa_id is not None for page in pages)
        for page in reversed(pages):
            self.remove(page)
        del self.roots[handle]
        self.counts["evicted_full"] += freed[0]
        self.counts["evicted_swa"] += freed[1]
        return freed

    # comparing

    def tree_pages(self) -> dict[int, TreePage]:
        tree = {}
        for handle, page in self.pages():
            assert page.parent is not None
            above, swa_id = page.parent.full_id, page.swa_id or 0
            tree[page.full_id] = TreePage(
                handle, above, page.unit_key, swa_id, page.full_locks, page.swa_locks
            )
        return tree

    def full_order(self) -> list[int]:
        pages = [page for _, page in self.pages() if page.full_locks == 0]
        return [page.full_id for page in sorted(pages, key=lambda page: page.full_time)]

    def swa_order(self) -> list[int]:
        pages = sorted(self.loose(), key=lambda page: page.swa_time)
        return [page.full_id for page in pages]
