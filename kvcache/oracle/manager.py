"""The oracle: what every call of the manager must do, said page by page in plain Python.

Lists, dicts and sets of page ids; every rule is the shortest statement of itself, at any cost. It
shares no code with what it checks. The one thing it does not foretell is which page ids, rows and
namespace handles the manager picks: it is told, and checks that each was free. `kvcache validate`
and the tests use it; it is too slow for anything else. The pages of the tree (trie, recency,
eviction) are in tree.py, rows and their growth in requests.py.
"""

from __future__ import annotations

from typing import NamedTuple

from kvcache.errors import InvalidInputError
from kvcache.oracle.requests import Disagreement, Match, ReferenceRequests, Row, Taken
from kvcache.oracle.state import RowState, State, WindowState, check_rules, require
from kvcache.oracle.tree import Page
from kvcache.oracle.windows import ANSWER, CHUNK, FORK, HINT, PERIOD, PROMPT

__all__ = ["Committed", "Disagreement", "Match", "ReferenceManager", "Taken"]

TOKENS = range(2**31)


class Committed(NamedTuple):
    """What a commit did for one request. Lengths in tokens."""

    owned: int  # of the key, what the tree owns now
    matched: int  # up to where the tree already had it


class ReferenceManager(ReferenceRequests):
    """The manager's calls in plain form: requests, rows, keys and hints are lists of ints.

    `branch`, `hints`, `every` (a period in tokens, 0: off) and `ladder` (tokens of the first rung, factor)
    are the checkpoint policies, `value` whether windows go by their worth, `chunks` whether those at the ends
    of all inserts stay then. Errors are those of the manager,
    and after one nothing has changed.
    """

    # inserting

    def checkpoints(self, state: Row, known: int, hints: list[int], ends: bool) -> dict[int, int]:
        """Lengths at which an insert of `known` tokens keeps a window, and the class of each."""
        end = self.end(known)
        prompt = len(self.units([0] * state.prompt))
        found: dict[int, int] = {}  # what is named later stays
        if self.every > 0:
            found.update(
                (self.floor(n), PERIOD) for n in range(self.every, end + self.page_size, self.every)
            )
        if self.ladder is not None:
            reach, rungs = max(self.page_size, self.ladder[0]), []
            while reach < prompt:
                rungs.append(self.floor(prompt - reach))
                reach *= self.ladder[1]
            for k, length in reversed([*enumerate(rungs)]):
                found[length] = min(k, 15)
        if ends or not self.by_value or self.with_chunks:
            kind = ANSWER if ends else CHUNK
            found.update({end: kind, self.resend_end(known): kind})
        if self.with_hints:
            found.update((self.floor(hint), HINT) for hint in hints)
        if self.by_value:
            found.update({self.floor(prompt): PROMPT, self.floor(max(prompt - 1, 0)): PROMPT})
        if self.with_branch:
            found[state.branch] = FORK
        return {c: found[c] for c in sorted(found) if len(state.path) * self.page_size < c <= end}

    def kept_pages(self, state: Row, known: int, checkpoints: dict[int, int]) -> set[int]:
        """Indices of the pages to keep live: windows of which the row still has all its part, and its own."""
        owned = len(state.path)
        kept = {i for i in self.trailing(state, self.end(known)) if i >= owned}
        for checkpoint in checkpoints:
            mine = [i for i in self.window(checkpoint) if i >= owned]
            if all(state.own[i - owned][1] is not None for i in mine):
                kept.update(mine)
        return kept

    def commit(
        self, rows: list[int], keys: list[list[int]], hints: list[list[int]]
    ) -> list[Committed]:
        """Hand each row's whole computed pages to the tree, one request after the other."""
        return self.insert(rows, keys, hints, ends=False)

    def insert(
        self, rows: list[int], keys: list[list[int]], hints: list[list[int]], *, ends: bool
    ) -> list[Committed]:
        states = self.checked_keys(rows, keys, hints)
        return [self.commit_one(*args, ends) for args in zip(states, keys, hints, strict=True)]

    def checked_keys(
        self, rows: list[int], keys: list[list[int]], hints: list[list[int]]
    ) -> list[Row]:
        states = self.running(rows)
        if len(keys) != len(states) or len(hints) != len(states):
            raise InvalidInputError(f"keys and hints must be one for each of {len(states)} rows")
        for state, key in zip(states, keys, strict=True):
            prefix = [unit for page in state.path for unit in page.unit_key]
            if any(unit != mine for unit, mine in zip(prefix, self.units(key), strict=False)):
                raise InvalidInputError("keys must begin with the prefix that the row was given")
            inserted = key[: self.end(self.known(state, key)) + self.bigram]
            if len(prefix) < len(inserted) - self.bigram and any(
                token not in TOKENS for token in inserted
            ):
                raise InvalidInputError("keys must hold tokens in [0, 2^31)")
        return states

    def trailing(self, state: Row, end: int) -> list[int]:
        """Indices of the pages before `end` whose SWA the row's next forward may still read."""
        return [i for i in self.window(end) if i * self.page_size >= state.frontier]

    @staticmethod
    def known(state: Row, key: list[int]) -> int:
        """Tokens that can be handed over: computed, and on the host. The host may be a step behind."""
        return min(state.computed, len(key))

    def commit_one(self, state: Row, key: list[int], hints: list[int], ends: bool) -> Committed:
        end = self.end(self.known(state, key))
        first, last = len(state.path), end // self.page_size
        known = 0
        prompt = len(self.unit_pages([0] * state.prompt))
        if last <= first:
            if self.by_value and ends and first > 0:
                if state.learns:
                    self.learn_fork(state.path)
                self.make_window(state.path, ANSWER, state.priority)
                self.note_tails(state.path, prompt, first)
            return Committed(first * self.page_size, first * self.page_size)
        checkpoints = self.checkpoints(state, self.known(state, key), hints, ends)
        kept = self.kept_pages(state, self.known(state, key), checkpoints)
        unit_keys = self.unit_pages(key)
        parent = state.path[-1] if state.path else self.roots[state.namespace]
        newly_live: list[Page] = []
        for i in range(first, last):
            full_id, swa_id = state.own[i - first]
            page = parent.children.get(unit_keys[i])
            if state.learns and (page is None or i + 1 == last >= prompt):
                state.learns = False
                self.learn_fork(state.path if page is None else [*state.path, page])
            if page is None:
                page = Page(unit_keys[i], parent, full_id, None)
                parent.children[unit_keys[i]] = page
                self.counts["stored"] += 1
            else:
                known += 1
                self.free_full.add(full_id)
                self.counts["repointed"] += 1
                self.counts["adopted"] += page.swa_id is None and i in kept
            if page.swa_id is None and i in kept:
                page.swa_id = swa_id
                newly_live.append(page)
            elif swa_id is not None:
                self.free_swa.add(swa_id)
            state.path.append(page)
            parent = page
        del state.own[: last - first]
        self.touch_swa(newly_live)
        old_window = state.swa_locked
        state.swa_locked = [state.path[i] for i in self.trailing(state, end)]
        self.lock(state.path[first:], state.swa_locked)
        self.unlock([], old_window)
        if self.by_value:
            for checkpoint, kind in checkpoints.items():
                path = state.path[: checkpoint // self.page_size]
                self.make_window(path, kind, state.priority)
            if first < prompt <= last or ends:
                self.note_tails(state.path, prompt, last)
        return Committed(end, (first + known) * self.page_size)

    # the end of a request

    def finish(
        self, rows: list[int], keys: list[list[int]], hints: list[list[int]]
    ) -> list[Committed]:
        """Commit the whole batch, then end each row."""
        committed = self.insert(rows, keys, hints, ends=True)
        self.abort(rows)
        return committed

    def retract(
        self, rows: list[int], keys: list[list[int]], hints: list[list[int]]
    ) -> list[Match]:
        """Finish, and say what a match of the computed tokens finds now."""
        states = self.checked_keys(rows, keys, hints)
        self.finish(rows, keys, hints)
        return [
            self.match_one(state.namespace, key[: self.known(state, key)], touch=False)
            for state, key in zip(states, keys, strict=True)
        ]

    def abort(self, rows: list[int]) -> None:
        self.running(rows)
        for row in rows:
            self.release(row)

    def release(self, row: int) -> None:
        state = self.rows.pop(row)
        for full_id, swa_id in state.own:
            self.free_full.add(full_id)
            if swa_id is not None:
                self.free_swa.add(swa_id)
        self.unlock(state.path, state.swa_locked)

    def reset(self) -> None:
        """All rows end, all pages are free; namespaces stay."""
        self.rows.clear()
        self.pins.clear()
        self.free_full, self.free_swa = set(self.all_full), set(self.all_swa)
        for root in self.roots.values():
            for page in self.path_pages(root):
                page.attached = False
            root.children.clear()
        self.forget_windows()

    # comparing

    def state(self) -> State:
        own = [pair for row in self.rows.values() for pair in row.own]
        tree = self.tree_pages()
        live = [page for page in tree.values() if page.swa_id]
        swa_map = {full_id: page.swa_id for full_id, page in tree.items() if page.swa_id}
        swa_map.update((full_id, swa_id) for full_id, swa_id in own if swa_id is not None)
        free_rows, full_capacity, swa_capacity = self.capacity()
        return State(
            tree=tree,
            full_order=self.full_order(),
            swa_order=self.swa_order(),
            windows={
                w.pages[-1].full_id: WindowState(
                    [page.full_id for page in w.pages],
                    w.kind,
                    w.last,
                    w.uses,
                    w.priority,
                    w.gap,
                    sorted(w.inherited),
                    w.key,
                )
                for w in self.windows
            },
            tails={page.full_id: (page.tail, page.answer_tail) for _, page in self.pages()},
            learned=[self.hits[kind] for kind in range(24)]
            + [self.made[kind] for kind in range(24)],
            free_full=frozenset(self.free_full),
            free_swa=frozenset(self.free_swa),
            swa_map=swa_map,
            rows={row: self.row_state(state) for row, state in self.rows.items()},
            counts={
                "full_pages_free": len(self.free_full),
                "swa_pages_free": len(self.free_swa),
                "tree_full_pages": len(tree),
                "tree_swa_pages": len(live),
                "locked_full_pages": sum(page.full_locks > 0 for page in tree.values()),
                "locked_swa_pages": sum(page.swa_locks > 0 for page in live),
                "row_full_pages": len(own),
                "row_swa_pages": sum(swa_id is not None for _, swa_id in own),
                "running_rows": len(self.rows),
                "evicted_full_pages": self.counts["evicted_full"],
                "evicted_swa_pages": self.counts["evicted_swa"],
                "free_rows": free_rows,
                "full_capacity": full_capacity,
                "swa_capacity": swa_capacity,
            },
        )

    def row_state(self, state: Row) -> RowState:
        pages = [page.full_id for page in state.path] + [full_id for full_id, _ in state.own]
        owned = len(state.path) * self.page_size
        return RowState(state.computed, state.allocated, owned, state.frontier, pages)

    def check(self) -> None:
        """Hold the oracle itself to design.md section 4 (as IntegrityError)."""
        check_rules(self.state(), self.all_full, self.all_swa, self.page_size)
        for row, state in self.rows.items():
            path = self.path_of(state.path[-1]) if state.path else []
            require(path == state.path, f"row {row}: its path is one of the tree")
            require(state.frontier <= self.frontier(state.computed), f"row {row}: frontier")
            locked = len(state.swa_locked) * self.page_size
            require(locked <= self.keep + 2 * (self.page_size - 1), f"row {row}: locks a window")
            # the next token attends to [computed + 1 - W, computed], those after it to later ones
            swa_ids = [page.swa_id for page in state.path] + [swa_id for _, swa_id in state.own]
            seen = range(max(0, state.computed + 1 - self.attention_window), state.allocated)
            needed = {token // self.page_size for token in seen} if self.has_swa else set()
            require(all(swa_ids[i] for i in needed), f"row {row}: its next window is live")
        for _, page in self.pages():
            paths = [row.path for row in self.rows.values()]
            paths += [pin.path for pin in self.pins.values()]
            holders = sum(page in path for path in paths)
            require(page.full_locks == holders, f"page {page.full_id}: Full locks")
            windows = [row.swa_locked for row in self.rows.values()]
            windows += [pin.window for pin in self.pins.values()]
            window_holders = sum(page in window for window in windows)
            require(page.swa_locks == window_holders, f"page {page.full_id}: SWA locks")

    def check_commit(self, row: int, key: list[int]) -> None:
        """Insert, then match: a match reaches what a commit reported, in the row's own pages."""
        state = self.rows[row]
        known = self.known(state, key)
        found = self.match_one(state.namespace, key[:known], touch=False)
        owned = len(state.path) * self.page_size
        if self.end(known) >= owned:
            require(found.full_hit >= owned, f"row {row}: insert, then match")
        if self.end(known) >= owned and self.live(state.path):
            require(found.reuse >= owned, f"row {row}: insert, then reuse")
            require(found.path[: len(state.path)] == state.path, f"row {row}: the tree's pages")
