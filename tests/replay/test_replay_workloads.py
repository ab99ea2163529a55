"""Workloads: the same seed gives the same requests, and they share what they are said to share."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache.errors import InvalidInputError
from kvcache.replay.trace import NO_REQUEST, Trace
from kvcache.replay.workloads import WORKLOADS, default_sizes, make_workload
from kvcache.replay.workloads.sizes import WorkloadSizes


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
    assert name == "round-robin" or not np.array_equal(first.arrival, other.arrival)


@pytest.mark.parametrize("name", ["multi-turn", "forest", "uniform", "templates", "scan"])
def test_another_seed_gives_other_requests(name: str) -> None:
    sizes = WorkloadSizes(requests=20, system_len=50, conversations=5, turns=3)
    assert not same(make_workload(name, sizes, seed=7), make_workload(name, sizes, seed=8))


@pytest.mark.parametrize("name", WORKLOADS)
def test_requests_come_in_order_and_hints_lie_in_the_prompt(name: str) -> None:
    trace = make_workload(name, WorkloadSizes(requests=40, conversations=6, turns=4))
    assert (np.diff(trace.arrival) >= 0).all()
    for i in range(len(trace)):
        hints = trace.hints(i)
        if name == "scan" and not len(hints):
            continue  # a prompt that is seen once has no boundary
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


class TestUniform:
    def test_forks_lie_anywhere_and_few_documents_are_asked_about_often(self) -> None:
        trace = make_workload("uniform")
        forks = trace.hint_len
        assert len(trace) == len(forks) == 4000
        # as many in each tenth of the 16,000 tokens
        counts = np.histogram(forks, bins=10, range=(0, 16_000))[0]
        assert counts.min() > 330
        assert counts.max() < 470
        first = trace.segment_block[trace.segment_indptr[:-1]]
        asked = np.sort(np.bincount(first, minlength=200))[::-1]
        assert asked[0] > 1000
        assert 80 < (asked > 0).sum() <= 200

    def test_a_document_is_read_from_its_start(self) -> None:
        sizes = WorkloadSizes(requests=30, documents=2, document_len=100, question_len=5)
        trace = make_workload("uniform", sizes)
        shared = [
            common_prefix(trace.prompt(i), trace.prompt(j)) for i in range(30) for j in range(i)
        ]
        assert min(shared) == 0
        assert 80 < max(shared) <= 100


class TestTemplates:
    def test_three_levels(self) -> None:
        sizes = WorkloadSizes(
            requests=60, trees=2, fanout=3, system_len=50, message_len=20, question_len=7
        )
        trace = make_workload("templates", sizes)
        assert set(trace.input_len.tolist()) == {77}
        shared = {
            common_prefix(trace.prompt(i), trace.prompt(j)) for i in range(60) for j in range(i)
        }
        assert shared == {0, 50, 70}
        assert len({tuple(trace.prompt(i)[:70]) for i in range(60)}) <= 6
        assert trace.hints(9).tolist() == [50, 70]


class TestScan:
    def test_seven_of_ten_are_seen_once(self) -> None:
        trace = make_workload("scan")
        once = np.flatnonzero(np.diff(trace.hint_indptr) == 0)
        assert 0.68 < len(once) / len(trace) < 0.72
        first = trace.segment_block[trace.segment_indptr[:-1]]
        assert len(set(first[once].tolist())) == len(once)
        assert set(trace.input_len[once].tolist()) == {9600}

    def test_the_others_go_on_and_begin_anew(self) -> None:
        sizes = WorkloadSizes(requests=200, conversations=2, document_len=30, message_len=10)
        trace = make_workload("scan", sizes)
        last: dict[int, np.ndarray] = {}
        lens = set()
        for i in range(len(trace)):
            if not len(trace.hints(i)):
                continue
            block = int(trace.segment_block[trace.segment_indptr[i]])
            prompt = trace.prompt(i)
            if block in last:
                assert len(prompt) == len(last[block]) + 10
                np.testing.assert_array_equal(prompt[: len(last[block])], last[block])
            last[block] = prompt
            lens.add(len(prompt))
        assert lens == {20, *range(30, 121, 10)}
        assert len(last) > 4


class TestRoundRobin:
    def test_sessions_come_in_turn_with_a_question_of_their_own(self) -> None:
        sizes = WorkloadSizes(conversations=3, turns=4, document_len=40, question_len=5)
        trace = make_workload("round-robin", sizes)
        assert len(trace) == 12
        for i in range(3, 12):
            assert 40 <= common_prefix(trace.prompt(i), trace.prompt(i - 3)) <= 41
            assert common_prefix(trace.prompt(i), trace.prompt(i - 1)) <= 1


def test_sizes_of_its_own_stay_where_others_are_given() -> None:
    assert default_sizes("uniform").requests == 4000
    assert default_sizes("forest") == WorkloadSizes()
    with pytest.raises(InvalidInputError, match="workload must be one of"):
        default_sizes("chat")


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
        match=r"workload must be one of shared-prompt, multi-turn, forest, uniform, .* got 'chat'",
    ):
        make_workload("chat")
