"""Readers of request traces: Mooncake JSONL and agentic JSONL, plain or gzip.

The format is told from the content, never from the name. A line that is no request is an
InvalidInputError that names file, line and field; nothing is skipped but empty lines.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvcache.errors import InvalidInputError
from kvcache.replay.trace import MAX_REQUEST_TOKENS, Segments, Trace, build_trace

# tokens of a block in the published Mooncake traces
MOONCAKE_BLOCK = 512

# what block ids may be: dense ids and sums of them stay far from the end of int64
_MAX_BLOCK_ID = (1 << 62) - 1

# of the numbers that stand for times, whatever their unit
_MAX_TIME = 1e15

_GZIP_MAGIC = b"\x1f\x8b"

# names that only one of the two formats has
_MOONCAKE_FIELDS = frozenset({"hash_ids", "input_length", "output_length", "timestamp"})
_AGENTIC_FIELDS = frozenset({"requests", "hash_id_scope", "block_size"})

Fail = Callable[[str, str], InvalidInputError]


@dataclass(slots=True)
class _Parsed:
    """Requests read so far, in the order of the file."""

    block_size: int = 0
    arrival: list[float] = field(default_factory=list)
    input_len: list[int] = field(default_factory=list)
    output_len: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    scopes: list[int] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    lens: list[int] = field(default_factory=list)

    def add_request(
        self,
        arrival: float,
        input_len: int,
        output_len: int,
        runs: list[tuple[int, int]],
        scope: int,
    ) -> None:
        """Add a request; `runs` are (first id, blocks), the last block cut to the prompt's end."""
        self.arrival.append(arrival)
        self.input_len.append(input_len)
        self.output_len.append(output_len)
        self.counts.append(len(runs))
        left = input_len
        for first, blocks in runs:
            tokens = min(left, blocks * self.block_size)
            self.scopes.append(scope)
            self.firsts.append(first)
            self.lens.append(tokens)
            left -= tokens


