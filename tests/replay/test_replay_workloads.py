"""Workloads: the same seed gives the same requests, and they share what they are said to share."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache.errors import InvalidInputError
from kvcache.replay.trace import NO_REQUEST, Trace
from kvcache.replay.workloads import WORKLOADS, WorkloadSizes, make_workload


def same(a: Trace, b: Trace) -> bool:
    return len(a) == len(b) and all(
        np.array_equal(a.sequence(i), b.sequence(i)) for i in range(len(a))
    )


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_says_it_all(name: str) -> None:
    sizes = WorkloadSizes(requests=20, system_len=50, conversations=5, turns=3)
    first, again, other = (make_workload(name, sizes, seed=seed) for seed in (7, 7, 8))
    assert same(first, again)
    assert np.array_equal(first.arrival, again.arrival)
    assert not np.array_equal(first.arrival, other.arrival)


@pytest.mark.parametrize("name", ["multi-turn", "forest"])
def test_another_seed_gives_other_requests(name: str) -> None:
    sizes = WorkloadSizes(requests=20, system_len=50, conversations=5, turns=3)
    assert not same(make_workload(name, sizes, seed=7), make_workload(name, sizes, seed=8))


@pytest.mark.parametrize("name", WORKLOADS)
def test_requests_come_in_order_and_hints_lie_in_the_prompt(name: str) -> None:
    trace = make_workload(name, WorkloadSizes(requests=40, conversations=6, turns=4))
    assert (np.diff(trace.arrival) >= 0).all()
    for i in range(len(trace)):
        hints = trace.hints(i)
        assert len(hints) >= 1
        assert (np.diff(hints) > 0).all()
        assert hints[0] > 0
        assert hints[-1] <= trace.input_len[i]


class TestSharedPrompt:
    def test_defaults_are_the_case_of_the_release_note(self) -> None:
        trace = make_workload("shared-prompt")
        assert len(trace) == 300
        assert set(trace.input_len) == {6200}
        assert set(trace.output_len) == {150}

    def test_all_share_the_system_prompt_and_no_more(self) -> None:
        trace = make_workload("shared-prompt", WorkloadSizes(requests=5, system_len=100))
        for i in range(1, 5):
            assert 100 <= common_prefix(trace.prompt(0), trace.prompt(i)) <= 101
            assert trace.hints(i).tolist() == [100]

    def test_no_system_prompt_is_nothing_shared(self) -> None:
        trace = make_workload("shared-prompt", WorkloadSizes(requests=2, system_len=0))
        assert trace.input_len.tolist() == [200, 200]
        assert trace.hints(0).tolist() == []


class TestMultiTurn:
    def test_a_turn_repeats_all_that_was_said_and_waits_for_it(self) -> None:
        sizes = WorkloadSizes(conversations=4, turns=5, system_len=30, message_len=20)
        trace = make_workload("multi-turn", sizes, seed=3)
        assert len(trace) == 20
        firsts = 0
        for i in range(len(trace)):
            before = int(trace.after[i])
            if before == NO_REQUEST:
                firsts += 1
                continue
            assert before < i
            said = trace.sequence(before)
            np.testing.assert_array_equal(trace.prompt(i)[: len(said)], said)
            assert len(trace.prompt(i)) > len(said)
            # every boundary of the turn before, the end of its answer, the end of this message
            expected = {*trace.hints(before).tolist(), len(said), len(trace.prompt(i))}
            assert set(trace.hints(i).tolist()) == expected
        assert firsts == 4


class TestForest:
    def test_forks_come_at_the_hints_and_many_share_one(self) -> None:
        sizes = WorkloadSizes(requests=60, system_len=100, trees=2, depth=3, fanout=2)
        trace = make_workload("forest", sizes, seed=1)
        shared = [
            common_prefix(trace.prompt(i), trace.prompt(j))
            for i in range(len(trace))
            for j in range(i)
        ]
        # two trees: pairs with nothing in common, and pairs with much
        assert min(shared) == 0
        assert max(shared) >= 150
        assert len(set(shared)) > 10
        assert len(set(trace.input_len.tolist())) > 5


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("requests", 0, r"requests must be in \[1, 16777216\], got 0"),
        ("system_len", -1, r"system_len must be in \[0, 16777216\], got -1"),
        ("question_len", 0, r"question_len must be in \[1, 16777216\], got 0"),
        ("output_len", -1, r"output_len must be in \[0, 16777216\], got -1"),
        ("depth", 65, r"depth must be in \[1, 64\], got 65"),
        ("fanout", 1000, r"trees \* fanout \*\* \(depth - 1\) must be <= 100000"),
    ],
)
def test_impossible_sizes_are_refused(field: str, value: int, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        WorkloadSizes(**{field: value})


def test_requests_of_too_many_tokens_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"must have at most 16777216 tokens, got 16777566"):
        make_workload("shared-prompt", WorkloadSizes(system_len=1 << 24, requests=1))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(
        InvalidInputError,
        match="workload must be one of shared-prompt, multi-turn, forest, got 'chat'",
    ):
        make_workload("chat")
