"""The simulated engine: its counts add up, nothing leaks, and it always gets on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from kvcache import CacheConfig, KVCacheManager, Lru, parse_checkpoints
from kvcache.errors import InvalidInputError
from kvcache.replay.bound import replay_bound
from kvcache.replay.config import EngineConfig
from kvcache.replay.counters import ReplayResult
from kvcache.replay.engine import Engine
from kvcache.replay.readers import read_trace
from kvcache.replay.trace import Trace
from kvcache.replay.workloads import WORKLOADS, WorkloadSizes, make_workload

ALL_CALLS = {
    *("match", "admit", "capacity", "extend", "step", "advance", "commit", "slide"),
    *("finish", "retract", "abort"),
}
POLICIES = ("none", "branch", "branch,hints,every=16")


class SpyManager(KVCacheManager):
    """Notes the chunks that it is asked for, step by step, and checks itself now and then."""

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config)
        self.chunks: list[list[tuple[int, int]]] = []  # of each extend: (from, to) of each row
        self.peak_rows = 0
        self.calls = 0

    def extend(self, rows: Any, new_len: Any) -> None:
        before = self.rows.computed_len[self.index(rows)].tolist()
        super().extend(rows, new_len)
        self.chunks.append(list(zip(before, np.asarray(new_len).tolist(), strict=True)))
        self.peak_rows = max(self.peak_rows, self.stats().running_rows)

    def advance(self, rows: Any, lens: Any = None) -> None:
        super().advance(rows, lens)
        self.calls += 1
        if self.calls % 23 == 0:
            self.check()


def sizes(**changes: int) -> WorkloadSizes:
    small = {
        "requests": 20,
        "system_len": 60,
        "question_len": 10,
        "output_len": 12,
        "conversations": 5,
        "turns": 4,
        "message_len": 12,
        "trees": 2,
        "depth": 3,
        "fanout": 2,
        "documents": 3,
        "document_len": 60,
    }
    return WorkloadSizes(**{**small, **changes})


def config(policy: str = "branch", **changes: Any) -> EngineConfig:
    small: dict[str, Any] = {"page_size": 4, "window": 8, "chunk": 32, "running": 4}
    small["retention"] = Lru()
    return EngineConfig(checkpoints=parse_checkpoints(policy), **{**small, **changes})


def replay(trace: Trace, engine_config: EngineConfig) -> tuple[ReplayResult, SpyManager]:
    manager = SpyManager(engine_config.cache_config(trace))
    result = Engine(trace, engine_config, manager=manager).run()
    manager.check()
    assert result.leaked_pages == 0
    assert result.requests + result.refused == len(trace)
    return result, manager


def timeless(result: ReplayResult) -> dict[str, Any]:
    """All counts but those of a clock."""
    counts = result.as_dict()
    for name in ("host_us_per_request", "wall_seconds"):
        del counts[name]
    counts["calls"] = {name: call["count"] for name, call in counts["calls"].items()}
    return counts


class TestCounts:
    def test_one_request_after_another_by_hand(self) -> None:
        """60 shared and 10 unique tokens, P = 4, W = 8: a window stands at 68 alone.

        Request 1 finds Full KV of 60 tokens and no window at 60. With `branch` it leaves one there,
        and requests 2 to 4 reuse 60.
        """
        trace = make_workload("shared-prompt", sizes(requests=5))
        run = {"running": 1, "chunk": 0, "decode": False}
        none, _ = replay(trace, config("none", **run))
        branch, _ = replay(trace, config("branch", **run))
        assert (none.requests, none.input_tokens, none.output_tokens) == (5, 350, 0)
        assert (none.reused_tokens, none.full_hit_tokens, none.branch_points) == (0, 240, 4)
        assert none.computed_tokens == 350
        assert (branch.reused_tokens, branch.full_hit_tokens) == (180, 240)
        assert (branch.branch_points, branch.computed_tokens) == (1, 170)
        assert branch.hit_rate == 180 / 350
        assert branch.full_hit_rate == 240 / 350

    @pytest.mark.parametrize("policy", POLICIES)
    @pytest.mark.parametrize("workload", WORKLOADS)
    @pytest.mark.parametrize("decode", [True, False], ids=["decode", "no-decode"])
    def test_every_token_is_computed_or_reused(
        self, workload: str, policy: str, decode: bool
    ) -> None:
        trace = make_workload(workload, sizes())
        result, _ = replay(trace, config(policy, decode=decode))
        outputs = int(trace.output_len.sum()) if decode else 0
        assert result.input_tokens == trace.input_len.sum()
        assert result.output_tokens == outputs
        assert result.computed_tokens == result.input_tokens + outputs - result.reused_tokens
        assert result.full_hit_tokens > 0
        assert result.reused_tokens <= result.full_hit_tokens < result.input_tokens

    def test_a_run_repeats_itself(self) -> None:
        trace = make_workload("forest", sizes())
        tight = config("branch,hints,every=16", full_tokens=400, swa_tokens=100, abort_every=4)
        assert timeless(replay(trace, tight)[0]) == timeless(replay(trace, tight)[0])

    @pytest.mark.parametrize("workload", WORKLOADS)
    def test_unlimited_pools_never_evict_what_is_in_use(self, workload: str) -> None:
        trace = make_workload(workload, sizes())
        result, _ = replay(trace, config(window=None))
        assert result.evicted_full_pages == 0
        assert result.retractions == 0
        assert 0 < result.peak_full_pages <= result.full_pages
        assert result.swa_pages == result.peak_swa_pages == 0

    def test_a_pool_that_cannot_fill_is_cut_to_what_can(self) -> None:
        trace = make_workload("shared-prompt", sizes())
        huge = replay(trace, config(full_tokens=10**15, swa_tokens=10**15))[0]
        assert timeless(huge) == timeless(replay(trace, config())[0])


class TestChunks:
    @pytest.mark.parametrize("hold_back", [True, False])
    def test_prefills_share_the_budget_of_a_step(self, hold_back: bool) -> None:
        trace = make_workload("forest", sizes(question_len=50))
        _, manager = replay(trace, config(chunk=48, hold_back=hold_back))
        totals = [sum(end - start for start, end in step) for step in manager.chunks]
        assert max(totals) == 48
        assert max(len(step) for step in manager.chunks) > 1
        lengths = set((trace.input_len).tolist())
        for step in manager.chunks:
            for _, end in step:
                assert end % 4 == 0 or end in lengths

    def test_a_budget_smaller_than_a_page_still_gets_on(self) -> None:
        trace = make_workload("shared-prompt", sizes(requests=3))
        result, manager = replay(trace, config(chunk=3, running=2))
        assert result.requests == 3
        assert max(sum(end - start for start, end in step) for step in manager.chunks) == 3

    def test_without_a_budget_prompts_are_computed_whole(self) -> None:
        trace = make_workload("shared-prompt", sizes(requests=4))
        _, manager = replay(trace, config(chunk=0, hold_back=False))
        assert manager.chunks == [[(0, 70), (0, 70), (0, 70), (0, 70)]]

    def test_a_chunk_larger_than_the_swa_pool_is_shrunk(self) -> None:
        """A prompt of 110 tokens against an SWA pool of 24 (D48): in chunks that fit."""
        trace = make_workload("shared-prompt", sizes(requests=2, system_len=100))
        result, manager = replay(trace, config(chunk=0, swa_tokens=24))
        assert (result.requests, result.retractions) == (2, 0)
        assert manager.chunks[0] == [(0, 24)]
        assert all(end - start <= 24 for step in manager.chunks for start, end in step)

    def test_no_more_run_than_there_are_rows(self) -> None:
        trace = make_workload("forest", sizes())
        _, manager = replay(trace, config(running=3))
        assert manager.peak_rows == 3


class TestHoldingBack:
    def test_a_request_waits_for_the_prefix_that_another_computes(self) -> None:
        """All but the first two reuse the prompt: the second leaves the window at the fork."""
        trace = make_workload("shared-prompt", sizes(requests=10))
        held, _ = replay(trace, config(chunk=0, running=10))
        assert held.reused_tokens == 8 * 60
        # whole prompts side by side: nothing is there to be reused
        rush, _ = replay(trace, config(hold_back=False, chunk=0, running=10))
        assert rush.reused_tokens == 0

    def test_it_waits_no_longer_than_until_the_prefix_is_there(self) -> None:
        """Request 0 is past the 100 shared tokens at 128: the step of its last 32 has room for more.

        No window stands at 100, so request 1 starts at the end of the first chunk.
        """
        trace = make_workload("shared-prompt", sizes(requests=2, system_len=100, question_len=60))
        _, manager = replay(trace, config("none", chunk=64))
        assert manager.chunks[:3] == [[(0, 64)], [(64, 128)], [(128, 160), (64, 96)]]

    def test_requests_that_share_nothing_do_not_wait(self) -> None:
        trace = make_workload("shared-prompt", sizes(requests=4, system_len=0, question_len=60))
        _, manager = replay(trace, config(chunk=0))
        assert len(manager.chunks) == 1

    def test_a_turn_waits_for_the_answer_before_it(self) -> None:
        trace = make_workload("multi-turn", sizes(conversations=1, turns=6, output_len=30))
        result, manager = replay(trace, config("hints", running=8))
        assert manager.peak_rows == 1
        assert result.full_hit_tokens == result.reused_tokens
        bound, _ = replay_bound(trace, page_size=4)
        assert result.reused_tokens == bound.reused_tokens


class TestTightPools:
    @pytest.mark.parametrize("policy", POLICIES)
    @pytest.mark.parametrize(
        ("full", "swa"), [(300, None), (None, 48), (200, 60)], ids=["full", "swa", "both"]
    )
    @pytest.mark.parametrize("workload", WORKLOADS)
    def test_nothing_leaks_and_counts_add_up(
        self, workload: str, full: int | None, swa: int | None, policy: str
    ) -> None:
        trace = make_workload(workload, sizes(output_len=40))
        result, _ = replay(trace, config(policy, full_tokens=full, swa_tokens=swa, running=6))
        assert result.requests > 0
        assert result.evicted_full_pages + result.evicted_swa_pages > 0
        ended = result.input_tokens + result.output_tokens
        done = result.computed_tokens + result.reused_tokens + result.resumed_tokens
        assert done == ended + result.retracted_tokens
        for peak, pages in (("peak_full_pages", full), ("peak_swa_pages", swa)):
            assert pages is None or getattr(result, peak) <= pages // 4

    def test_retracted_requests_come_back_and_count_once(self) -> None:
        trace = make_workload("shared-prompt", sizes(system_len=8, output_len=60))
        result, _ = replay(trace, config(full_tokens=200, running=6))
        assert result.retractions > 0
        assert result.resumed_tokens > 0
        assert result.requests == 20
        assert result.input_tokens == trace.input_len.sum()
        assert result.output_tokens == trace.output_len.sum()
        # what comes back is a hit of its own, not of the prompt
        assert result.reused_tokens <= result.full_hit_tokens <= 20 * 8

    def test_who_is_retracted_beside_another_was_not_alone(self) -> None:
        trace = make_workload("shared-prompt", sizes(requests=2, output_len=40))
        engine = Engine(trace, config(chunk=0))
        while len(engine._decoding) < 2:
            engine._step()
        first, second = sorted(engine._decoding.requests, key=lambda request: request.index)
        engine._retract_youngest()
        assert (first.stuck_len, second.stuck_len) == (-1, -1)
        engine._retract_youngest()
        assert first.stuck_len == first.input_len + 1
        engine.close()

    @pytest.mark.parametrize("running", [1, 6])
    def test_pools_of_one_request_serve_all(self, running: int) -> None:
        """70 prompt and 40 output tokens: 28 pages, and 3 SWA pages for a window and one more."""
        trace = make_workload("shared-prompt", sizes(output_len=40))
        result, _ = replay(trace, config(full_tokens=112, swa_tokens=16, running=running))
        assert (result.requests, result.refused) == (20, 0)

    def test_cancelled_requests_leave_nothing_behind(self) -> None:
        trace = make_workload("forest", sizes(output_len=40))
        result, _ = replay(trace, config(full_tokens=600, swa_tokens=100, abort_every=3))
        assert result.aborted == 6
        assert result.requests == 20
        assert result.output_tokens < trace.output_len.sum()

    @pytest.mark.parametrize("decode", [True, False])
    def test_a_run_in_which_all_are_cancelled(self, decode: bool) -> None:
        trace = make_workload("shared-prompt", sizes())
        result, _ = replay(trace, config(abort_every=1, decode=decode))
        assert (result.aborted, result.requests) == (20, 20)
        assert result.output_tokens == 0


class TestRefusal:
    def test_a_request_that_can_never_fit_is_refused_and_those_behind_it_run(self) -> None:
        trace = make_workload("forest", sizes())
        total = trace.input_len + trace.output_len
        # a pool for all but the longest
        pool = int(np.sort(total)[-4])
        result, _ = replay(trace, config(full_tokens=pool))
        too_long = int((-(-total // 4) > pool // 4).sum())
        assert 0 < too_long < 20
        assert result.refused == too_long
        reason = f"needs more Full pages than the pool has ({pool // 4:,})"
        assert result.refused_reasons == {reason: too_long}
        assert result.requests == 20 - too_long
        assert result.input_tokens == trace.input_len[-(-total // 4) <= pool // 4].sum()

    def test_a_window_that_does_not_fit_is_refused(self) -> None:
        trace = make_workload("shared-prompt", sizes(requests=3))
        result, _ = replay(trace, config(window=40, swa_tokens=40))
        assert result.refused_reasons == {"needs more SWA pages than the pool has (10)": 3}
        assert (result.requests, result.hit_rate, result.host_us_per_request) == (0, 0.0, 0.0)

    def test_a_turn_does_not_wait_for_a_refused_one(self) -> None:
        trace = make_workload("multi-turn", sizes(conversations=1, turns=6, output_len=30))
        result, _ = replay(trace, config(full_tokens=150))
        assert result.refused > 0
        assert result.requests > 0


class TestArrivals:
    def test_requests_come_at_their_times(self) -> None:
        trace = make_workload("shared-prompt", sizes(requests=30))
        closed, _ = replay(trace, config(running=30))
        timed, manager = replay(trace, config(running=30, arrivals=True))
        assert closed.simulated_seconds == 0.0
        # a request takes a quarter of a second, and they come further apart than that, mostly
        assert timed.simulated_seconds >= trace.arrival[-1]
        assert manager.peak_rows < 15
        assert timed.requests == 30

    def test_speed_brings_them_closer(self) -> None:
        trace = make_workload("shared-prompt", sizes(requests=30))
        slow = replay(trace, config(running=30, arrivals=True))[1]
        fast, manager = replay(trace, config(running=30, arrivals=True, speed=100.0))
        assert manager.peak_rows > slow.peak_rows
        assert fast.simulated_seconds < trace.arrival[-1] / 2


class TestBound:
    @pytest.mark.parametrize("workload", WORKLOADS)
    @pytest.mark.parametrize("decode", [True, False])
    @pytest.mark.parametrize("page_size", [1, 4, 7])
    def test_is_the_longest_page_aligned_prefix_ever_computed(
        self, workload: str, decode: bool, page_size: int
    ) -> None:
        trace = make_workload(workload, sizes())
        seen: set[bytes] = set()
        expected = 0
        for i in range(len(trace)):
            tokens = trace.sequence(i) if decode else trace.prompt(i)
            ends = range(page_size, int(trace.input_len[i]), page_size)
            hits = [end for end in ends if tokens[:end].tobytes() in seen]
            expected += max(hits, default=0)
            pages = range(page_size, len(tokens) + 1, page_size)
            seen.update(tokens[:end].tobytes() for end in pages)
        result, timeline = replay_bound(trace, page_size=page_size, decode=decode)
        assert result.reused_tokens == result.full_hit_tokens == expected
        assert result.leaked_pages == 0
        assert timeline.reused_tokens[-1] <= expected

    @pytest.mark.parametrize(("length", "reused"), [(1024, 960), (1025, 1024), (64, 0)])
    def test_the_last_token_of_a_prompt_is_always_computed(
        self, tmp_path: Path, length: int, reused: int
    ) -> None:
        record = {"timestamp": 0, "input_length": length, "output_length": 70}
        line = json.dumps({**record, "hash_ids": list(range(-(-length // 512)))})
        (tmp_path / "t").write_text(f"{line}\n{line}\n")
        trace = read_trace(tmp_path / "t")
        assert replay_bound(trace, page_size=64)[0].reused_tokens == reused
        engine = EngineConfig(window=64, running=1, checkpoints=parse_checkpoints("every=64"))
        assert replay(trace, engine)[0].reused_tokens == reused

    @pytest.mark.parametrize("workload", WORKLOADS)
    def test_no_policy_beats_it_one_request_at_a_time(self, workload: str) -> None:
        trace = make_workload(workload, sizes())
        bound, _ = replay_bound(trace, page_size=4)
        previous = 0
        for policy in ("none", "branch", "branch,hints,every=4"):
            result, _ = replay(trace, config(policy, running=1))
            assert previous <= result.reused_tokens <= bound.reused_tokens
            previous = result.reused_tokens


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 0}, r"page size must be in \[1, 1048576\], got 0"),
        ({"window": -1}, r"window must be in \[1, 1073741824\], got -1"),
        ({"full_tokens": 3}, r"Full pool must hold at least one page of 4 tokens, got 3"),
        ({"swa_tokens": 0}, r"SWA pool must hold at least one page of 4 tokens, got 0"),
        ({"full_tokens": -64}, r"Full pool must be >= 0, got -64"),
        ({"window": None, "swa_tokens": 64}, r"SWA pool: there is none without a window"),
        ({"chunk": -1}, r"chunk must be >= 0, got -1"),
        ({"running": 0}, r"running must be in \[1, 65536\], got 0"),
        ({"speed": 0.0}, r"speed must be a number > 0, got 0.0"),
        ({"speed": float("nan")}, r"speed must be a number > 0, got nan"),
        ({"abort_every": -2}, r"abort every must be >= 0, got -2"),
        ({"device": "toaster"}, r"device must be cpu, cuda or cuda:N, got 'toaster'"),
        ({"device": "meta"}, r"device must be cpu, cuda or cuda:N, got 'meta'"),
        ({"device": "cuda:99"}, r"device must be there, got 'cuda:99'"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        config(**changes)


AFTER_WARM_UP = """
import numba.core.event as event
from kvcache.policies.checkpoints import parse_checkpoints
from kvcache.replay.bound import replay_bound
from kvcache.replay.config import EngineConfig
from kvcache.replay.engine import Engine
from kvcache.replay.warmup import warm_up
from kvcache.replay.workloads import WorkloadSizes, make_workload

sizes = WorkloadSizes(
    requests=24, system_len=24, question_len=6, output_len=20, trees=2, depth=2, fanout=2
)
config = EngineConfig(
    page_size=4, window=8, full_tokens=120, swa_tokens=64, chunk=32, running=6, abort_every=5,
    checkpoints=parse_checkpoints("branch,hints,every=8"),
)
trace = make_workload("forest", sizes)
warm_up(config.cache_config(trace))
# the lock is taken for a load from disk too
with event.install_recorder("numba:compiler_lock") as seen:
    result = Engine(trace, config).run()
    replay_bound(trace, page_size=4, decode=True)
assert not seen.buffer, len(seen.buffer)
assert result.evicted_full_pages > 0
assert result.evicted_swa_pages > 0
print(*result.calls)
"""


@pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="numba's compiler is off")
def test_a_replay_compiles_nothing_after_its_warm_up() -> None:
    argv = [sys.executable, "-c", AFTER_WARM_UP]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == ALL_CALLS