def read_trace(path: str | Path, *, mooncake_block_size: int = MOONCAKE_BLOCK) -> Trace:
    """Read a trace of requests, plain or gzip.

    Args:
        path: the file, one JSON object a line. Mooncake: a request (`timestamp` in ms,
            `input_length`, `output_length`, `hash_ids`). Agentic: a session (`id`, `block_size`,
            `hash_id_scope`, `requests` of `t` in seconds, `in`, `out`, `hash_rle`); all sessions
            start together.
        mooncake_block_size: tokens that one of Mooncake's hash_ids stands for.

    Returns:
        The requests in order of arrival.

    Raises:
        InvalidInputError: The file cannot be read, or a line is no request. Says which, and why.

    Example:
        >>> len(read_trace("../shared/traces/mooncake_conversation.jsonl.gz"))
        12031
    """
    parsed = _Parsed()
    parse_line: Callable[[dict[str, Any], int, _Parsed, Fail], None] | None = None
    for number, record in _records(Path(path)):

        def fail(name: str, problem: str, line: int = number) -> InvalidInputError:
            return InvalidInputError(f"{path}:{line}: {name}: {problem}")

        if parse_line is None:
            if record.keys() & _AGENTIC_FIELDS:
                parse_line = _parse_session
            elif record.keys() & _MOONCAKE_FIELDS:
                parse_line, parsed.block_size = _parse_request, mooncake_block_size
            else:
                raise InvalidInputError(
                    f"{path}:{number}: neither a Mooncake request (timestamp, input_length, "
                    "output_length, hash_ids) nor an agentic session (block_size, requests)"
                )
        parse_line(record, number, parsed, fail)
    if not parsed.input_len:
        raise InvalidInputError(f"{path}: no requests in it")
    return build_trace(
        Path(path).name.removesuffix(".gz").removesuffix(".jsonl"),
        block_size=parsed.block_size,
        arrival=parsed.arrival,
        input_len=parsed.input_len,
        output_len=parsed.output_len,
        segments=Segments(
            parsed.counts,
            np.array(parsed.scopes, np.int64),
            np.array(parsed.firsts, np.int64),
            np.array(parsed.lens, np.int64),
        ),
    )


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, JSON object) of each line that is not empty."""
    number = 0
    try:
        with path.open("rb") as raw:
            compressed = raw.read(2) == _GZIP_MAGIC
            raw.seek(0)
            stream: io.BufferedIOBase = gzip.GzipFile(fileobj=raw) if compressed else raw
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield number, _json_object(path, number, line)
    except OSError as error:  # gzip.BadGzipFile is one
        raise InvalidInputError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise InvalidInputError(f"{path}:{number + 1}: gzip data is damaged: {error}") from error


def _json_object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{path}:{number}: is not UTF-8 text") from error
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", "too deep or too long")
        column = getattr(error, "colno", 1)
        raise InvalidInputError(
            f"{path}:{number}: is not JSON: {reason} at column {column}"
        ) from error
    if not isinstance(record, dict):
        raise InvalidInputError(
            f"{path}:{number}: must be a JSON object, got {type(record).__name__}"
        )
    return record


def _parse_request(record: dict[str, Any], line: int, parsed: _Parsed, fail: Fail) -> None:
    """One Mooncake line: one request."""
    timestamp = _seconds(record, "timestamp", "timestamp", fail) / 1000.0
    input_len = _count(record, "input_length", "input_length", fail, low=1)
    output_len = _count(record, "output_length", "output_length", fail, low=0)
    ids = _list(record, "hash_ids", "hash_ids", fail)
    for i, block in enumerate(ids):
        if type(block) is not int or not 0 <= block <= _MAX_BLOCK_ID:
            raise fail(f"hash_ids[{i}]", f"must be an int in [0, 2**62), got {_show(block)}")
    expected = -(-input_len // parsed.block_size)
    if len(ids) != expected:
        raise fail(
            "hash_ids",
            f"must hold {expected} block ids for {input_len} tokens in blocks of "
            f"{parsed.block_size}, got {len(ids)}",
        )
    parsed.add_request(timestamp, input_len, output_len, _runs(ids), scope=0)


def _runs(ids: list[int]) -> list[tuple[int, int]]:
    """Split ids into runs of consecutive ones: [(first, count)]."""
    starts = [i for i in range(len(ids)) if i == 0 or ids[i] != ids[i - 1] + 1]
    return [(ids[i], j - i) for i, j in itertools.pairwise([*starts, len(ids)])]


def _parse_session(record: dict[str, Any], line: int, parsed: _Parsed, fail: Fail) -> None:
    """One agentic line: one session with all its requests."""
    block_size = _count(record, "block_size", "block_size", fail, low=1)
    if parsed.block_size not in (0, block_size):
        raise fail(
            "block_size", f"must be {parsed.block_size} as in the lines before, got {block_size}"
        )
    parsed.block_size = block_size
    scope_name = record.get("hash_id_scope", "local")
    if scope_name not in ("local", "global"):
        raise fail("hash_id_scope", f'must be "local" or "global", got {_show(scope_name)}')
    scope = line if scope_name == "local" else 0
    for i, request in enumerate(_list(record, "requests", "requests", fail)):
        where = f"requests[{i}]"
        if not isinstance(request, dict):
            raise fail(where, f"must be a JSON object, got {_show(request)}")
        seconds = _seconds(request, "t", f"{where}.t", fail)
        input_len = _count(request, "in", f"{where}.in", fail, low=1)
        output_len = _count(request, "out", f"{where}.out", fail, low=0)
        runs = _rle(request, f"{where}.hash_rle", fail)
        expected, got = input_len // block_size, sum(count for _, count in runs)
        if got != expected:
            raise fail(
                f"{where}.hash_rle",
                f"must stand for {expected} block ids for {input_len} tokens in blocks of "
                f"{block_size}, got {got}",
            )
        parsed.add_request(seconds, input_len, output_len, runs, scope)


def _rle(request: dict[str, Any], where: str, fail: Fail) -> list[tuple[int, int]]:
    """The run-length coded ids of one agentic request: [(first, count)]."""
    runs = []
    for i, run in enumerate(_list(request, "hash_rle", where, fail)):
        if not isinstance(run, list) or len(run) != 2 or any(type(x) is not int for x in run):
            raise fail(f"{where}[{i}]", f"must be [first id, count], got {_show(run)}")
        first, count = run
        if not 0 <= first <= _MAX_BLOCK_ID or not 1 <= count <= MAX_REQUEST_TOKENS:
            raise fail(
                f"{where}[{i}]",
                f"must have an id in [0, 2**62) and a count in [1, {MAX_REQUEST_TOKENS}], "
                f"got {_show(run)}",
            )
        runs.append((first, count))
    return runs


def _value(record: dict[str, Any], key: str, where: str, fail: Fail) -> Any:
    if key not in record:
        raise fail(where, "is missing")
    return record[key]


def _count(record: dict[str, Any], key: str, where: str, fail: Fail, *, low: int) -> int:
    value = _value(record, key, where, fail)
    if type(value) is not int or not low <= value <= MAX_REQUEST_TOKENS:
        raise fail(where, f"must be an int in [{low}, {MAX_REQUEST_TOKENS}], got {_show(value)}")
    return value


def _seconds(record: dict[str, Any], key: str, where: str, fail: Fail) -> float:
    value = _value(record, key, where, fail)
    if type(value) not in (int, float) or not 0 <= value <= _MAX_TIME:  # NaN is in no range
        raise fail(where, f"must be a number in [0, {_MAX_TIME:g}], got {_show(value)}")
    return float(value)


def _list(record: dict[str, Any], key: str, where: str, fail: Fail) -> list[Any]:
    value = _value(record, key, where, fail)
    if not isinstance(value, list):
        raise fail(where, f"must be a list, got {_show(value)}")
    return value


def _show(value: Any) -> str:
    """A value as the file has it, short."""
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
