"""Manager beside oracle under Hypothesis: random calls of the whole API, everything compared after each.

A failure is shrunk, and its note is a Python script that repeats it. `make soak` runs the same for minutes
(profile `soak` of conftest.py); `kvcache validate` makes programs of another kind with its own generator.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import note
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from kvcache.validate import Driver
from kvcache.validate.bad_calls import BAD_CALLS
from kvcache.validate.program import Program

NAMESPACES = st.sampled_from([None, None, None, "a", "b"])
EXTRA = st.sampled_from([0, 0, 0, 1, 2, -1])


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
    full_pages = draw(st.integers(2, 4 * pages_a_row))
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
        "key_dtype": draw(st.sampled_from(["int32", "int64"])),
    }


class CacheMachine(RuleBasedStateMachine):
    """Every rule is one call on both sides; the driver compares all state and runs every invariant."""

    matches = Bundle("matches")
    requests = Bundle("requests")
    texts = Bundle("texts")

    @initialize(config=configs())
    def build(self, config: dict[str, Any]) -> None:
        self.program = Program(config)
        self.driver = Driver(**config, check_every=1)
        self.page_size = config["page_size"]
        self.max_len = config["max_len"]
        self.num_names = 0

    def call(self, name: str, *args: Any) -> None:
        self.program.ops.append((name, list(args)))
        try:
            getattr(self.driver, name)(*args)
        except Exception as error:
            note(self.program.script(f"{type(error).__name__}: {error}"))
            raise

    def name(self, letter: str) -> str:
        self.num_names += 1
        return f"{letter}{self.num_names}"

    def row_of(self, name: str) -> Any:
        """The oracle's row of a running request, None once it ended."""
        request = self.driver.running().get(name)
        return None if request is None else self.driver.oracle.rows[request.row]

    # texts: few letters in runs, often the beginning of another text

    @rule(target=texts, data=st.data())
    def new_text(self, data: st.DataObject) -> list[int]:
        letters = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=4))
        run = data.draw(st.integers(1, 1 + self.page_size))
        return [x for x in (letters * self.max_len) for _ in range(run)][: self.max_len]

    @rule(target=texts, text=texts, other=texts, data=st.data())
    def forked_text(self, text: list[int], other: list[int], data: st.DataObject) -> list[int]:
        cut = data.draw(st.integers(0, self.max_len))
        return (text[:cut] + other)[: self.max_len]

    # a request begins

    @rule(
        target=matches,
        asked=st.lists(st.tuples(NAMESPACES, texts, st.floats(0, 1)), max_size=3),
        touch=st.booleans(),
    )
    def match(self, asked: list[tuple[str | None, list[int], float]], touch: bool) -> str:
        name = self.name("m")
        asks = [[ns, text, int(part * len(text))] for ns, text, part in asked]
        self.call("match", name, asks, None, touch)
        return name

    @rule(target=matches, previous=matches, more=st.integers(0, 5), touch=st.booleans())
    def match_again(self, previous: str, more: int, touch: bool) -> str:
        name = self.name("m")
        if previous in self.driver.batches:
            asked = self.driver.batches[previous].asked
            asks = [[a.namespace, a.tokens, min(a.key_len + more, len(a.tokens))] for a in asked]
            self.call("match", name, asks, previous, touch)
        return name

    @rule(target=requests, match=matches, data=st.data())
    def admit(self, match: str, data: st.DataObject) -> Any:
        batch = self.driver.batches.get(match)
        if batch is None or not batch.asked:
            return multiple()
        indices = st.integers(0, len(batch.asked) - 1)
        index = data.draw(st.none() | st.lists(indices, min_size=1, max_size=3))
        names = [self.name("r") for _ in (batch.asked if index is None else index)]
        self.call("admit", match, index, names)
        return multiple(*(name for name in names if name in self.driver.requests))

    # a request runs: names of ended requests come too, and are refused

    @rule(names=st.lists(requests, max_size=3), data=st.data())
    def extend(self, names: list[str], data: st.DataObject) -> None:
        lens = []
        for name in names:
            row = self.row_of(name)
            low = 0 if row is None else row.computed
            lens.append(
                data.draw(st.integers(low, min(self.max_len + 1, low + 6 * self.page_size)))
            )
        self.call("extend", names, lens)

    @rule(names=st.lists(requests, max_size=4, unique=True))
    def step(self, names: list[str]) -> None:
        self.call("step", names)

    @rule(names=st.lists(requests, max_size=4, unique=True))
    def compute(self, names: list[str]) -> None:
        self.call("advance", names, None)

    @rule(name=requests, data=st.data())
    def reject_drafts(self, name: str, data: st.DataObject) -> None:
        row = self.row_of(name)
        if row is not None:
            length = data.draw(st.integers(row.computed - 1, row.allocated + 1))
            self.call("advance", [name], [length])

    @rule(names=st.lists(requests, max_size=4, unique=True))
    def slide(self, names: list[str]) -> None:
        self.call("slide", names)

    @rule(
        what=st.sampled_from(["commit", "commit", "finish", "retract"]),
        names=st.lists(requests, max_size=3),
        data=st.data(),
    )
    def hand_over(self, what: str, names: list[str], data: st.DataObject) -> None:
        extra = [data.draw(EXTRA) for _ in names]
        lengths = st.lists(st.integers(0, self.max_len + 2), max_size=3)
        hints = data.draw(st.none() | st.lists(lengths, min_size=len(names), max_size=len(names)))
        if what == "retract":
            self.call("retract", self.name("m"), names, extra, hints)
        else:
            self.call(what, names, extra, hints)

    @rule(names=st.lists(consumes(requests), max_size=3))
    def abort(self, names: list[str]) -> None:
        self.call("abort", names)

    # pools and namespaces

    @rule(full=st.integers(0, 6), swa=st.integers(0, 6))
    def evict(self, full: int, swa: int) -> None:
        self.call("evict", full, swa)

    @rule()
    def flush(self) -> None:
        self.call("flush")

    @rule(name=NAMESPACES)
    def drop_namespace(self, name: str | None) -> None:
        self.call("drop_namespace", name)

    @rule(kind=st.sampled_from(sorted(BAD_CALLS)))
    def malformed(self, kind: str) -> None:
        self.call("bad", kind)

    @invariant()
    def every_invariant_holds(self) -> None:
        if hasattr(self, "driver"):
            self.driver.manager.check()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.call("abort", [*self.driver.running()])
            self.call("flush")
            stats = self.driver.manager.stats()
            assert stats.full_pages_free == self.program.config["full_pages"]
            assert stats.swa_pages_free == self.program.config["swa_pages"]
            assert stats.nodes == 0


def test_manager_and_oracle_stay_equal() -> None:
    run_state_machine_as_test(CacheMachine)
