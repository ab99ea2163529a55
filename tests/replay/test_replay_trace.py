"""Readers and tokens of traces: what a file says is what is replayed, and bad lines are named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache.errors import InvalidInputError
from kvcache.replay.readers import read_trace
from kvcache.replay.tokens import VOCAB_SIZE
from kvcache.replay.trace import Trace

GOOD = {"timestamp": 0, "input_length": 700, "output_length": 3, "hash_ids": [0, 1]}
TURN = {"t": 0.5, "in": 130, "out": 7, "hash_rle": [[4, 2]]}
SESSION = {"id": "s", "block_size": 64, "hash_id_scope": "local", "requests": [TURN]}


def write(path: Path, *records: Any) -> Path:
    """Write records as JSON lines; strings as they are."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(lines) + "\n")
    return path


def request(time: float, length: int, ids: list[int], out: int = 1) -> dict[str, Any]:
    return {"timestamp": time, "input_length": length, "output_length": out, "hash_ids": ids}


def session(scope: str, *turns: tuple[float, int, list[list[int]]]) -> dict[str, Any]:
    requests = [{"t": t, "in": n, "out": 2, "hash_rle": rle} for t, n, rle in turns]
    return {"id": "s", "block_size": 64, "hash_id_scope": scope, "requests": requests}


def pages_of(trace: Trace, page_size: int, outputs: bool) -> set[bytes]:
    """Every distinct prefix that ends at a page boundary or at the end of a sequence."""
    found = set()
    for i in range(len(trace)):
        tokens = trace.sequence(i) if outputs else trace.prompt(i)
        ends = [*range(page_size, len(tokens), page_size), len(tokens)]
        found.update(tokens[:end].tobytes() for end in ends)
    return found


class TestMooncake:
    def test_lengths_and_times_are_those_of_the_file(self, tmp_path: Path) -> None:
        path = write(tmp_path / "t.jsonl", request(1500, 600, [5, 6], 9), request(2000, 1, [5], 0))
        trace = read_trace(path)
        assert trace.arrival.tolist() == [1.5, 2.0]
        assert trace.input_len.tolist() == [600, 1]
        assert trace.output_len.tolist() == [9, 0]
        assert trace.max_len == 609
        assert trace.name == "t"

    def test_requests_are_in_order_of_arrival_and_ties_keep_theirs(self, tmp_path: Path) -> None:
        records = [request(5, 10, [0]), request(1, 20, [0]), request(5, 30, [0])]
        trace = read_trace(write(tmp_path / "t", *records))
        assert trace.input_len.tolist() == [20, 10, 30]

    def test_equal_ids_are_equal_tokens_and_others_are_not(self, tmp_path: Path) -> None:
        trace = read_trace(
            write(tmp_path / "t", request(0, 1536, [7, 900, 3]), request(1, 1024, [900, 7]))
        )
        a, b = trace.prompt(0), trace.prompt(1)
        np.testing.assert_array_equal(a[512:1024], b[:512])
        np.testing.assert_array_equal(a[:512], b[512:])
        # chance makes two of 131,072 ids equal now and then
        assert (a[:512] == a[512:1024]).sum() <= 2
        assert (a[:512] == a[1024:]).sum() <= 2

    def test_a_cut_last_block_is_the_beginning_of_its_run(self, tmp_path: Path) -> None:
        trace = read_trace(write(tmp_path / "t", request(0, 700, [1, 2]), request(1, 1024, [1, 2])))
        np.testing.assert_array_equal(trace.prompt(0), trace.prompt(1)[:700])

    def test_tokens_are_int32_ids_of_the_vocabulary(self, tmp_path: Path) -> None:
        tokens = read_trace(write(tmp_path / "t", request(0, 5120, list(range(10))))).prompt(0)
        assert tokens.dtype == np.int32
        assert tokens.min() >= 0
        assert tokens.max() < VOCAB_SIZE
        assert len(np.unique(tokens)) > 4500

    def test_outputs_are_unique_to_their_request(self, tmp_path: Path) -> None:
        trace = read_trace(write(tmp_path / "t", request(0, 8, [0], 50), request(1, 8, [0], 50)))
        a, b = trace.sequence(0)[8:], trace.sequence(1)[8:]
        assert a.shape == b.shape == (50,)
        assert (a == b).sum() <= 1

    def test_block_ids_become_dense_whatever_they_were(self, tmp_path: Path) -> None:
        ids = [[0, 1, 2**61, 2**61 + 1], [1, 2, 2**61]]
        trace = read_trace(
            write(tmp_path / "t", request(0, 2048, ids[0]), request(1, 1100, ids[1]))
        )
        assert trace.block_ids(0).tolist() == [0, 1, 3, 4]
        assert trace.block_ids(1).tolist() == [1, 2, 3]

    def test_another_block_size_can_be_given(self, tmp_path: Path) -> None:
        path = write(tmp_path / "t", request(0, 40, [3, 4, 5]))
        assert read_trace(path, mooncake_block_size=16).block_ids(0).tolist() == [0, 1, 2]

    def test_empty_lines_are_skipped(self, tmp_path: Path) -> None:
        assert len(read_trace(write(tmp_path / "t", "", GOOD, "  ", GOOD, ""))) == 2

    def test_limit_keeps_the_first(self, tmp_path: Path) -> None:
        path = write(tmp_path / "t", request(3, 10, [0]), request(1, 20, [1]), request(2, 30, [2]))
        trace = read_trace(path)
        short = trace.limit(2)
        assert short.input_len.tolist() == [20, 30]
        np.testing.assert_array_equal(short.sequence(1), trace.sequence(1))
        assert len(trace.limit(99)) == 3


