"""What a replay replays: requests as arrays, their tokens made on demand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvcache.errors import InvalidInputError
from kvcache.replay.tokens import count_pages, fill_tokens

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
Float64Array = npt.NDArray[np.float64]

# bound of input_len + output_len of one request: keeps a typo from asking for terabytes
MAX_REQUEST_TOKENS = 1 << 24

# block size of traces whose segments are blocks of their own (the generated workloads)
UNBOUNDED_BLOCK = 1 << 40

NO_REQUEST = -1


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in the order of their arrival.

    A prompt is a list of segments. A segment is a run of blocks with consecutive ids; only its last
    block may be cut short. Blocks of the same id hold the same tokens wherever they stand. Ids are
    dense, whatever the file had.

    Attributes:
        name: what reports call it.
        arrival: [n] float64, seconds from the start, ascending.
        input_len, output_len: [n] int64, tokens; input_len >= 1, output_len >= 0.
        segment_indptr: [n + 1] int64, the segments of request i are [indptr[i], indptr[i + 1]).
        segment_block: [k] int64, first block of each segment, in [0, num_blocks).
        segment_len: [k] int64, tokens of each segment.
        output_block: [n] int64, the block that request i generates, as long as it needs.
        num_blocks: bound of all block ids.
        block_size: tokens of a whole block.
        hint_indptr, hint_len: [n + 1] and [h] int64, lengths at which a caller knows a boundary
            (the end of a system prompt, of a message), ascending; none in traces.
        after: [n] int64, earlier request whose answer this one waits for; NO_REQUEST = none.
    """

    name: str
    arrival: Float64Array
    input_len: Int64Array
    output_len: Int64Array
    segment_indptr: Int64Array
    segment_block: Int64Array
    segment_len: Int64Array
    output_block: Int64Array
    num_blocks: int
    block_size: int
    hint_indptr: Int64Array
    hint_len: Int64Array
    after: Int64Array

    def __len__(self) -> int:
        return len(self.input_len)

    @property
    def max_len(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return int((self.input_len + self.output_len).max(initial=0))

    def fill(self, index: int, out: Int32Array) -> None:
        """Write the prompt and the output of request `index` to the start of `out` (int32)."""
        low, high = self.segment_indptr[index], self.segment_indptr[index + 1]
        blocks, lens = self.segment_block[low:high], self.segment_len[low:high]
        fill_tokens(out, blocks, lens, self.block_size)
        input_len, output_len = self.input_len[index], self.output_len[index]
        fill_tokens(
            out[input_len : input_len + output_len],
            self.output_block[index : index + 1],
            self.output_len[index : index + 1],
            UNBOUNDED_BLOCK,
        )

    def prompt(self, index: int) -> Int32Array:
        """Return the prompt of request `index`: [input_len] int32, values in [0, VOCAB_SIZE)."""
        return self.sequence(index)[: self.input_len[index]]

    def sequence(self, index: int) -> Int32Array:
        """Return the prompt and the output of request `index`: [input_len + output_len] int32."""
        out = np.empty(self.input_len[index] + self.output_len[index], np.int32)
        self.fill(index, out)
        return out

    def block_ids(self, index: int) -> Int64Array:
        """Return the (dense) block ids of request `index`'s prompt, in order: [blocks] int64."""
        segments = range(self.segment_indptr[index], self.segment_indptr[index + 1])
        size = self.block_size
        counts = [-(-int(self.segment_len[s]) // size) for s in segments]
        firsts = [int(self.segment_block[s]) for s in segments]
        runs = [np.arange(b, b + n, dtype=np.int64) for b, n in zip(firsts, counts, strict=True)]
        return np.concatenate(runs) if runs else np.empty(0, np.int64)

    def hints(self, index: int) -> Int64Array:
        """Return the known boundaries of request `index`: [h] int64 tokens."""
        return self.hint_len[self.hint_indptr[index] : self.hint_indptr[index + 1]]

    def limit(self, count: int) -> Trace:
        """Return the first `count` requests, in order of arrival."""
        if count < 1:
            raise InvalidInputError(f"limit must be >= 1, got {count}")
        count = min(count, len(self))
        segments, hints = self.segment_indptr[count], self.hint_indptr[count]
        return Trace(
            name=self.name,
            arrival=self.arrival[:count],
            input_len=self.input_len[:count],
            output_len=self.output_len[:count],
            segment_indptr=self.segment_indptr[: count + 1],
            segment_block=self.segment_block[:segments],
            segment_len=self.segment_len[:segments],
            output_block=self.output_block[:count],
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            hint_indptr=self.hint_indptr[: count + 1],
            hint_len=self.hint_len[:hints],
            after=self.after[:count],
        )

    def cut_outputs(self, most: int) -> Trace:
        """Return the same requests with at most `most` tokens generated for each."""
        if most < 0:
            raise InvalidInputError(f"max output must be >= 0, got {most}")
        return replace(self, output_len=np.minimum(self.output_len, most))

    def pages_for_all(self, page_size: int, running: int, *, outputs: bool = True) -> int:
        """Return a number of pages with which nothing is ever evicted.

        Room for every distinct page of all requests, and for `running` requests that each hold
        their pages a second time.
        """
        total = self.input_len + self.output_len if outputs else self.input_len
        pages = -(-total // page_size)
        distinct = count_pages(
            self.segment_block,
            self.segment_len,
            self.segment_indptr,
            total,
            self.block_size,
            page_size,
            np.empty((3, self.num_blocks), np.int64),
        )
        in_flight = np.sort(pages)[-running:].sum()
        return max(1, int(min(distinct + in_flight, pages.sum())))


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Segments of all requests as read, before their block ids are made dense.

    Attributes:
        counts: [n] segments of each request.
        scopes: [k] int64; ids mean something only inside their scope.
        firsts: [k] int64, first id of each segment, as in the file.
        lens: [k] int64, tokens of each segment.
    """

    counts: Sequence[int]
    scopes: Int64Array
    firsts: Int64Array
    lens: Int64Array


def build_trace(
    name: str,
    *,
    block_size: int,
    arrival: Sequence[float],
    input_len: Sequence[int],
    output_len: Sequence[int],
    segments: Segments,
) -> Trace:
    """Put requests in order of arrival (stable) and give all blocks dense ids.

    What a request has beyond its segments (the tail that block ids leave out) becomes a block of
    its own, as does its output.
    """
    num = len(input_len)
    dense, num_blocks = _dense_blocks(segments, block_size)
    indptr = np.zeros(num + 1, np.int64)
    np.cumsum(segments.counts, out=indptr[1:])
    inputs = np.asarray(input_len, np.int64)
    times = np.asarray(arrival, np.float64)
    order = np.argsort(times, kind="stable")

    covered = np.concatenate((np.zeros(1, np.int64), np.cumsum(segments.lens)))[indptr]
    tails = inputs - np.diff(covered)
    has_tail = tails > 0
    counts = np.diff(indptr) + has_tail
    out_indptr = np.zeros(num + 1, np.int64)
    np.cumsum(counts[order], out=out_indptr[1:])
    blocks, lens = np.empty(out_indptr[-1], np.int64), np.empty(out_indptr[-1], np.int64)
    for place, request in enumerate(order.tolist()):
        low, high, start = indptr[request], indptr[request + 1], out_indptr[place]
        stop = start + high - low
        blocks[start:stop], lens[start:stop] = dense[low:high], segments.lens[low:high]
        if has_tail[request]:
            blocks[stop], lens[stop] = num_blocks + place, tails[request]
    return Trace(
        name=name,
        arrival=times[order],
        input_len=inputs[order],
        output_len=np.asarray(output_len, np.int64)[order],
        segment_indptr=out_indptr,
        segment_block=blocks,
        segment_len=lens,
        output_block=num_blocks + num + np.arange(num, dtype=np.int64),
        num_blocks=num_blocks + 2 * num,
        block_size=block_size,
        hint_indptr=np.zeros(num + 1, np.int64),
        hint_len=np.empty(0, np.int64),
        after=np.full(num, NO_REQUEST, np.int64),
    )


def _dense_blocks(segments: Segments, block_size: int) -> tuple[Int64Array, int]:
    """Return the dense id of each segment's first block, and the number of distinct blocks.

    The ids of a scope are a union of intervals (one a segment). Merged and laid end to end they
    are dense, and a segment lies in one of them.
    """
    dense = np.empty(len(segments.firsts), np.int64)
    ends = segments.firsts + -(-segments.lens // block_size)
    order = np.lexsort((segments.firsts, segments.scopes))
    bounds = np.flatnonzero(np.diff(segments.scopes[order])) + 1
    base = 0
    for members in np.split(order, bounds):
        if not len(members):
            continue
        first = segments.firsts[members]
        reach = np.maximum.accumulate(ends[members])
        starts_new = np.concatenate(([True], first[1:] > reach[:-1]))
        interval = np.cumsum(starts_new) - 1
        interval_first = first[starts_new]
        interval_end = reach[np.concatenate((starts_new[1:], [True]))]
        sizes = interval_end - interval_first
        offset = base + np.cumsum(sizes) - sizes
        dense[members] = offset[interval] + first - interval_first[interval]
        base += int(sizes.sum())
    return dense, base
