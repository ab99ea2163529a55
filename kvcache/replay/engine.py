"""The simulated engine: continuous batching over the manager's batched calls, and nothing else.

A step is what a serving engine does between two forwards: pages for one more token of every request
that decodes, prompt chunks for those that prefill, new requests while there is room, then (the
forward) commit, slide, finish. Decode and prefill share steps.

Which requests wait and which run is in `Scheduler` (scheduler.py); this file moves them on.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from kvcache.errors import CapacityError
from kvcache.keys import Ragged
from kvcache.manager import KVCacheManager
from kvcache.replay.active import ActiveRequest
from kvcache.replay.calls import TimedCalls
from kvcache.replay.config import EngineConfig
from kvcache.replay.counters import SAMPLES, ReplayResult, Timeline, used_pages
from kvcache.replay.scheduler import PrefillPlan, Scheduler
from kvcache.replay.trace import Trace


class Engine:
    """Replays one trace once.

    Args:
        trace: the requests.
        config: the engine and its cache.
        policy: name of the run in the result.
        on_end: called with the number of requests that have just ended or were refused.
        manager: the cache; default: one as `config` asks for. Tests pass their own.
    """

    def __init__(
        self,
        trace: Trace,
        config: EngineConfig,
        *,
        policy: str = "",
        on_end: Callable[[int], object] | None = None,
        manager: KVCacheManager | None = None,
    ) -> None:
        self.trace = trace
        self.config = config
        self.manager = manager or KVCacheManager(config.cache_config(trace))
        self.result = ReplayResult(policy)
        self.timeline = Timeline()
        self._calls = TimedCalls(self.manager)
        self._on_end = on_end or (lambda count: None)
        self._scheduler = Scheduler(trace, config, self.manager.config, self._calls, self.result)
        self._decoding = self._scheduler.decoding
        self._tokens = self._scheduler.tokens
        self._with_hints = self.manager.config.keeps_hints
        self._reported = 0
        self._next_sample = 0.0

    def run(self) -> ReplayResult:
        """Replay the whole trace, flush the cache, and return what was counted."""
        started = time.perf_counter()
        scheduler, config = self._scheduler, self.config
        while scheduler.wait_for_work():
            prompt_tokens, computed = self._step()
            self.result.steps += 1
            self.result.computed_tokens += computed
            scheduler.clock += config.step_seconds + prompt_tokens / config.prefill_rate
            self._report()
        self._close(started)
        return self.result

    def close(self) -> None:
        """Drop the cache's memory; the counts stay."""
        self.manager.close()

    def _step(self) -> tuple[int, int]:
        """Run one step; return (prompt tokens, all tokens) that it computed."""
        self._take_decode_pages()
        plan = self._take_prefill_pages(self._scheduler.plan_prefill())
        self._note_peaks()
        prompt_tokens = sum(end - r.computed_len for r, end in zip(*plan, strict=True))

        # this is where the forward would be launched
        decoding = self._decoding
        decoded = len(decoding)
        if decoded:
            self._calls.advance(decoding.rows)
            self._calls.slide(decoding.rows)
            if decoding.decoded():
                self._end(decoding.ended())
        if plan.requests:
            self._advance_prefill(plan)
        return prompt_tokens, prompt_tokens + decoded

    # pages

    def _take_decode_pages(self) -> None:
        """Make room for one more token of each request that decodes; retract until it is there."""
        while len(self._decoding) and not self._step_rows():
            self._retract_youngest()

    def _step_rows(self) -> bool:
        try:
            self._calls.step(self._decoding.rows)
        except CapacityError:
            return False
        return True

    def _take_prefill_pages(self, plan: PrefillPlan) -> PrefillPlan:
        """Extend the rows of the plan; where pages run out, shrink chunks, then retract.

        Returns:
            The chunks that got their pages.
        """
        while plan.requests:
            try:
                rows = np.array([request.row for request in plan.requests], np.int64)
                self._calls.extend(rows, np.array(plan.ends, np.int32))
                break
            except CapacityError:
                self._scheduler.shrink(plan)
            if not plan.requests and not len(self._decoding):
                # nothing moves, so nothing will free pages: someone has to go
                self._retract_youngest()
                plan = self._scheduler.plan_prefill(admit=False)
        return plan

    def _retract_youngest(self) -> None:
        """Send the request that came last back to the queue."""
        scheduler = self._scheduler
        request, alone = scheduler.youngest(), scheduler.num_running == 1
        if request in self._decoding.requests:
            self._decoding.remove([request])
        if alone:
            # the pools hold whatever was not refused: alone, it gets further every time
            assert request.computed_len > request.stuck_len
            request.stuck_len = request.computed_len
        row = np.array([request.row], np.int64)
        keys = self._tokens.keys([request], [request.computed_len])
        request.match = self._calls.retract(row, keys, self._hints([request]))
        self.result.retractions += 1
        self.result.retracted_tokens += request.computed_len
        scheduler.put_back(request)

    # progress

    def _advance_prefill(self, plan: PrefillPlan) -> None:
        """The chunks are computed: commit them, and move on those whose prompt is done."""
        requests = plan.requests
        rows = np.array([request.row for request in requests], np.int64)
        self._calls.advance(rows)
        for request, end in zip(*plan, strict=True):
            request.computed_len = end
        done = [r for r in requests if r.computed_len >= min(r.target_len, r.end_len)]
        ended = [request for request in done if request.computed_len >= request.end_len]
        kept = [request for request in requests if request not in ended]
        if kept:
            keys = self._tokens.keys(kept, [request.computed_len for request in kept])
            kept_rows = np.array([request.row for request in kept], np.int64)
            self._calls.commit(kept_rows, keys, self._hints(kept))
        for request in done:
            self._scheduler.prefilled(request)
            if request not in ended:
                self._decoding.add(request)
        if ended:
            self._end(ended)
        self._scheduler.unblock()

    def _end(self, requests: list[ActiveRequest]) -> None:
        """Finish or abort requests that have reached their end."""
        decoding = [request for request in requests if request in self._decoding.requests]
        if decoding:
            self._decoding.remove(decoding)
        finished = [request for request in requests if not request.cancelled]
        if finished:
            rows = np.array([request.row for request in finished], np.int64)
            keys = self._tokens.keys(finished, [request.computed_len for request in finished])
            self._calls.finish(rows, keys, self._hints(finished))
        cancelled = [request.row for request in requests if request.cancelled]
        if cancelled:
            self._calls.abort(np.array(cancelled, np.int64))
        for request in requests:
            self.result.add_ended(request)
            self._scheduler.ended(request)

    def _hints(self, requests: list[ActiveRequest]) -> Ragged | None:
        return self._tokens.hints(requests) if self._with_hints else None

    # counting

    def _note_peaks(self) -> None:
        full, swa = used_pages(self.manager)
        result = self.result
        result.peak_full_pages = max(result.peak_full_pages, full)
        result.peak_swa_pages = max(result.peak_swa_pages, swa)

    def _report(self) -> None:
        done = self.result.requests + self.result.refused
        if done > self._reported:
            self._on_end(done - self._reported)
            self._reported = done
            if done >= self._next_sample:
                self._sample()
                self._next_sample = done + len(self.trace) / SAMPLES

    def _sample(self) -> None:
        capacity, config = self.manager.capacity(), self.manager.config
        locked = (
            config.full_pages - capacity.full_pages,
            config.swa_pages - capacity.swa_pages,
        )
        self.timeline.sample(self.result, used_pages(self.manager), locked)

    def _close(self, started: float) -> None:
        if self.config.arrivals:
            self.result.simulated_seconds = self._scheduler.clock
        self.result.close(self.manager, self._calls)
        self.result.wall_seconds = time.perf_counter() - started
