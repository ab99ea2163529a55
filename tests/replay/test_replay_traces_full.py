"""The published traces, whole: reuse to the token.

The figures come from a replay of the block ids alone, by other code than ours (traces/README.md):
an infinite cache, one request at a time, a window of one block, kept before the end of a prompt or chunk and
before the end that it has without its last token.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from kvcache import Lru, Retention, Value, parse_checkpoints
from kvcache.replay.bound import replay_bound
from kvcache.replay.config import EngineConfig
from kvcache.replay.engine import Engine
from kvcache.replay.readers import read_trace
from kvcache.replay.trace import Trace

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"

# trace: requests, input tokens, tokens that full attention reuses
TOTALS = {
    "mooncake_conversation": (12_031, 144_793_823, 54_063_104),
    "mooncake_synthetic": (3_993, 61_194_628, 39_802_880),
}
REUSED = {
    ("mooncake_synthetic", 0, "none"): 31_136_256,
    ("mooncake_synthetic", 0, "branch"): 35_614_208,
    ("mooncake_synthetic", 8192, "none"): 38_740_992,
    ("mooncake_synthetic", 8192, "branch"): 39_321_600,
    ("mooncake_conversation", 0, "none"): 50_636_288,
    ("mooncake_conversation", 0, "branch"): 51_922_944,
    ("mooncake_conversation", 8192, "none"): 52_521_472,
    ("mooncake_conversation", 8192, "branch"): 53_022_720,
}


@cache
def trace_named(name: str) -> Trace:
    path = TRACES / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    return read_trace(path)


@pytest.mark.parametrize(
    ("name", "chunk", "policy"),
    [
        pytest.param(*case, marks=pytest.mark.slow if "conversation" in case[0] else ())
        for case in REUSED
    ],
)
@pytest.mark.parametrize("retention", [Value(), pytest.param(Lru(), marks=pytest.mark.slow)])
def test_reuses_to_the_token(name: str, chunk: int, policy: str, retention: Retention) -> None:
    trace = trace_named(name)
    config = EngineConfig(
        page_size=512,
        window=512,
        chunk=chunk,
        running=1,
        decode=False,
        checkpoints=parse_checkpoints("chunks" if policy == "none" else f"chunks,{policy}"),
        retention=retention,
    )
    result = Engine(trace, config).run()
    assert (result.requests, result.input_tokens, result.full_hit_tokens) == TOTALS[name]
    assert result.reused_tokens == REUSED[name, chunk, policy]
    assert result.evicted_full_pages == result.evicted_swa_pages == 0
    assert result.leaked_pages == 0


def test_the_bound_is_what_full_attention_reuses() -> None:
    name = "mooncake_synthetic"
    result, _ = replay_bound(trace_named(name), page_size=512, decode=False)
    assert (result.requests, result.input_tokens, result.reused_tokens) == TOTALS[name]
    assert result.leaked_pages == 0


@pytest.mark.parametrize("retention", [Value(), Lru()])
def test_small_pools_with_decode_and_cancellations_leak_nothing(retention: Retention) -> None:
    trace = trace_named("mooncake_conversation").limit(300)
    config = EngineConfig(
        full_tokens=260_000,
        swa_tokens=20_000,
        running=32,
        checkpoints=parse_checkpoints("branch"),
        abort_every=9,
        retention=retention,
        cut_chunks=False,
    )
    engine = Engine(trace, config)
    result = engine.run()
    assert result.leaked_pages == 0
    engine.manager.check()
    assert result.requests + result.refused == 300
    assert result.aborted > 20
    assert result.retractions > 0
    assert result.evicted_full_pages > 0
