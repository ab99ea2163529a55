"""A random life of request rows, without a tree, driven through the kernels' wrappers.

The host side is what the design says it is: it knows lengths and counts, never a page id. Pools are small,
so that pages are reused out of order; `check` compares sets of pages, not sums.
"""

from __future__ import annotations

import random

import torch

from kvcache.kernels import layout
from kvcache.kernels.advance import advance
from kvcache.kernels.apply import apply
from kvcache.kernels.extend import extend
from kvcache.kernels.slide import slide
from kvcache.kernels.step import step
from kvcache.kernels.translate import translate

INT = torch.int32


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


class Life:
    """Rows that grow, slide and end at random; `act` does one call (or a plan's one launch)."""

    def __init__(
        self,
        seed: int,
        *,
        page_size: int,
        max_rows: int,
        full_pages: int,
        swa_pages: int,
        keep: int,
    ) -> None:
        self.rng = random.Random(seed)
        self.page_size, self.max_rows, self.keep = page_size, max_rows, keep
        self.full_pages, self.swa_pages = full_pages, swa_pages
        self.pages_per_row = max(2, full_pages // 3)
        self.page_table = torch.zeros((max_rows, self.pages_per_row), dtype=INT)
        self.slab = torch.zeros(1, dtype=INT)
        self.full_stack = torch.arange(full_pages, 0, -1, dtype=INT)
        self.swa_stack = torch.arange(swa_pages, 0, -1, dtype=INT)
        self.swa_map = torch.zeros(full_pages + 1, dtype=INT)
        self.row_state = torch.zeros((layout.ROW_FIELDS, max_rows), dtype=INT)
        self.tops = torch.tensor([full_pages, swa_pages], dtype=INT)
        # host mirror: (computed, allocated, frontier) of each row, free pages of each pool
        self.rows = [[0, 0, 0] for _ in range(max_rows)]
        self.full_free, self.swa_free = full_pages, swa_pages
        self.calls = 0

    def act(self) -> str:
        """Do one random thing; return its name."""
        name = self.rng.choice(["extend", "extend", "step", "step", "advance", "slide", "end"])
        getattr(self, f"_{name}")()
        self.calls += 1
        return name

    def tensors(self) -> dict[str, torch.Tensor]:
        """All device state."""
        names = ("page_table", "full_stack", "swa_stack", "swa_map", "row_state", "tops")
        return {name: getattr(self, name) for name in names}

    def _some_rows(self) -> list[int]:
        return self.rng.sample(range(self.max_rows), self.rng.randint(0, self.max_rows))

    def _pages(self, tokens: int) -> int:
        return _ceil(tokens, self.page_size)

    def _extend(self) -> None:
        desc = torch.empty((layout.EXTEND_FIELDS, self.max_rows), dtype=INT)
        total = num = largest = 0
        most = self.pages_per_row * self.page_size
        for row in self._some_rows():
            allocated = self.rows[row][1]
            new = min(most, allocated + self.rng.randint(0, 4 * self.page_size))
            pages = self._pages(new) - self._pages(allocated)
            if total + pages > min(self.full_free, self.swa_free):
                continue
            column = [row, self._pages(allocated), pages, total, new]
            desc[:, num] = torch.tensor(column, dtype=INT)
            self.rows[row][1] = new
            total, num, largest = total + pages, num + 1, max(largest, pages)
        extend(
            desc,
            self.page_table,
            self.full_stack,
            self.swa_stack,
            self.swa_map,
            self.row_state,
            self.tops,
            num_rows=num,
            full_top=self.full_free,
            swa_top=self.swa_free,
            total=total,
            max_pages=largest,
            has_swa=True,
        )
        self.full_free -= total
        self.swa_free -= total

    def _step(self) -> None:
        chosen = []
        for row in self._some_rows():
            computed, allocated, _ = self.rows[row]
            new = max(allocated, computed + 1)
            pages = self._pages(new) - self._pages(allocated)
            if pages > min(self.full_free, self.swa_free) or self._pages(new) > self.pages_per_row:
                continue
            self.rows[row][1] = new
            self.full_free -= pages
            self.swa_free -= pages
            chosen.append(row)
        step(
            torch.tensor([*chosen, -1], dtype=INT),
            self.page_table,
            self.full_stack,
            self.swa_stack,
            self.swa_map,
            self.row_state,
            self.tops,
            num_rows=len(chosen),
            page_size=self.page_size,
            has_swa=True,
        )

    def _advance(self) -> None:
        rows = self._some_rows()
        named = self.rng.random() < 0.5
        lens = [self.rng.randint(self.rows[r][0], self.rows[r][1]) for r in rows]
        for row, new in zip(rows, lens, strict=True):
            self.rows[row][0] = new if named else self.rows[row][1]
        advance(
            torch.tensor([*rows, -1], dtype=INT),
            torch.tensor(lens, dtype=INT) if named else None,
            self.row_state,
            num_rows=len(rows),
        )

    def _slide(self) -> None:
        rows = self._some_rows()
        for row in rows:
            computed, _, old = self.rows[row]
            last_end = max(0, computed - 1) // self.page_size * self.page_size
            new = max(old, max(0, last_end - self.keep) // self.page_size * self.page_size)
            self.swa_free += (new - old) // self.page_size
            self.rows[row][2] = new
        slide(
            torch.tensor([*rows, -1], dtype=INT),
            self.page_table,
            self.swa_map,
            self.swa_stack,
            self.row_state,
            self.tops,
            num_rows=len(rows),
            page_size=self.page_size,
            keep=self.keep,
            bigram=False,
        )

    def _end(self) -> None:
        columns = []
        largest = 0
        for row in self.rng.sample(range(self.max_rows), self.rng.randint(0, self.max_rows // 2)):
            _, allocated, frontier = self.rows[row]
            first_live, end = frontier // self.page_size, self._pages(allocated)
            for first, last, live in ((0, first_live, False), (first_live, end, True)):
                swa_pos = self.swa_free if live else -1
                op = layout.FREE_ROW
                columns.append([op, last - first, row, first, 0, self.full_free, swa_pos])
                self.full_free += last - first
                self.swa_free += (last - first) * live
                largest = max(largest, last - first)
            columns.append([layout.SET_ROW, 0, row, 0, 0, 0, -1])
            self.rows[row] = [0, 0, 0]
        desc = torch.tensor([*columns, [0] * layout.APPLY_FIELDS], dtype=INT).T.contiguous()
        apply(
            desc,
            self.page_table,
            self.slab,
            self.swa_map,
            self.full_stack,
            self.swa_stack,
            self.row_state,
            self.tops,
            start=0,
            num=len(columns),
            max_pages=largest,
            full_top=self.full_free,
            swa_top=self.swa_free,
        )

    def check(self) -> None:
        """Compare lengths, counts and sets of pages with what the host knows."""
        assert self.tops.tolist() == [self.full_free, self.swa_free]
        own_full: list[int] = []
        live: dict[int, int] = {}
        for row, (computed, allocated, frontier) in enumerate(self.rows):
            assert self.row_state[:, row].tolist() == [computed, allocated, 0, frontier]
            pages = self.page_table[row, : self._pages(allocated)].tolist()
            own_full += pages
            live |= {page: int(self.swa_map[page]) for page in pages[frontier // self.page_size :]}
        free_full = self.full_stack[: self.full_free].tolist()
        free_swa = self.swa_stack[: self.swa_free].tolist()
        assert sorted(own_full + free_full) == list(range(1, self.full_pages + 1))
        assert sorted([*live.values(), *free_swa]) == list(range(1, self.swa_pages + 1))
        mapped = {page: swa for page, swa in enumerate(self.swa_map.tolist()) if swa != 0}
        assert mapped == live
        slots = torch.arange((self.full_pages + 1) * self.page_size)
        got = translate(slots, self.swa_map, page_size=self.page_size).tolist()
        for slot, swa_slot in enumerate(got):
            page, offset = divmod(slot, self.page_size)
            assert swa_slot == (live[page] * self.page_size + offset if page in live else 0)
            assert swa_slot < (self.swa_pages + 1) * self.page_size
