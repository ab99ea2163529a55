"""A scene for the oracle's own tests: it hands itself the lowest free pages."""

from __future__ import annotations

from typing import Any

from kvcache.oracle.manager import Match, ReferenceManager


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def run_of(first: int, length: int) -> list[int]:
    """Tokens that no other run shares."""
    return [first * 1000 + i for i in range(length)]


class Scene:
    """An oracle that hands itself the lowest free pages, and requests by row.

    Most requests here end a token behind a page: exactly at one, they keep a window for the page before too.
    """

    def __init__(self, **config: Any) -> None:
        defaults = {"page_size": 4, "window": 8, "full_pages": 64, "swa_pages": 64}
        defaults |= {"max_rows": 8, "max_len": 256}
        self.oracle = ReferenceManager(**{**defaults, **config})
        self.oracle.namespace(None, 0)

    def take(self, row: int, page: int) -> tuple[int, int | None]:
        swa_id = min(self.oracle.free_swa) if self.oracle.has_swa else None
        return min(self.oracle.free_full), swa_id

    def match(self, key: list[int], touch: bool = False) -> tuple[int, int, int]:
        found = self.find(key, touch)
        return found.full_hit, found.reuse, found.branch

    def find(self, key: list[int], touch: bool = True, namespace: int = 0) -> Match:
        return self.oracle.match([(namespace, key)], touch=touch)[0]

    def start(self, row: int, key: list[int], namespace: int = 0) -> Match:
        found = self.find(key, namespace=namespace)
        self.oracle.handles.clear()  # rows go by small numbers here, again and again
        self.oracle.admit([found], [row])
        self.oracle.check()
        return found

    def compute(self, row: int, length: int) -> None:
        self.oracle.extend([row], [length], self.take)
        self.oracle.advance([row])
        self.oracle.check()

    def chunk(self, row: int, key: list[int], length: int, hints: list[int] | None = None) -> int:
        self.compute(row, length)
        return self.commit(row, key, hints)

    def commit(self, row: int, key: list[int], hints: list[int] | None = None) -> int:
        owned = self.oracle.commit([row], [key], [hints or []])[0].owned
        self.oracle.check()
        self.oracle.check_commit(row, key)
        return owned

    def slide(self, row: int) -> int:
        self.oracle.slide([row])
        self.oracle.check()
        return self.oracle.rows[row].frontier

    def finish(self, row: int, key: list[int], hints: list[int] | None = None) -> int:
        owned = self.oracle.finish([row], [key], [hints or []])[0].owned
        self.oracle.check()
        return owned

    def serve(self, key: list[int], chunks: tuple[int, ...] = (), slide: bool = False) -> Match:
        """Run a request from match to finish in row 7."""
        found = self.start(7, key)
        for end in (*chunks, len(key)):
            if end > found.reuse:
                self.chunk(7, key, end)
                if slide:
                    self.slide(7)
        self.finish(7, key)
        return found

    def evict(self, full: int = 0, swa: int = 0) -> tuple[int, int]:
        freed = self.oracle.evict(full, swa)
        self.oracle.check()
        return freed

    def live(self, key: list[int]) -> str:
        """One letter a page of the path of `key`: L live, t tombstone."""
        page, out = self.oracle.roots[0], ""
        for units in self.oracle.unit_pages(key):
            if units not in page.children:
                break
            page = page.children[units]
            out += "t" if page.swa_id is None else "L"
        return out

    def assert_empty(self) -> None:
        self.oracle.check()
        self.oracle.flush()
        assert self.oracle.free_full == self.oracle.all_full
        assert self.oracle.free_swa == self.oracle.all_swa
