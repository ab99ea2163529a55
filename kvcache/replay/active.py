"""Requests that wait at the head of the queue or run, and the buffer that holds their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvcache.keys import KeyBatch, Ragged
from kvcache.match_batch import MatchBatch
from kvcache.replay.tokens import common_prefix_len
from kvcache.replay.trace import Trace

NO_ROW = -1
NO_SLOT = -1


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """One request on its way through the engine. Lengths in tokens.

    Attributes:
        index: its place in the trace; a lower one came earlier.
        input_len: its prompt.
        end_len: length at which it ends: prompt and output, or where it is cancelled.
        cancelled: whether it ends by an abort.
        target_len: what prefill has to reach: the prompt, and after a retraction the tokens that it
            had generated. A match leaves off the last of them.
        computed_len: computed so far. Kept up by prefill, not by decode (see DecodeRows).
        row: handle of the row, NO_ROW while it waits.
        slot: its line of the token buffer, NO_SLOT if its tokens are not there.
        match: what the cache last held of it; kept as the hint for the next match.
        reuse_len, full_hit_len, branch_len: the match at its first admission; -1 before.
        stuck_len: length at which it was retracted while it ran alone; -1: never.
        shared: by index of another request, the length of their common prefix.
    """

    index: int
    input_len: int
    end_len: int
    cancelled: bool
    target_len: int
    computed_len: int = 0
    row: int = NO_ROW
    slot: int = NO_SLOT
    match: MatchBatch | None = None
    reuse_len: int = -1
    full_hit_len: int = -1
    branch_len: int = -1
    stuck_len: int = -1
    shared: dict[int, int] | None = None


class TokenBuffer:
    """Tokens of all requests that need them: one line each of a flat int32 buffer.

    A line holds the prompt and all that will be generated; keys say how much of it is there yet.
    """

    def __init__(self, trace: Trace, lines: int) -> None:
        self._trace = trace
        self._lens = trace.input_len + trace.output_len
        self._stride = trace.max_len
        self._tokens = np.empty(lines * self._stride, np.int32)
        self._free = list(range(lines - 1, -1, -1))

    @property
    def full(self) -> bool:
        """Whether no line is free."""
        return not self._free

    def load(self, request: ActiveRequest) -> None:
        """Give the request a free line and write its tokens there."""
        request.slot = self._free.pop()
        start = request.slot * self._stride
        self._trace.fill(request.index, self._tokens[start : start + self._stride])

    def release(self, request: ActiveRequest) -> None:
        """Take back the request's line."""
        self._free.append(request.slot)
        request.slot = NO_SLOT

    def keys(self, requests: Sequence[ActiveRequest], lens: Sequence[int]) -> KeyBatch:
        """Return the first lens[i] tokens of each request as keys; nothing is copied."""
        starts = np.array([request.slot for request in requests], np.int64) * self._stride
        return KeyBatch(self._tokens, starts, np.array(lens, np.int64))

    def hints(self, requests: Sequence[ActiveRequest]) -> Ragged:
        """Return the known boundaries of each request."""
        parts = [self._trace.hints(request.index) for request in requests]
        indptr = np.zeros(len(parts) + 1, np.int64)
        np.cumsum([len(part) for part in parts], out=indptr[1:])
        return Ragged(np.concatenate(parts) if parts else np.empty(0, np.int64), indptr)

    def shared_len(self, a: ActiveRequest, b: ActiveRequest) -> int:
        """Return the length of the common prefix of two requests, outputs to come included."""
        start_a, start_b = a.slot * self._stride, b.slot * self._stride
        limit = min(self._lens[a.index], self._lens[b.index])
        return int(common_prefix_len(self._tokens, start_a, start_b, limit))


class DecodeRows:
    """The rows that decode, as arrays that a step changes in a handful of numpy calls.

    Attributes:
        requests: in the order of their rows.
        rows: [len(self)] int64, handles of the rows; the same array until a request comes or goes.
    """

    def __init__(self, running: int) -> None:
        self.requests: list[ActiveRequest] = []
        self._rows = np.zeros(running, np.int64)
        self.rows = self._rows[:0]
        self._left = np.zeros(running, np.int64)
        self._steps_to_next_end = 0

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: ActiveRequest) -> None:
        """Let a request decode from its computed length to its end, at least one token."""
        place = len(self.requests)
        left = request.end_len - request.computed_len
        self.requests.append(request)
        self._rows[place], self._left[place] = request.row, left
        self.rows = self._rows[: place + 1]
        self._steps_to_next_end = min(self._steps_to_next_end, left) if place else left

    def computed_len(self, request: ActiveRequest) -> int:
        """Return the tokens computed of a request that decodes here."""
        return request.end_len - int(self._left[self.requests.index(request)])

    def remove(self, gone: Sequence[ActiveRequest]) -> None:
        """Take requests out; the others keep their order. Their computed_len becomes exact."""
        kept = [i for i, request in enumerate(self.requests) if request not in gone]
        for request in gone:
            request.computed_len = self.computed_len(request)
        self.requests = [self.requests[i] for i in kept]
        self.rows = self._rows[: len(kept)]
        self.rows[:] = self._rows[kept]
        self._left[: len(kept)] = self._left[kept]
        self._steps_to_next_end = int(self._left[: len(kept)].min()) if kept else 0

    def decoded(self) -> bool:
        """Count one more token for every row; return whether some have reached their end."""
        self._left[: len(self.requests)] -= 1
        self._steps_to_next_end -= 1
        return self._steps_to_next_end == 0

    def ended(self) -> list[ActiveRequest]:
        """Return the requests that have reached their end, in order."""
        ended = np.flatnonzero(self._left[: len(self.requests)] == 0)
        return [self.requests[i] for i in ended]