class TestAgentic:
    def test_runs_stand_for_consecutive_ids(self, tmp_path: Path) -> None:
        trace = read_trace(write(tmp_path / "t", session("local", (1.5, 200, [[9, 2], [4, 1]]))))
        assert trace.arrival.tolist() == [1.5]
        assert trace.block_ids(0)[:3].tolist() == [1, 2, 0]
        assert trace.input_len.tolist() == [200]

    def test_the_tail_past_whole_blocks_is_unique_to_its_request(self, tmp_path: Path) -> None:
        turns = [(0, 64 + 40, [[1, 1]]), (1, 64 + 40, [[1, 1]])]
        trace = read_trace(write(tmp_path / "t", session("local", *turns)))
        a, b = trace.prompt(0), trace.prompt(1)
        np.testing.assert_array_equal(a[:64], b[:64])
        assert (a[64:] == b[64:]).sum() <= 1

    @pytest.mark.parametrize(("scope", "shared"), [("local", False), ("global", True)])
    def test_ids_mean_something_in_their_scope(
        self, tmp_path: Path, scope: str, shared: bool
    ) -> None:
        turn = (0.0, 64, [[1, 1]])
        trace = read_trace(write(tmp_path / "t", session(scope, turn), session(scope, turn)))
        assert np.array_equal(trace.prompt(0), trace.prompt(1)) == shared

    def test_sessions_start_together(self, tmp_path: Path) -> None:
        first = session("local", (0, 65, [[1, 1]]), (10, 66, [[1, 1]]))
        second = session("local", (5, 67, [[1, 1]]))
        trace = read_trace(write(tmp_path / "t", first, second))
        assert trace.input_len.tolist() == [65, 67, 66]

    def test_a_prompt_shorter_than_a_block_has_no_ids(self, tmp_path: Path) -> None:
        trace = read_trace(write(tmp_path / "t", session("local", (0, 63, []))))
        assert len(trace.prompt(0)) == 63


@pytest.mark.parametrize("record", [GOOD, SESSION], ids=["mooncake", "agentic"])
def test_gzip_is_told_from_the_content(tmp_path: Path, record: dict[str, Any]) -> None:
    plain = write(tmp_path / "a.jsonl", record)
    packed = tmp_path / "b.jsonl"  # no .gz in the name
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    np.testing.assert_array_equal(read_trace(plain).prompt(0), read_trace(packed).prompt(0))


def without(record: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != key}


def turn(**changes: Any) -> dict[str, Any]:
    return {**SESSION, "requests": [TURN, {**TURN, **changes}]}


