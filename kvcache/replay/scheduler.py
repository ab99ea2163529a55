"""Who runs next: the waiting queue, admission, and the prompt chunks of a step.

First come, first served, with one exception that engines make too: a request waits while a running
one computes a prefix that it could then reuse, and those behind it go first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvcache.config import CacheConfig
from kvcache.replay.active import NO_ROW, NO_SLOT, ActiveRequest, DecodeRows, TokenBuffer
from kvcache.replay.calls import TimedCalls
from kvcache.replay.config import EngineConfig
from kvcache.replay.counters import ReplayResult
from kvcache.replay.trace import NO_REQUEST, Trace

# how far a step looks past requests that wait for a prefix or an answer
LOOKAHEAD = 8

# a shorter gain is not worth waiting for (SGLang's in-batch prefix check has the same threshold)
_MIN_GAIN = 32

# steps after which a request that found no room tries again, if nothing has ended before
_RETRY_STEPS = 8


class PrefillPlan(NamedTuple):
    """Chunks of a step: requests in the order in which they get pages, and the length each gets to."""

    requests: list[ActiveRequest]
    ends: list[int]

    def add(self, request: ActiveRequest, end: int) -> None:
        self.requests.append(request)
        self.ends.append(end)


class Scheduler:
    """The queue and the running requests of an engine.

    Attributes:
        clock: simulated seconds; requests arrive by it if the engine replays arrivals.
        decoding: running requests past their prefill.
        prefilling: running requests before its end, oldest first.
        tokens: tokens of the running requests and of those at the head of the queue.
    """

    def __init__(
        self,
        trace: Trace,
        config: EngineConfig,
        cache: CacheConfig,
        calls: TimedCalls,
        result: ReplayResult,
    ) -> None:
        self.clock = 0.0
        self.decoding = DecodeRows(cache.max_rows)
        self.prefilling: list[ActiveRequest] = []
        self.tokens = TokenBuffer(trace, cache.max_rows + LOOKAHEAD)
        self._trace = trace
        self._config = config
        self._cache = cache
        self._calls = calls
        self._result = result
        self._page_size = cache.page_size
        self._waiting: list[ActiveRequest] = []  # the head of the queue
        self._next = 0  # the rest of it: requests of the trace from here on
        self._arrival = trace.arrival / config.speed if config.arrivals else None
        self._done = np.zeros(len(trace), np.bool_)
        self._blocked_steps = 0

    @property
    def num_running(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    def wait_for_work(self) -> bool:
        """Let time pass until something runs or waits; return False when all is done."""
        if self.num_running or self._waiting:
            return True
        if self._next == len(self._trace):
            return False
        if self._arrival is not None:
            self.clock = max(self.clock, float(self._arrival[self._next]))
        return True

    def youngest(self) -> ActiveRequest:
        """Return the running request that came last."""
        running = self.prefilling + self.decoding.requests
        return max(running, key=lambda request: request.index)

    # a running request moves on

    def prefilled(self, request: ActiveRequest) -> None:
        """The request's prefill is done."""
        self.prefilling.remove(request)

    def ended(self, request: ActiveRequest) -> None:
        """The request has left its row."""
        self._done[request.index] = True
        self.tokens.release(request)
        self.unblock()

    def put_back(self, request: ActiveRequest) -> None:
        """A retracted request goes back to where it came from: by arrival, before younger ones."""
        if request in self.prefilling:
            self.prefilling.remove(request)
        self.tokens.release(request)
        request.row, request.target_len = NO_ROW, max(request.input_len, request.computed_len)
        request.computed_len = 0
        place = sum(other.index < request.index for other in self._waiting)
        self._waiting.insert(place, request)

    def unblock(self) -> None:
        """Pages may have become free: the head of the queue may try again."""
        self._blocked_steps = 0

    # the chunks of a step

    def plan_prefill(self, *, admit: bool = True) -> PrefillPlan:
        """Share the chunk budget out: running prefills first, new requests while any is left."""
        plan = PrefillPlan([], [])
        budget = self._config.chunk_tokens
        for request in self.prefilling:
            end = self._chunk_end(request, budget, first=not plan.requests)
            if end == request.computed_len:
                break
            plan.add(request, end)
            budget -= end - request.computed_len
        if admit and budget > 0 and self.num_running < self._cache.max_rows:
            self._admit(plan, budget)
        return plan

    def shrink(self, plan: PrefillPlan) -> None:
        """Cut chunks to the pages there are, oldest request first; drop those that get none."""
        capacity, size = self._calls.capacity(), self._page_size
        room = capacity.full_pages
        if self._cache.has_swa:
            room = min(room, capacity.swa_pages)
        chunks = list(zip(*plan, strict=True))
        plan.requests.clear()
        plan.ends.clear()
        for request, end in chunks:
            held = -(-request.computed_len // size)
            end = min(end, (held + room) * size)
            if end > request.computed_len:
                plan.add(request, end)
                room -= -(-end // size) - held

    def _chunk_end(self, request: ActiveRequest, budget: int, *, first: bool) -> int:
        """Return how far the request gets with `budget` tokens.

        A chunk that is not the last one ends at a page boundary, unless it is all the step has.
        """
        end = min(request.target_len, request.computed_len + budget)
        if end < request.target_len:
            floored = max(end // self._page_size * self._page_size, request.computed_len)
            if floored > request.computed_len or not first:
                return floored
        return end

    # admission

    def _admit(self, plan: PrefillPlan, budget: int) -> None:
        if self._blocked_steps:
            self._blocked_steps -= 1
            return
        place = 0
        while budget > 0 and place < LOOKAHEAD and self.num_running < self._cache.max_rows:
            request = self._candidate(place)
            if request is None:
                return
            if self._must_wait(request):
                place += 1
                continue
            end = self._chunk_end(request, budget, first=not plan.requests)
            if end == request.computed_len:
                return
            if not self._give_row(request, end, plan):
                self._blocked_steps = _RETRY_STEPS
                return
            self._waiting.remove(request)
            self.prefilling.append(request)
            self.prefilling.sort(key=lambda running: running.index)
            plan.add(request, end)
            budget -= end - request.computed_len

    def _candidate(self, place: int) -> ActiveRequest | None:
        """Return the waiting request at `place`, its tokens loaded; None: there are not so many."""
        while len(self._waiting) <= place:
            if self._next == len(self._trace):
                return None
            if self._arrival is not None and self._arrival[self._next] > self.clock:
                return None
            request = self._new_request(self._next)
            self._next += 1
            if request is not None:
                self._waiting.append(request)
        request = self._waiting[place]
        if request.slot == NO_SLOT:
            if self.tokens.full:
                last = next(other for other in reversed(self._waiting) if other.slot != NO_SLOT)
                self.tokens.release(last)
            self.tokens.load(request)
        return request

    def _new_request(self, index: int) -> ActiveRequest | None:
        """Return request `index` of the trace; None: it can never fit, and was refused."""
        config = self._config
        input_len = int(self._trace.input_len[index])
        end_len = input_len + (int(self._trace.output_len[index]) if config.decode else 0)
        cancelled = config.abort_every > 0 and (index + 1) % config.abort_every == 0
        if cancelled:
            end_len = max(1, end_len // 2)
        pages = -(-end_len // self._page_size)
        swa_pages = min(pages, self._cache.keep_pages + 1) if self._cache.has_swa else 0
        for need, pool, name in (
            (pages, self._cache.full_pages, "Full"),
            (swa_pages, self._cache.swa_pages, "SWA"),
        ):
            if need > pool:
                self._result.add_refused(f"needs more {name} pages than the pool has ({pool:,})")
                self._done[index] = True
                return None
        return ActiveRequest(index, input_len, end_len, cancelled, target_len=input_len)

    def _must_wait(self, request: ActiveRequest) -> bool:
        """Match the request; return whether an answer or a prefix it needs is on its way."""
        after = int(self._trace.after[request.index])
        if after != NO_REQUEST and not self._done[after]:
            return True
        key_len = request.target_len - 1
        keys = self.tokens.keys([request], [key_len])
        request.match = self._calls.match(keys, previous=request.match)
        request.computed_len = int(request.match.reuse_len[0])
        if not self._config.hold_back:
            return False
        for other in self.prefilling:
            shared = min(key_len, other.target_len, self._shared_len(request, other))
            shared -= shared % self._page_size
            gain = shared - request.computed_len
            if gain >= _MIN_GAIN and other.computed_len < shared:
                return True
        return False

    def _shared_len(self, request: ActiveRequest, other: ActiveRequest) -> int:
        if request.shared is None:
            request.shared = {}
        if other.index not in request.shared:
            request.shared[other.index] = self.tokens.shared_len(request, other)
        return request.shared[other.index]

    def _give_row(self, request: ActiveRequest, end: int, plan: PrefillPlan) -> bool:
        """Admit the request if there is room for it; return whether there was.

        What it would reuse may be what is evictable, so only after the lock is the room known: as
        in SGLang it is locked, measured, and let go again if it is too little.
        """
        assert request.match is not None
        if self.num_running and not self._has_room(request, end, plan):
            return False
        row = self._calls.admit(request.match)
        if self.num_running and not self._has_room(request, end, plan):
            self._calls.abort(row)
            return False
        request.row = int(row[0])
        reuse_len = int(request.match.reuse_len[0])
        if request.reuse_len < 0:
            request.reuse_len = reuse_len
            request.full_hit_len = int(request.match.full_hit_len[0])
            request.branch_len = int(request.match.branch_len[0])
        else:
            self._result.resumed_tokens += reuse_len
        return True

    def _has_room(self, request: ActiveRequest, end: int, plan: PrefillPlan) -> bool:
        """Whether the pools hold the request's prompt and, in the SWA pool, the start of its chunk.

        Prompts that have been let in come first, and each running request keeps a page to grow: so
        one that was just retracted does not come back into the room that its leaving made.
        """
        size, capacity = self._page_size, self._calls.capacity()
        reused = request.computed_len // size
        promised = sum(
            -(-other.target_len // size) - other.computed_len // size for other in self.prefilling
        )
        reserve = self.num_running + 1
        if -(-request.target_len // size) - reused + promised + reserve > capacity.full_pages:
            return False
        if not self._cache.has_swa:
            return True
        planned = sum(
            -(-other_end // size) - other.computed_len // size
            for other, other_end in zip(*plan, strict=True)
        )
        chunk = min(-(-end // size) - reused, self._cache.keep_pages + 1)
        return chunk + planned + reserve <= capacity.swa_pages
