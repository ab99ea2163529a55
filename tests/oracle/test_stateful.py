"""Manager beside oracle under Hypothesis: random calls of the whole API, everything compared after each.

A failure is shrunk, and its note is a Python script that repeats it. `make soak` runs the same for minutes
(profile `soak` of conftest.py); `kvcache validate` makes programs of another kind with its own generator.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis.strategies as st
from hypothesis import note
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvcache.validate import Driver
from kvcache.validate.bad_calls import BAD_CALLS, BAD_HANDLES
from kvcache.validate.program import Program

NAMESPACES = st.sampled_from([None, None, None, None, "a", "b", "c"])
# tokens of a key beyond those computed
EXTRA = st.sampled_from([0, 0, 0, 0, 0, 1, 2, -1, -1, -3])
SELDOM = st.integers(0, 1000).map(lambda n: n % 8 == 3)
CALLS = (
    *(
        "match",
        "admit",
        "extend",
        "step",
        "advance",
        "slide",
        "commit",
        "finish",
        "retract",
        "abort",
    ),
    *("evict", "flush", "reset", "drop_namespace", "bad"),
)
# what the machines of a run came to; a run in which nothing is reused or evicted proves nothing
SEEN: Counter[str] = Counter()


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Tiny pools, all shapes of window: below, at and off the page, past the longest sequence, none."""
    page_size = draw(st.sampled_from([1, 3, 4, 16, 64]))
    pages_a_row = draw(st.integers(2, 9))
    max_len = page_size * pages_a_row - draw(st.integers(0, page_size - 1))
    slack = draw(st.integers(0, 1))
    window = draw(
        st.one_of(
            st.none(),
            st.integers(1, page_size),
            st.integers(1, 4).map(lambda n: n * page_size),
            st.integers(1, max_len + 3),
        )
    )
    full_pages = draw(st.integers(2 + pages_a_row // 2, 4 * pages_a_row))
    return {
        "page_size": page_size,
        "window": None if window is None else max(window, 1 + slack),
        "full_pages": full_pages,
        "swa_pages": 0 if window is None else draw(st.integers(2, full_pages + 2)),
        "max_rows": draw(st.integers(1, 4)),
        "max_len": max_len,
        "bigram": draw(st.booleans()),
        "window_slack": slack,
        "max_namespaces": draw(st.integers(1, 3)),
        "branch": draw(st.booleans()),
        "hints": draw(st.booleans()),
        "every": draw(st.sampled_from([0, 0, 1, page_size, 2 * page_size + 1])),
        "ladder": draw(
            st.one_of(st.none(), st.tuples(st.integers(1, 2 * page_size), st.integers(2, 3)))
        ),
        "value": draw(st.booleans()),
        "chunks": draw(st.booleans()),
        "pin_share": draw(st.sampled_from([0.0, 0.5, 1.0, 1.0])),
        "key_dtype": draw(st.sampled_from(["int32", "int64"])),
        "match_on": draw(st.sampled_from(["host", "device"])),
    }


class CacheMachine(RuleBasedStateMachine):
    """Rules are runs of calls as an engine makes them, and single calls of any kind in between.

    After every call the driver compares all state of manager and oracle.
    """

    @initialize(config=configs())
    def build(self, config: dict[str, Any]) -> None:
        self.program = Program(config)
        self.driver = Driver(**config, check_every=1)
        self.page_size = config["page_size"]
        self.max_len = config["max_len"]
        self.texts = [[0] * self.max_len]
        self.matches: list[str] = []
        self.pins: list[str] = []
        self.num_names = 0

    def call(self, name: str, *args: Any) -> None:
        self.program.ops.append((name, list(args)))
        try:
            getattr(self.driver, name)(*args)
        except Exception as error:
            note(self.program.script(f"{type(error).__name__}: {error}"))
            raise
        SEEN[name] += 1

    def new_name(self, letter: str) -> str:
        self.num_names += 1
        return f"{letter}{self.num_names}"

    def running(self) -> list[str]:
        return [*self.driver.running()] if hasattr(self, "driver") else []

    def some(self, data: st.DataObject, most: int = 3) -> list[str]:
        """Running requests, each once."""
        names = st.lists(st.sampled_from(self.running()), min_size=1, max_size=most, unique=True)
        return data.draw(names)

    def computed(self, name: str) -> int:
        return self.driver.oracle.rows[self.driver.requests[name].row].computed

    def text(self, data: st.DataObject) -> list[int]:
        """A text that follows an earlier one for a while, often to a page boundary, then repeats a letter."""
        base = data.draw(st.sampled_from(self.texts[-3:]))
        pages = st.integers(0, self.max_len // self.page_size).map(lambda n: n * self.page_size)
        cut = data.draw(
            st.one_of(
                st.just(self.max_len), st.just(self.max_len), pages, st.integers(0, self.max_len)
            )
        )
        text = base[:cut] + [data.draw(st.integers(0, 2))] * (self.max_len - cut)
        if text not in self.texts:
            self.texts.append(text)
        return text

    # a request begins

    def ask(self, data: st.DataObject, most: int) -> str:
        """Match some texts, most of them up to their last token."""
        asks = []
        for _ in range(data.draw(st.integers(1, most))):
            text = self.text(data)
            most = len(text)
            key_len = data.draw(st.one_of(st.just(most - 1), st.just(most), st.integers(0, most)))
            asks.append([data.draw(NAMESPACES), text, key_len])
        name = self.new_name("m")
        self.call("match", name, asks, None, not data.draw(SELDOM))
        self.matches.append(name)
        return name

    def admit(self, match: str, index: list[int] | None = None) -> list[str]:
        batch = self.driver.batches.get(match)
        if batch is None:
            return []
        names = [self.new_name("r") for _ in (batch.asked if index is None else index)]
        ranks = [(self.num_names + i) % 5 - 2 for i in range(len(names))]
        self.call("admit", match, index, names, ranks)
        admitted = [name for name in names if name in self.driver.requests]
        SEEN["hits"] += sum(self.computed(name) > 0 for name in admitted)
        return admitted

    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        """Up to three requests come, and compute their first chunk."""
        names = self.admit(self.ask(data, 3))
        if names:
            self.compute(data, names)

    @rule(data=st.data())
    def serve(self, data: st.DataObject) -> None:
        """One request comes, is computed in one go and ends."""
        names = self.admit(self.ask(data, 1))
        if names:
            self.compute(data, names)
            self.call("finish", names, [0], None)

    @precondition(lambda self: self.matches)
    @rule(data=st.data())
    def only_match(self, data: st.DataObject) -> None:
        """The waiting queue is matched again, its keys longer."""
        previous, more = data.draw(st.sampled_from(self.matches[-5:])), data.draw(st.integers(0, 9))
        batch = self.driver.batches.get(previous)
        if batch is not None:
            asks = [
                [a.namespace, a.tokens, min(a.key_len + more, len(a.tokens))] for a in batch.asked
            ]
            name = self.new_name("m")
            self.call("match", name, asks, previous, data.draw(st.booleans()))
            self.matches.append(name)

    @precondition(lambda self: self.matches)
    @rule(data=st.data())
    def admit_later(self, data: st.DataObject) -> None:
        """Of a match that may no longer hold; one request may come twice."""
        match = data.draw(st.sampled_from(self.matches[-5:]))
        batch = self.driver.batches.get(match)
        if batch is not None and batch.asked:
            index = st.lists(st.integers(0, len(batch.asked) - 1), min_size=1, max_size=2)
            self.admit(match, data.draw(st.none() | index))

    @rule(
        full=st.sampled_from([1000, 2, 1, 0]), swa=st.sampled_from([1000, 2, 1, 0]), data=st.data()
    )
    def admit_after_eviction(self, full: int, swa: int, data: st.DataObject) -> None:
        match = self.ask(data, 2)
        self.call("evict", full, swa)
        self.admit(match)

    # a request runs

    def compute(self, data: st.DataObject, names: list[str]) -> None:
        """Extend and advance, to the end or by some pages."""
        lens = []
        for name in names:
            low = self.computed(name)
            ends = st.one_of(st.just(self.max_len), st.integers(low, self.max_len))
            lens.append(min(data.draw(ends), low + data.draw(st.integers(1, 6)) * self.page_size))
        self.call("extend", names, [min(length, self.max_len) for length in lens])
        self.call("advance", names, None)
        if data.draw(st.booleans()):
            self.call("slide", names)

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def chunk(self, data: st.DataObject) -> None:
        names = self.some(data)
        self.compute(data, names)
        if data.draw(st.booleans()):
            self.call("commit", names, [0] * len(names), None)

    @precondition(lambda self: self.running())
    @rule(steps=st.integers(1, 5), data=st.data())
    def decode(self, steps: int, data: st.DataObject) -> None:
        names = self.some(data, 4)
        for _ in range(steps):
            self.call("step", names)
            self.call("advance", names, None)
            self.call("slide", names)

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def reject_drafts(self, data: st.DataObject) -> None:
        """Some of the tokens that have pages are not computed; the length may be a wrong one."""
        (name,) = self.some(data, 1)
        low = self.computed(name)
        self.call("extend", [name], [low + data.draw(st.integers(0, 2 * self.page_size))])
        allocated = self.driver.oracle.rows[self.driver.requests[name].row].allocated
        self.call("advance", [name], [data.draw(st.integers(low - 1, allocated + 1))])

    def handed_over(self, data: st.DataObject) -> tuple[list[str], list[int], Any]:
        """Requests, the tokens of their keys beyond those computed, and hints."""
        names = self.some(data)
        extra = [data.draw(EXTRA) for _ in names]
        lengths = st.lists(st.integers(0, self.max_len + 2), max_size=3)
        hints = data.draw(st.none() | st.lists(lengths, min_size=len(names), max_size=len(names)))
        return names, extra, hints

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self.call("commit", *self.handed_over(data))

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.call("finish", *self.handed_over(data))

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def retract(self, data: st.DataObject) -> None:
        """The request goes back to the queue; often it comes again at once."""
        self.matches.append(self.new_name("m"))
        self.call("retract", self.matches[-1], *self.handed_over(data))
        if data.draw(st.booleans()):
            self.admit(self.matches[-1])

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.call("abort", self.some(data))

    @precondition(lambda self: self.num_names)
    @rule(call=st.sampled_from(["extend", "step", "advance", "slide", "abort"]), data=st.data())
    def any_rows(self, call: str, data: st.DataObject) -> None:
        """A call with requests that have ended, named twice, or never were."""
        numbers = st.lists(st.integers(1, self.num_names), max_size=3)
        names = [f"r{number}" for number in data.draw(numbers)]
        if call == "extend":
            self.call(call, names, [data.draw(st.integers(0, self.max_len + 1)) for _ in names])
        elif call == "advance":
            self.call(call, names, None)
        else:
            self.call(call, names)

    # pools and namespaces

    @rule(full=st.integers(0, 4), swa=st.integers(0, 4), seldom=SELDOM, data=st.data())
    def evict(self, full: int, swa: int, seldom: bool, data: st.DataObject) -> None:
        if swa == 3:
            self.pin(data.draw(st.sampled_from([None, 1, 3])))
        elif swa == 2 and self.pins:
            self.call("unpin", [data.draw(st.sampled_from(self.pins[-3:]))])
        if seldom:
            self.call("flush")
        else:
            self.call("evict", full, swa)

    @rule(
        name=NAMESPACES,
        kind=st.sampled_from(sorted({**BAD_CALLS, **BAD_HANDLES})),
        number=st.integers(0, 5),
    )
    def seldom(self, name: str | None, kind: str, number: int) -> None:
        if number == 2 and kind < "b":
            self.call("reset")
        elif number == 3:
            self.call("drop_namespace", name)
        elif number == 4:
            self.call("bad", kind)
        elif number == 5:
            self.call("namespaces", [name, "c", "d"])

    def pin(self, ttl: int | None) -> None:
        asks = [[None, text, self.max_len] for text in self.texts[-2:]]
        self.pins.append(self.new_name("p"))
        self.call("pin", self.pins[-1], asks, ttl)
        SEEN["pinned"] += any(pin.path for pin in self.driver.oracle.pins.values())

    @invariant()
    def every_invariant_holds(self) -> None:
        if hasattr(self, "driver"):
            self.driver.manager.check()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.call("abort", [*self.driver.running()])
            self.driver.unpin_all()
            stats = self.driver.manager.stats()
            SEEN["stale"] += self.driver.refusals["admit StaleMatchError"]
            SEEN["evicted"] += stats.evicted_full_pages + stats.evicted_swa_pages
            self.call("flush")
            stats = self.driver.manager.stats()
            assert stats.full_pages_free == self.program.config["full_pages"]
            assert stats.swa_pages_free == self.program.config["swa_pages"]
            assert stats.nodes == 0


def test_manager_and_oracle_stay_equal() -> None:
    SEEN.clear()
    run_state_machine_as_test(CacheMachine)
    assert min(SEEN[call] for call in CALLS) >= 10, SEEN
    assert SEEN["hits"] >= 60, SEEN
    assert SEEN["pinned"] >= 10, SEEN
    assert SEEN["evicted"] >= 100, SEEN
    assert SEEN["stale"] >= 5, SEEN