BAD_LINES: list[tuple[str, Any, str]] = [
    ("not json", "{nonsense", "is not JSON: Expecting property name enclosed in double quotes"),
    ("cut off", '{"timestamp": 0,', "is not JSON: "),
    ("no object", "[1, 2]", "must be a JSON object, got list"),
    ("no time", without(GOOD, "timestamp"), "timestamp: is missing"),
    ("no input", without(GOOD, "input_length"), "input_length: is missing"),
    ("no output", without(GOOD, "output_length"), "output_length: is missing"),
    ("no ids", without(GOOD, "hash_ids"), "hash_ids: is missing"),
    (
        "negative time",
        {**GOOD, "timestamp": -1},
        "timestamp: must be a number in [0, 1e+15], got -1",
    ),
    (
        "time is NaN",
        '{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": [0]}',
        "timestamp: must be a number in [0, 1e+15], got NaN",
    ),
    (
        "time is huge",
        {**GOOD, "timestamp": 10**400},
        "timestamp: must be a number in [0, 1e+15], got 1000000000000000000000000000000000000...",
    ),
    (
        "negative input",
        {**GOOD, "input_length": -5},
        "input_length: must be an int in [1, 16777216], got -5",
    ),
    (
        "no input tokens",
        {**GOOD, "input_length": 0, "hash_ids": []},
        "input_length: must be an int in [1, 16777216], got 0",
    ),
    (
        "input is a float",
        {**GOOD, "input_length": 700.0},
        "input_length: must be an int in [1, 16777216], got 700.0",
    ),
    (
        "input is true",
        {**GOOD, "input_length": True},
        "input_length: must be an int in [1, 16777216], got true",
    ),
    (
        "output is a string",
        {**GOOD, "output_length": "3"},
        'output_length: must be an int in [0, 16777216], got "3"',
    ),
    (
        "negative output",
        {**GOOD, "output_length": -1},
        "output_length: must be an int in [0, 16777216], got -1",
    ),
    (
        "too few ids",
        {**GOOD, "hash_ids": [0]},
        "hash_ids: must hold 2 block ids for 700 tokens in blocks of 512, got 1",
    ),
    (
        "too many ids",
        {**GOOD, "hash_ids": [0, 1, 2]},
        "hash_ids: must hold 2 block ids for 700 tokens in blocks of 512, got 3",
    ),
    ("ids are no list", {**GOOD, "hash_ids": 4}, "hash_ids: must be a list, got 4"),
    (
        "negative id",
        {**GOOD, "hash_ids": [0, -1]},
        "hash_ids[1]: must be an int in [0, 2**62), got -1",
    ),
    (
        "id is null",
        {**GOOD, "hash_ids": [None, 1]},
        "hash_ids[0]: must be an int in [0, 2**62), got null",
    ),
    (
        "id past int64",
        {**GOOD, "hash_ids": [0, 2**63]},
        "hash_ids[1]: must be an int in [0, 2**62), got 9223372036854775808",
    ),
]

