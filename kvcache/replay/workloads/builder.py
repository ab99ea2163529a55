"""Builder: a trace put together request by request."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvcache.errors import InvalidInputError
from kvcache.replay.trace import MAX_REQUEST_TOKENS, NO_REQUEST, UNBOUNDED_BLOCK, Trace

# mean seconds between requests, and between two turns of a conversation; these matter with arrivals only, and
# as the order in which conversations take turns
ARRIVAL_GAP = 0.25
THINK_TIME = 20.0


@dataclass(slots=True)
class Builder:
    """Collects requests whose segments are blocks of any length, in order of arrival."""

    num_blocks: int = 0
    arrival: list[float] = field(default_factory=list)
    input_len: list[int] = field(default_factory=list)
    output_len: list[int] = field(default_factory=list)
    indptr: list[int] = field(default_factory=lambda: [0])
    blocks: list[int] = field(default_factory=list)
    lens: list[int] = field(default_factory=list)
    output_block: list[int] = field(default_factory=list)
    hint_indptr: list[int] = field(default_factory=lambda: [0])
    hint_len: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)

    def new_block(self) -> int:
        self.num_blocks += 1
        return self.num_blocks - 1

    def add(
        self,
        arrival: float,
        segments: list[tuple[int, int]],
        output_len: int,
        hints: list[int],
        after: int = NO_REQUEST,
    ) -> int:
        """Add a request of (block, tokens) segments; return the block that its output will be."""
        segments = [(block, tokens) for block, tokens in segments if tokens > 0]
        self.arrival.append(arrival)
        self.input_len.append(sum(tokens for _, tokens in segments))
        self.output_len.append(output_len)
        self.blocks.extend(block for block, _ in segments)
        self.lens.extend(tokens for _, tokens in segments)
        self.indptr.append(len(self.blocks))
        self.output_block.append(self.new_block())
        self.hint_len.extend(sorted({length for length in hints if length > 0}))
        self.hint_indptr.append(len(self.hint_len))
        self.after.append(after)
        if self.input_len[-1] + output_len > MAX_REQUEST_TOKENS:
            raise InvalidInputError(
                f"a request must have at most {MAX_REQUEST_TOKENS} tokens, "
                f"got {self.input_len[-1] + output_len}"
            )
        return self.output_block[-1]

    def trace(self, name: str) -> Trace:
        return Trace(
            name=name,
            arrival=np.array(self.arrival, np.float64),
            input_len=np.array(self.input_len, np.int64),
            output_len=np.array(self.output_len, np.int64),
            segment_indptr=np.array(self.indptr, np.int64),
            segment_block=np.array(self.blocks, np.int64),
            segment_len=np.array(self.lens, np.int64),
            output_block=np.array(self.output_block, np.int64),
            num_blocks=self.num_blocks,
            block_size=UNBOUNDED_BLOCK,
            hint_indptr=np.array(self.hint_indptr, np.int64),
            hint_len=np.array(self.hint_len, np.int64),
            after=np.array(self.after, np.int64),
        )
