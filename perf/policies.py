"""Hit rates of retention policies at equal memory: `python perf/policies.py TRACE|WORKLOAD ...`.

Every cell is a replay of one trace, or of one workload by name, by the simulated engine, in a process of its
own. The bound is a model of full attention and the same Full pool: what could be reused if windows never
lacked. Counts, not times: the same command gives the same figures on every machine.

    python perf/policies.py mooncake_conversation.jsonl.gz --limit 3000 --full 4194304 --swa 1,2,5
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "cpu" / "policies.json"
# checkpoints, retention, tokens of a chunk before it is cut to an eighth of the SWA pool
POLICIES = {"lru": ("branch", "lru", 8192), "value": ("branch,ladder", "value", 2048)}


def cell(job: dict[str, Any]) -> dict[str, Any]:
    """Run one replay; return the job with its hit rate, in % of the input."""
    from kvcache.policies.checkpoints import parse_checkpoints
    from kvcache.policies.retention import parse_retention
    from kvcache.replay.config import EngineConfig
    from kvcache.replay.engine import Engine
    from kvcache.replay.readers import read_trace
    from kvcache.replay.workloads import WORKLOADS, make_workload

    name = job["trace"]
    trace = make_workload(name) if name in WORKLOADS else read_trace(name)
    trace = trace.cut_outputs(job["max_output"])
    if job["limit"]:
        trace = trace.limit(job["limit"])
    sizes: dict[str, Any] = {"window": None}
    if job["policy"] != "bound":
        checkpoints, retention, chunk = POLICIES[job["policy"]]
        sizes = {
            "window": job["window"],
            "swa_tokens": int(job["full"] * job["share"] / 100),
            "checkpoints": parse_checkpoints(checkpoints),
            "retention": parse_retention(retention),
            "chunk": job["chunk"] or chunk,
        }
    config = EngineConfig(page_size=64, full_tokens=job["full"], running=16, **sizes)
    engine = Engine(trace, config, policy=job["policy"])
    result = engine.run()
    engine.close()
    return {**job, "refused": result.refused, "hit_rate": round(100 * result.hit_rate, 2)}


def jobs(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return all cells: for each trace and Full pool the bound, then every share under every policy."""
    found = []
    for trace in args.traces:
        for full in args.full:
            job = {
                "trace": trace,
                "full": full,
                "window": args.window,
                "chunk": args.chunk,
                "limit": args.limit,
                "max_output": args.max_output,
            }
            found.append({**job, "policy": "bound", "share": None})
            found += [
                {**job, "policy": policy, "share": share}
                for share in args.swa
                for policy in POLICIES
            ]
    return found


def table(cells: list[dict[str, Any]]) -> str:
    """Return the cells as Markdown: share of the bound, and hit rate in % of the input."""
    bounds = {(c["trace"], c["full"]): c["hit_rate"] for c in cells if c["policy"] == "bound"}
    lines = [
        "| trace, Full tokens, bound | SWA | " + " | ".join(POLICIES) + " |",
        "| --- | --: |" + " --: |" * len(POLICIES),
    ]
    for trace, full in bounds:
        bound = bounds[trace, full]
        mine = [c for c in cells if (c["trace"], c["full"]) == (trace, full) and c["share"]]
        for share in dict.fromkeys(c["share"] for c in mine):
            rates = {c["policy"]: c["hit_rate"] for c in mine if c["share"] == share}
            shown = [f"{100 * rates[p] / bound:.1f} % ({rates[p]:.2f})" for p in POLICIES]
            name = f"{Path(trace).name.split('.')[0]}, {full:,}, {bound:.2f}"
            lines.append(f"| {name} | {share:g} % | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _numbers(kind: Any) -> Any:
    return lambda text: [kind(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("traces", nargs="+", metavar="TRACE|WORKLOAD")
    parser.add_argument("--full", type=_numbers(int), default=[1 << 20, 1 << 22], metavar="N,...")
    parser.add_argument("--swa", type=_numbers(float), default=[1.0, 2.0, 5.0], metavar="%,...")
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--chunk", type=int, default=0, help="0: each policy's own")
    parser.add_argument("--limit", type=int, default=0, help="requests of each trace; 0: all")
    parser.add_argument("--max-output", type=int, default=64)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    with ProcessPoolExecutor(args.processes) as pool:
        cells = list(pool.map(cell, jobs(args)))
    report = {
        "command": " ".join(["python", "perf/policies.py", *sys.argv[1:]]),
        "machine": platform.processor() or platform.machine(),
        "versions": {name: version(name) for name in ("numpy", "numba")},
        "cells": [{**c, "trace": Path(c["trace"]).name} for c in cells],
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(table(cells))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