BAD_SESSIONS: list[tuple[str, Any, str]] = [
    ("no block size", without(SESSION, "block_size"), "block_size: is missing"),
    (
        "another block size",
        {**SESSION, "block_size": 32},
        "block_size: must be 64 as in the lines before, got 32",
    ),
    (
        "unknown scope",
        {**SESSION, "hash_id_scope": "user"},
        'hash_id_scope: must be "local" or "global", got "user"',
    ),
    ("no requests", without(SESSION, "requests"), "requests: is missing"),
    ("request is a list", {**SESSION, "requests": [[]]}, "requests[0]: must be a JSON object"),
    (
        "no time",
        {**SESSION, "requests": [without(TURN, "t")]},
        "requests[0].t: is missing",
    ),
    (
        "negative time",
        turn(t=-0.5),
        "requests[1].t: must be a number in [0, 1e+15], got -0.5",
    ),
    (
        "negative input",
        turn(**{"in": -130}),
        "requests[1].in: must be an int in [1, 16777216], got -130",
    ),
    ("no output", turn(out=None), "requests[1].out: must be an int in [0, 16777216], got null"),
    (
        "wrong number of ids",
        turn(hash_rle=[[0, 1], [9, 2]]),
        "requests[1].hash_rle: must stand for 2 block ids for 130 tokens in blocks of 64, got 3",
    ),
    (
        "run is no pair",
        turn(hash_rle=[[0, 1, 2]]),
        "requests[1].hash_rle[0]: must be [first id, count], got [0, 1, 2]",
    ),
    (
        "negative run",
        turn(hash_rle=[[0, 4], [7, -2]]),
        "requests[1].hash_rle[1]: must have an id in [0, 2**62) and a count in [1, 16777216], "
        "got [7, -2]",
    ),
]


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        pytest.param(good, bad, message, id=f"{kind}-{name}")
        for kind, good, cases in (("line", GOOD, BAD_LINES), ("session", SESSION, BAD_SESSIONS))
        for name, bad, message in cases
    ],
)
def test_a_bad_line_is_named_with_file_line_and_field(
    tmp_path: Path, good: Any, bad: Any, message: str
) -> None:
    path = write(tmp_path / "trace.jsonl", good, "", bad)
    with pytest.raises(InvalidInputError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:3: {message}")


def test_a_bad_first_line_is_named_too(tmp_path: Path) -> None:
    path = write(tmp_path / "t", without(GOOD, "hash_ids"))
    with pytest.raises(InvalidInputError, match=r"t:1: hash_ids: is missing"):
        read_trace(path)


def test_lines_of_another_kind_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t", {"prompt": "hello"})
    with pytest.raises(
        InvalidInputError, match=r"t:1: neither a Mooncake request .* nor an agentic session"
    ):
        read_trace(path)


def test_formats_do_not_mix(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"t:2: timestamp: is missing"):
        read_trace(write(tmp_path / "t", GOOD, SESSION))


@pytest.mark.parametrize("content", [b"", b"\n\n", gzip.compress(b"")], ids=["0", "blank", "gzip"])
def test_an_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t"
    path.write_bytes(content)
    with pytest.raises(InvalidInputError, match=r"t: no requests in it"):
        read_trace(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidInputError, match=r"nowhere.jsonl: cannot be read: No such file or directory"
    ):
        read_trace(tmp_path / "nowhere.jsonl")


def test_a_folder_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"cannot be read: Is a directory"):
        read_trace(tmp_path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\xff\xfe\x00\n")
    with pytest.raises(InvalidInputError, match=r"t:2: is not "):
        read_trace(path)


def test_a_cut_gzip_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.gz"
    text = "\n".join(json.dumps(request(i, 700, [i, i + 7])) for i in range(2000))
    path.write_bytes(gzip.compress(text.encode())[:-200])
    with pytest.raises(InvalidInputError, match=r"t.gz:\d+: gzip data is damaged"):
        read_trace(path)


def random_trace(path: Path, seed: int, *, tree: bool) -> Trace:
    """Requests of blocks of 16 tokens. With `tree` an id has one parent, as in real traces."""
    rng = np.random.default_rng(seed)
    records = []
    paths: list[list[int]] = [[]]
    fresh = 0
    for i in range(30):
        prefix = paths[rng.integers(len(paths))]
        ids = list(prefix[: rng.integers(len(prefix) + 1)])
        for _ in range(rng.integers(1, 5)):
            ids.append(fresh if tree else int(rng.integers(6)))
            fresh += 1
        paths.append(ids)
        length = len(ids) * 16 - int(rng.integers(16))
        records.append(request(i, length, ids, int(rng.integers(20))))
    return read_trace(write(path, *records), mooncake_block_size=16)


class TestPagesForAll:
    @pytest.mark.parametrize("tree", [True, False], ids=["one-parent", "any-parent"])
    @pytest.mark.parametrize("page_size", [1, 5, 16, 64])
    @pytest.mark.parametrize("seed", [0, 1])
    def test_has_room_for_every_distinct_page(
        self, tmp_path: Path, tree: bool, page_size: int, seed: int
    ) -> None:
        trace = random_trace(tmp_path / "t", seed, tree=tree)
        for outputs in (True, False):
            distinct = len(pages_of(trace, page_size, outputs))
            assert trace.pages_for_all(page_size, 1, outputs=outputs) >= distinct

    def test_counts_shared_pages_once(self, tmp_path: Path) -> None:
        records = [request(i, 5120, list(range(10)), 0) for i in range(100)]
        trace = read_trace(write(tmp_path / "t", *records))
        # 80 pages that all share, and 80 that each of 2 running requests may hold of its own
        assert trace.pages_for_all(64, 2) == 80 + 2 * 80
