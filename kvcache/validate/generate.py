"""Random programs: configurations and calls that make the rare things common.

Pools are tiny, so that eviction, refusal and retraction come up all the time; few letters and keys
that branch off earlier keys, so that prefixes are shared; every kind of call, wrong ones and stale
matches too.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from kvcache.validate.bad_calls import BAD_CALLS, BAD_HANDLES
from kvcache.validate.driver import Driver
from kvcache.validate.program import Op

_NAMESPACES = [None, "a", "b", "c", "d"]

# how often each call (or run of calls) begins, before a program's own taste
_WEIGHTS = {
    "serve": 30,
    "chunk": 30,
    "decode": 12,
    "match": 6,
    "admit": 4,
    "extend": 6,
    "step": 4,
    "advance": 6,
    "commit": 4,
    "slide": 4,
    "finish": 8,
    "retract": 6,
    "abort": 3,
    "evict": 4,
    "flush": 0.3,
    "reset": 0.1,
    "namespace": 1,
    "namespaces": 1,
    "drop_namespace": 1,
    "pin": 1.5,
    "unpin": 1,
    "bad": 1,
    "wrong": 3,
}
_NEED_ROWS = ("chunk", "decode", "extend", "step", "advance", "commit", "slide", "finish", "abort")


def random_config(rng: Random) -> dict[str, Any]:
    """Draw the arguments of a Driver."""
    page_size = rng.choice([1, 1, 2, 3, 4, 4, 16])
    pages_a_row = rng.randint(2, 14)
    max_len = page_size * pages_a_row - rng.randint(0, page_size - 1)
    slack = rng.randint(0, 1)
    window = rng.choice(
        [
            None,
            rng.randint(1, page_size),
            page_size,
            page_size * rng.randint(1, 4),
            rng.randint(1, 3 * page_size),
            rng.randint(1, 3 * page_size),
            rng.randint(1, 40),
            max_len + rng.randint(0, 3),
        ]
    )
    if window is not None:
        window = max(window, 1 + slack)
    max_rows = rng.randint(1, 6)
    full_pages = rng.randint(2, rng.choice([1, 1, 3]) * (1 + max_rows) * pages_a_row)
    swa_pages = 0 if window is None else rng.randint(2, full_pages + 4)
    config: dict[str, Any] = {
        "page_size": page_size,
        "window": window,
        "full_pages": full_pages,
        "swa_pages": swa_pages,
        "max_rows": max_rows,
        "max_len": max_len,
        "bigram": rng.random() < 0.4,
        "window_slack": slack,
        "max_namespaces": rng.randint(1, 4),
        "hash_seed": rng.choice([0, rng.getrandbits(64)]),
        "branch": rng.random() < 0.6,
        "hints": rng.random() < 0.5,
        "every": rng.choice([0, 0, rng.randint(1, 4 * page_size + 3)]),
        "key_dtype": rng.choice(["int32", "int64"]),
        "match_on": rng.choice(["host", "host", "device"]),
    }
    # drawn apart, so that a seed stands for the calls that it always stood for
    apart = Random(str(config))
    config["ladder"] = apart.choice([None, (apart.randint(1, 2 * page_size), apart.randint(2, 3))])
    config["value"] = apart.random() < 0.5
    config["chunks"] = apart.random() < 0.2
    config["pin_share"] = apart.choice([0.0, 0.25, 0.5, 1.0])
    return config


class Generator:
    """Makes up the next call, given where the driver stands."""

    def __init__(self, rng: Random, config: dict[str, Any]) -> None:
        self.rng = rng
        self.page_size: int = config["page_size"]
        self.max_len: int = config["max_len"]
        self.letters = rng.randint(1, 3)
        self.namespaces = [
            None,
            None,
            None,
            *_NAMESPACES[1 : rng.randint(1, config["max_namespaces"] + 2)],
        ]
        taste = {call: rng.choice([0.2, 1, 1, 3]) for call in _WEIGHTS}
        self.weights = {call: weight * taste[call] for call, weight in _WEIGHTS.items()}
        self.texts: list[list[int]] = []
        self.num_names = 0
        self.queue: list[Callable[[Driver], Op]] = []  # the rest of a run of calls

    def op(self, driver: Driver) -> Op:
        """Return the next call."""
        if self.queue and self.rng.random() < 0.95:
            return self.queue.pop(0)(driver)
        self.queue.clear()
        weights = dict(self.weights)
        if not driver.batches:
            weights["admit"] = 0
        if not driver.oracle.rows:
            weights.update((call, 0.02 * weights[call]) for call in _NEED_ROWS)
        elif len(driver.oracle.rows) == driver.oracle.max_rows:
            weights["serve"] *= 0.05
            weights["admit"] *= 0.1
            weights["finish"] *= 3
        call = self.rng.choices([*weights], [*weights.values()])[0]
        if call in ("serve", "chunk", "decode"):
            getattr(self, f"_{call}")(driver)
            return self.queue.pop(0)(driver)
        op: Op = getattr(self, f"_{call}")(driver, [*driver.running()])
        return op

    # runs of calls, as an engine makes them

    def _serve(self, driver: Driver) -> None:
        """Match, admit, and compute the first chunk."""
        self.queue.append(lambda d: self._match(d, []))
        self.queue.append(lambda d: self._admit(d, [], last=True))
        self.queue.append(lambda d: self._compute(d, [*d.running()][-3:]))

    def _compute(self, driver: Driver, names: list[str]) -> Op:
        """Extend now; advance, and perhaps slide and commit, later."""
        op = self._extend(driver, names)
        some = op[1][0]
        self.queue.append(lambda d: ("advance", [some, None]))
        if self.rng.random() < 0.4:
            self.queue.append(lambda d: ("slide", [some]))
        if self.rng.random() < 0.6:
            hints = self._sometimes_hints(driver, some)
            self.queue.append(lambda d: ("commit", [some, self._extra(some), hints]))
        if self.rng.random() < 0.3:
            self.queue.append(lambda d: ("slide", [some]))
        return op

    def _chunk(self, driver: Driver) -> None:
        self.queue.append(lambda d: self._compute(d, [*d.running()]))

    def _decode(self, driver: Driver) -> None:
        for _ in range(self.rng.randint(1, 2 * self.page_size)):
            self.queue.append(lambda d: self._step(d, [*d.running()]))
            self.queue.append(lambda d: ("advance", [[*d.running()], None]))
        self.queue.append(lambda d: ("slide", [[*d.running()]]))

    # parts

    def _name(self, letter: str) -> str:
        self.num_names += 1
        return f"{letter}{self.num_names}"

    def _text(self) -> list[int]:
        """All tokens of a request: often the beginning of an earlier one, then something else."""
        rng = self.rng
        text: list[int] = []
        if self.texts and rng.random() < 0.8:
            earlier = rng.choice(self.texts[-12:])
            text = earlier[: rng.randint(0, self.max_len)]
            if rng.random() < 0.5:
                text = text[: len(text) // self.page_size * self.page_size]
        while len(text) < self.max_len:
            text += [rng.randrange(self.letters)] * rng.randint(1, 1 + self.page_size)
        self.texts.append(text[: self.max_len])
        return self.texts[-1]

    def _some(self, names: list[str]) -> list[Any]:
        most = min(len(names), 5)
        return self.rng.sample(names, self.rng.randint(min(1, most), most))

    def _sometimes_hints(self, driver: Driver, names: list[Any]) -> list[list[int]] | None:
        if self.rng.random() < 0.5:
            return None
        return [
            [self.rng.randint(0, self.max_len + 2) for _ in range(self.rng.randint(0, 3))]
            for _ in names
        ]

    def _extra(self, names: list[Any]) -> list[int]:
        return [self.rng.choice([0, 0, 0, 0, 1, 1, 5, -1, -1, -3]) for _ in names]

    # calls

    def _match(self, driver: Driver, names: list[str]) -> Op:
        rng = self.rng
        if driver.batches and rng.random() < 0.3:
            again = rng.choice([*driver.batches][-6:])
            asked = [
                [ask.namespace, ask.tokens, self._grown(ask.key_len)]
                for ask in driver.batches[again].asked
            ]
            previous = again if rng.random() < 0.8 else None
            return "match", [self._name("m"), asked, previous, rng.random() < 0.8]
        asked = []
        for _ in range(rng.choice([1, 1, 1, 2, 3, 5]) if rng.random() < 0.98 else 0):
            key_len = max(rng.randint(0, self.max_len), rng.randint(0, self.max_len))
            asked.append([rng.choice(self.namespaces), self._text(), key_len])
        return "match", [self._name("m"), asked, None, rng.random() < 0.9]

    def _grown(self, key_len: int) -> int:
        return min(self.max_len, key_len + self.rng.choice([0, 0, 0, 1, 5]))

    def _admit(self, driver: Driver, names: list[str], last: bool = False) -> Op:
        rng = self.rng
        batches = [*driver.batches]
        if not batches:
            return "evict", [0, 0]
        name = batches[-1] if last else rng.choice(batches[-4:])
        size = len(driver.batches[name].asked)
        free = driver.oracle.max_rows - len(driver.oracle.rows)
        ranks = [rng.randint(-3, 3) for _ in range(size)] if rng.random() < 0.3 else None
        if size <= free and rng.random() < 0.5:
            return "admit", [name, None, [self._name("r") for _ in range(size)], ranks]
        most = min(size, free) if rng.random() < 0.9 else size
        index = rng.sample(range(size), rng.randint(min(1, most), most))
        return "admit", [name, index, [self._name("r") for _ in index], ranks]

    def _extend(self, driver: Driver, names: list[str]) -> Op:
        rng = self.rng
        some = self._some(names)
        lens = []
        for name in some:
            row = driver.oracle.rows[driver.requests[name].row]
            length = row.computed + rng.choice([1, 3, 6]) * rng.randint(0, self.page_size + 1)
            lens.append(min(length, self.max_len + (rng.random() < 0.02)))
        return "extend", [some, lens]

    def _step(self, driver: Driver, names: list[str]) -> Op:
        some = [
            name
            for name in self._some(names)
            if driver.oracle.rows[driver.requests[name].row].computed < self.max_len
            or self.rng.random() < 0.05
        ]
        return "step", [some]

    def _advance(self, driver: Driver, names: list[str]) -> Op:
        some = self._some(names)
        if self.rng.random() < 0.7:
            return "advance", [some, None]
        rows = [driver.oracle.rows[driver.requests[name].row] for name in some]
        return "advance", [some, [self.rng.randint(row.computed, row.allocated) for row in rows]]

    def _slide(self, driver: Driver, names: list[str]) -> Op:
        return "slide", [self._some(names)]

    def _commit(self, driver: Driver, names: list[str]) -> Op:
        some = self._some(names)
        return "commit", [some, self._extra(some), self._sometimes_hints(driver, some)]

    def _finish(self, driver: Driver, names: list[str]) -> Op:
        some = self._some(names)
        return "finish", [some, self._extra(some), self._sometimes_hints(driver, some)]

    def _retract(self, driver: Driver, names: list[str]) -> Op:
        some = self._some(names)
        hints = self._sometimes_hints(driver, some)
        return "retract", [self._name("m"), some, self._extra(some), hints]

    def _abort(self, driver: Driver, names: list[str]) -> Op:
        return "abort", [self._some(names)]

    def _evict(self, driver: Driver, names: list[str]) -> Op:
        few = [0, 0, 1, 1, 2, 3, 5, 100]
        return "evict", [self.rng.choice(few), self.rng.choice(few)]

    def _flush(self, driver: Driver, names: list[str]) -> Op:
        return "flush", []

    def _reset(self, driver: Driver, names: list[str]) -> Op:
        return "reset", []

    def _namespace(self, driver: Driver, names: list[str]) -> Op:
        return "namespace", [self.rng.choice(_NAMESPACES)]

    def _namespaces(self, driver: Driver, names: list[str]) -> Op:
        return "namespaces", [self.rng.choices(_NAMESPACES, k=self.rng.randint(0, 5))]

    def _drop_namespace(self, driver: Driver, names: list[str]) -> Op:
        return "drop_namespace", [self.rng.choice(_NAMESPACES)]

    def _pin(self, driver: Driver, names: list[str]) -> Op:
        rng = self.rng
        asked: list[Any] = []
        for _ in range(rng.choice([1, 1, 2, 3])):
            text = rng.choice(self.texts[-12:]) if self.texts else self._text()
            asked.append([rng.choice(self.namespaces), text, rng.randint(0, self.max_len)])
        return "pin", [self._name("p"), asked, rng.choice([None, 1, 2, 5, 9])]

    def _unpin(self, driver: Driver, names: list[str]) -> Op:
        return "unpin", [self.rng.sample([*driver.pins], min(len(driver.pins), 2))]

    def _bad(self, driver: Driver, names: list[str]) -> Op:
        return "bad", [self.rng.choice([*BAD_CALLS, *BAD_HANDLES])]

    def _wrong(self, driver: Driver, names: list[str]) -> Op:
        """A well-formed call that the state forbids: an ended or doubled row, no row at all, ..."""
        rng = self.rng
        some: list[Any] = self._some(names)
        ended = [name for name in driver.requests if name not in driver.running()]
        wrong = rng.choice([[7], some, ended[:1], [-1]])
        rows = some + wrong if rng.random() < 0.5 else wrong + some
        call = rng.choice(["extend", "step", "advance", "commit", "slide", "finish", "abort"])
        if call == "extend":
            return call, [rows, [rng.randint(0, self.max_len + 2) for _ in rows]]
        if call == "advance":
            return call, [rows, [rng.randint(0, self.max_len + 2) for _ in rows]]
        if call in ("commit", "finish"):
            return call, [rows, [0 for _ in rows], None]
        return call, [rows]
