"""The driver: the calls of the scheduler API by name, made on manager and oracle alike.

Requests and match results have names, so a call still means something when calls before it are
taken out: a name that is not known is left out. A number in place of a name is a row handle as it is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from kvcache.device.device_match import DeviceKeys, DeviceMatch
from kvcache.errors import InvalidInputError, ReceiptError
from kvcache.keys import KeyBatch, Ragged
from kvcache.oracle.manager import Match
from kvcache.validate.bad_calls import BAD_CALLS, BAD_HANDLES
from kvcache.validate.sides import Failure, Sides

Name = str | int
# no token: a read past the end of a key makes a difference
_FENCE = -3


class Asked(NamedTuple):
    """One request of a match: its namespace, all tokens it will ever have, how many are the key."""

    namespace: str | None
    tokens: list[int]
    key_len: int


class Batch(NamedTuple):
    """The results of one match."""

    found: Any  # the manager's MatchBatch or DeviceMatch
    matches: list[Match]
    asked: list[Asked]


class Request(NamedTuple):
    """A request that was admitted."""

    row: int  # handle
    asked: Asked


class Driver(Sides):
    """Makes calls on both sides; every method is one call.

    Args:
        key_dtype: of the token buffers, "int32" or "int64".
        match_on: where the manager matches, "host" or "device"; with a hint always on the host.
        config: see Sides.

    Example:
        >>> d = Driver(page_size=4, window=8, full_pages=16, swa_pages=8, max_rows=2, max_len=64)
        >>> d.match("m0", [(None, [1, 2, 3, 4, 5, 6], 4)])
        >>> d.admit("m0", [0], ["r0"])
        >>> d.extend(["r0"], [6])
    """

    def __init__(self, *, key_dtype: str = "int64", match_on: str = "host", **config: Any) -> None:
        super().__init__(**config)
        self.key_dtype = key_dtype
        self.match_on = match_on
        self.batches: dict[str, Batch] = {}
        self.requests: dict[str, Request] = {}
        # the last handle that a namespace had; it may have been dropped or given up
        self.handles: dict[str | None, int] = {None: self.manager.namespace(None)}
        self.pins: dict[str, list[int]] = {}
        self.retractions = 0

    # names

    def running(self) -> dict[str, Request]:
        """Requests that have a row now."""
        names = {request.row: name for name, request in self.requests.items()}
        running = [names[row] for row in self.oracle.rows if row in names]
        return {name: self.requests[name] for name in running}

    def _owner(self, row: int) -> Request | None:
        """The request that runs in a row."""
        return next((r for r in self.running().values() if r.row == row), None)

    def _named(self, names: list[Name], *columns: list[Any] | None) -> tuple[list[int], list[Any]]:
        """Rows of the names that are known, and their entries of `columns`."""
        known = [isinstance(name, int) or name in self.requests for name in names]
        rows = [
            name if isinstance(name, int) else self.requests[name].row
            for name, is_known in zip(names, known, strict=True)
            if is_known
        ]
        kept = [
            None if column is None else [x for x, k in zip(column, known, strict=True) if k]
            for column in columns
        ]
        return rows, kept

    def _key_of(self, row: int, extra: int) -> list[int]:
        """The tokens of the request in a row: what is computed, and `extra` more, or fewer: a step behind."""
        request = self._owner(row)
        if request is None:
            return []
        return request.asked.tokens[: max(0, self.oracle.rows[row].computed + extra)]

    def _key_batch(self, keys: list[list[int]]) -> KeyBatch:
        """Keys in one buffer, with words between and behind them that nobody may read."""
        words, starts = [_FENCE], []
        for key in keys:
            starts.append(len(words))
            words += [*key, _FENCE]
        lens = [len(key) for key in keys]
        return KeyBatch(np.array(words, self.key_dtype), ints(starts), ints(lens))

    # namespaces

    def namespace(self, name: str | None) -> None:
        def oracle(handle: int | None) -> None:
            self.oracle.namespace(name, handle)

        done = self.both(f"namespace({name!r})", lambda: self.manager.namespace(name), oracle)
        if done is not None:
            self.handles[name] = done[0]

    def namespaces(self, names: list[str | None]) -> None:
        """Look up the namespaces of a queue in one call."""

        def oracle(handles: Any) -> None:
            self.oracle.look_up([*names], None if handles is None else handles.tolist())

        done = self.both(f"namespaces({names})", lambda: self.manager.namespaces(names), oracle)
        if done is not None:
            self.handles.update(zip(names, done[0].tolist(), strict=True))

    def stands(self, name: str | None) -> bool:
        """Whether the namespace has a handle that was neither dropped nor given up."""
        return self.handles.get(name) in self.oracle.roots

    def drop_namespace(self, name: str | None) -> None:
        if name not in self.handles:
            return
        handle = self.handles[name]
        what = f"drop_namespace({name!r})"
        done = self.both(
            what,
            lambda: self.manager.drop_namespace(handle),
            lambda _: self.oracle.drop_namespace(handle),
        )
        if done is not None:
            self._equal_pages(what, *done)

    # matching and admission

    def match(
        self,
        name: str,
        asked: list[tuple[str | None, list[int], int]],
        previous: str | None = None,
        touch: bool = True,
    ) -> None:
        """Match (namespace, tokens, key length) of each; `previous` names an earlier match."""
        asks = [Asked(*ask) for ask in asked]
        if not all(self.stands(ask.namespace) for ask in asks):
            self.namespaces([ask.namespace for ask in asks])
        asks = [ask for ask in asks if ask.namespace in self.handles]
        handles = [self.handles[ask.namespace] for ask in asks]
        tokens = [ask.tokens[: ask.key_len] for ask in asks]
        hint = self._usable(previous, asks)
        default = all(ask.namespace is None for ask in asks)
        namespaces = None if default else np.array(handles, np.int64)
        done = self.both(
            f"match({name!r})",
            lambda: self._match(self._key_batch(tokens), namespaces, hint, touch),
            lambda _: self.oracle.match(list(zip(handles, tokens, strict=True)), touch=touch),
        )
        if done is not None:
            self._keep_batch(f"match({name!r})", name, *done, asks)

    def _match(self, keys: KeyBatch, namespaces: Any, hint: Any, touch: bool) -> Any:
        if self.match_on == "host" or hint is not None:
            return self.manager.match(keys, namespaces, previous=hint, touch=touch)
        tokens = torch.from_numpy(keys.tokens).to(self.manager.config.device)
        on_device = DeviceKeys(tokens, keys.starts, keys.lens)
        found = self.manager.match(on_device, namespaces, touch=touch, on="device")
        found.fetch()
        return found

    def _usable(self, name: str | None, asks: list[Asked]) -> Any:
        """The earlier match as a hint, if it is one of the same requests."""
        batch = self.batches.get(name or "")
        if batch is None or len(batch.asked) != len(asks):
            return None
        for match, before, now in zip(batch.matches, batch.asked, asks, strict=True):
            common = min(before.key_len, now.key_len)
            if before.tokens[:common] != now.tokens[:common]:
                return None
            # what was found in a namespace that has gone says nothing
            if (
                match.namespace != self.handles[now.namespace]
                and match.namespace in self.oracle.roots
            ):
                return None
        found = batch.found
        return found.fetch() if isinstance(found, DeviceMatch) else found

    def _keep_batch(
        self, what: str, name: str, found: Any, matches: list[Match], asks: list[Asked]
    ) -> None:
        lens = found.fetch() if isinstance(found, DeviceMatch) else found
        self.equal(what, "full_hit_len", lens.full_hit_len, [m.full_hit for m in matches])
        self.equal(what, "reuse_len", lens.reuse_len, [m.reuse for m in matches])
        self.equal(what, "branch_len", lens.branch_len, [m.branch for m in matches])
        self.batches[name] = Batch(found, matches, asks)

    def admit(
        self,
        batch: str,
        index: list[int] | None,
        names: list[str],
        priorities: list[int] | None = None,
    ) -> None:
        """Admit the requests `index` of a match (None: all) under `names`; priorities None: 0."""
        if batch not in self.batches:
            return
        found, matches, asked = self.batches[batch]
        if index is None:
            chosen = [*range(len(asked))]
        else:
            chosen = index = [i for i in index if i < len(asked)]
        given = (priorities or []) + [0] * len(chosen)
        ranks = given[: len(chosen)]
        names = names[: len(chosen)]
        done = self.both(
            f"admit({batch!r}, {index}, priority={ranks})",
            lambda: self.manager.admit(
                found, None if index is None else np.array(index, np.int64), priority=ranks
            ),
            lambda rows: self.oracle.admit(
                [matches[i] for i in chosen], None if rows is None else rows.tolist(), ranks
            ),
        )
        if done is not None:
            for i, name, row in zip(chosen, names, done[0].tolist(), strict=False):
                self.requests.pop(name, None)
                self.requests[name] = Request(row, asked[i])

    # pins

    def pin(
        self, name: str, asked: list[tuple[str | None, list[int], int]], ttl: int | None
    ) -> None:
        """Pin what is cached of each key; the receipts go by `name`."""
        asks = [Asked(*ask) for ask in asked]
        if not all(self.stands(ask.namespace) for ask in asks):
            self.namespaces([ask.namespace for ask in asks])
        asks = [ask for ask in asks if ask.namespace in self.handles]
        handles = [self.handles[ask.namespace] for ask in asks]
        tokens = [ask.tokens[: ask.key_len] for ask in asks]
        what = f"pin({name!r}, ttl={ttl})"

        def oracle(result: Any) -> list[int]:
            receipts = None if result is None else result.pins.tolist()
            return self.oracle.pin(list(zip(handles, tokens, strict=True)), ttl, receipts)

        keys = self._key_batch(tokens)
        done = self.both(what, lambda: self.manager.pin(keys, ints(handles), ttl=ttl), oracle)
        if done is not None:
            self.equal(what, "pinned_len", done[0].pinned_len, done[1])
            self.pins[name] = done[0].pins.tolist()

    def unpin_all(self) -> None:
        receipts = [*self.oracle.pins]
        self.both(
            "unpin all",
            lambda: self.manager.unpin(ints(receipts)),
            lambda _: self.oracle.unpin(receipts),
        )

    def unpin(self, names: list[str]) -> None:
        """Let pins go, by name; they may have ended."""
        receipts = [receipt for name in names for receipt in self.pins.get(name, [])]
        self.both(
            f"unpin({receipts})",
            lambda: self.manager.unpin(ints(receipts)),
            lambda _: self.oracle.unpin(receipts),
        )

    # running requests

    def extend(self, names: list[Name], new_lens: list[int]) -> None:
        rows, (lens,) = self._named(names, new_lens)
        self.both(
            f"extend({rows}, {lens})",
            lambda: self.manager.extend(ints(rows), ints(lens)),
            lambda _: self.oracle.extend(rows, lens, self.taken()),
        )

    def step(self, names: list[Name]) -> None:
        rows, _ = self._named(names)
        self.both(
            f"step({rows})",
            lambda: self.manager.step(ints(rows)),
            lambda _: self.oracle.step(rows, self.taken()),
        )

    def advance(self, names: list[Name], computed: list[int] | None = None) -> None:
        rows, (lens,) = self._named(names, computed)
        self.both(
            f"advance({rows}, {lens})",
            lambda: self.manager.advance(ints(rows), None if lens is None else ints(lens)),
            lambda _: self.oracle.advance(rows, lens),
        )

    def slide(self, names: list[Name]) -> None:
        rows, _ = self._named(names)
        self.both(
            f"slide({rows})",
            lambda: self.manager.slide(ints(rows)),
            lambda _: self.oracle.slide(rows),
        )

    # inserting and ending

    def commit(
        self, names: list[Name], extra: list[int], hints: list[list[int]] | None = None
    ) -> None:
        """Commit keys of the computed tokens and `extra` more (or fewer) of each request."""
        self._insert("commit", names, extra, hints)

    def finish(
        self, names: list[Name], extra: list[int], hints: list[list[int]] | None = None
    ) -> None:
        self._insert("finish", names, extra, hints)

    def _insert(
        self, call: str, names: list[Name], extra: list[int], hints: list[list[int]] | None
    ) -> None:
        rows, (extra, hints) = self._named(names, extra, hints)
        keys = [self._key_of(row, more) for row, more in zip(rows, extra, strict=True)]
        what = f"{call}({rows}, {len(keys)} keys of {[len(key) for key in keys]}, {hints})"
        done = self.both(
            what,
            lambda: getattr(self.manager, call)(ints(rows), self._key_batch(keys), ragged(hints)),
            lambda _: getattr(self.oracle, call)(rows, keys, hints or [[] for _ in rows]),
        )
        if done is not None:
            result, committed = done
            self.equal(what, "owned_len", result.owned_len, [c.owned for c in committed])
            self.equal(what, "matched_len", result.matched_len, [c.matched for c in committed])
            if call == "commit":
                for row, key in zip(rows, keys, strict=True):
                    self.oracle.check_commit(row, key)

    def retract(
        self,
        name: str,
        names: list[Name],
        extra: list[int],
        hints: list[list[int]] | None = None,
    ) -> None:
        """Retract requests; their match goes by `name`."""
        rows, (extra, hints) = self._named(names, extra, hints)
        keys = [self._key_of(row, more) for row, more in zip(rows, extra, strict=True)]
        owners = [(self._owner(row), row) for row in rows]
        asked = [
            Asked(
                owner.asked.namespace,
                owner.asked.tokens,
                min(self.oracle.rows[row].computed, len(key)),
            )
            for (owner, row), key in zip(owners, keys, strict=True)
            if owner is not None
        ]
        what = f"retract({rows}, keys of {[len(key) for key in keys]}, {hints})"
        done = self.both(
            what,
            lambda: self.manager.retract(ints(rows), self._key_batch(keys), ragged(hints)),
            lambda _: self.oracle.retract(rows, keys, hints or [[] for _ in rows]),
        )
        if done is not None:
            self.retractions += len(rows)
            self._keep_batch(what, name, *done, asked)

    def abort(self, names: list[Name]) -> None:
        rows, _ = self._named(names)
        self.both(
            f"abort({rows})",
            lambda: self.manager.abort(ints(rows)),
            lambda _: self.oracle.abort(rows),
        )

    # eviction

    def evict(self, full_pages: int, swa_pages: int) -> None:
        what = f"evict({full_pages}, {swa_pages})"
        done = self.both(
            what,
            lambda: self.manager.evict(full_pages, swa_pages),
            lambda _: self.oracle.evict(full_pages, swa_pages),
        )
        if done is not None:
            self._equal_pages(what, *done)

    def flush(self) -> None:
        done = self.both("flush()", lambda: self.manager.flush(), lambda _: self.oracle.flush())
        if done is not None:
            self._equal_pages("flush()", *done)

    def reset(self) -> None:
        self.both("reset()", lambda: self.manager.reset(), lambda _: self.oracle.reset())

    def _equal_pages(self, what: str, result: Any, expected: tuple[int, int]) -> None:
        seen = np.array([result.full_pages, result.swa_pages])
        self.equal(what, "freed (Full, SWA)", seen, [*expected])

    def end(self) -> None:
        """Abort what runs and flush: every page must come back."""
        self.abort([*self.running()])
        self.unpin_all()
        self.flush()
        left = self.last.counts["tree_full_pages"], self.last.counts["tree_swa_pages"]
        if left != (0, 0):
            raise Failure(f"end(): the tree still has {left} pages, nobody runs, all was flushed")

    # calls that cannot be right

    def bad(self, kind: str) -> None:
        """Make a malformed call (bad_calls.py); both sides refuse it."""

        call = BAD_CALLS.get(kind) or BAD_HANDLES[kind]

        def refuse(_: Any) -> None:
            raise (InvalidInputError if kind in BAD_CALLS else ReceiptError)(f"{kind} is malformed")

        self.both(f"bad({kind!r})", lambda: call(self.manager), refuse)


def ints(values: list[int]) -> Any:
    """Rows or lengths as the manager takes them."""
    return np.array(values, np.int64)


def ragged(hints: list[list[int]] | None) -> Ragged | None:
    return None if hints is None else Ragged.pack(hints)
