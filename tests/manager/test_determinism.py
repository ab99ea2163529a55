"""Same calls, same state: lengths, victims, page ids, whatever the hash seed of the process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from operation_log import CONFIGS, Digests, assert_same, record, replay

from kvcache.validate.program import Program

CALLS = 300
TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def logs() -> dict[str, Program]:
    return {name: record(f"{name} 0", config, CALLS) for name, config in CONFIGS.items()}


def in_processes(hash_seeds: list[int], programs: list[Program]) -> list[list[list[Digests]]]:
    """Replay logs in a process for each hash seed, at the same time."""
    given = json.dumps([{"config": p.config, "ops": p.ops} for p in programs])

    def replayed(hash_seed: int) -> list[list[Digests]]:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).parent / "operation_log.py")],
            input=given,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(TESTS)},
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    with ThreadPoolExecutor() as pool:
        return [*pool.map(replayed, hash_seeds)]


def test_a_log_does_everything(logs: dict[str, Program]) -> None:
    """Else equal digests would say little."""
    calls = {name for log in logs.values() for name, _ in log.ops}
    assert calls >= {
        *("match", "admit", "extend", "step", "advance", "slide", "commit", "finish", "retract"),
        *("abort", "evict", "flush", "reset", "namespace", "namespaces", "drop_namespace"),
    }
    for log in logs.values():
        states = replay(log)
        assert len({state["pools.page_table"] for state in states}) > CALLS / 8
        assert len({state["tree.nodes"] for state in states}) > CALLS / 8
        assert len({state["stats"] for state in states}) > CALLS / 3


def test_processes_with_other_hash_seeds_come_to_the_same_state(logs: dict[str, Program]) -> None:
    programs = [*logs.values()]
    first, second = in_processes([1, 4242], programs)
    for program, got, want in zip(programs, first, second, strict=True):
        assert_same(program, got, want)
        assert_same(program, got, replay(program))


def test_a_replay_that_differs_would_be_seen(logs: dict[str, Program]) -> None:
    log = logs["P4_W8"]
    states = replay(log)
    late = range(CALLS // 2, CALLS)
    # one that was not refused
    at = next(i for i in late if log.ops[i][0] == "finish" and states[i] != states[i - 1])
    other = Program(log.config, [*log.ops[:at], ("evict", [0, 0]), *log.ops[at + 1 :]])
    with pytest.raises(AssertionError, match=f"after call {at}"):
        assert_same(other, replay(other), states)
