"""Side by side with SGLang's Python and Rust tree cores; run by `make bench-peers` (see README.md)."""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import sys
import time
from pathlib import Path

import agree
import figures
import report
import torch
import w_engine
import w_tree
from makers import CORES, Makers
from timing import Bench

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "perf" / "results" / "cpu"
START = """
import time
marks = [(time.perf_counter(), time.process_time())]
def mark():
    marks.append((time.perf_counter(), time.process_time()))
import torch
mark()
import numpy as np
from kvcache import CacheConfig, KeyBatch, KVCacheManager
config = CacheConfig(page_size=64, window=128, full_pages=4096, swa_pages=1024, max_rows=64, max_len=4096)
cache = KVCacheManager(config)
mark()
cache.match(KeyBatch(np.ones(100, np.int32), [0], [100]))
mark()
print(*(b - a for now, then in zip(marks[1:], marks) for b, a in zip(now, then)))
"""
STAGES = ("import torch", "import kvcache, build a manager", "first match")


def start_up() -> dict[str, float]:
    """Return seconds of the stages of a fresh process, medians of three, wall-clock and CPU."""
    times = []
    for _ in range(4):  # the first one warms the caches of files and code
        done = subprocess.run(
            [sys.executable, "-c", START], check=True, capture_output=True, text=True, cwd="/"
        )
        times.append([float(x) for x in done.stdout.split()])
    names = [f"{stage}, {clock}" for stage in STAGES for clock in ("wall", "CPU")]
    return {
        name: statistics.median(x)
        for name, x in zip(names, zip(*times[1:], strict=True), strict=True)
    }


def run(page_size: int, window: int, args: argparse.Namespace) -> Bench:
    """Check that all sides agree, then time every workload."""
    bench = Bench(page_size, window, quick=args.quick, full=args.full)
    make = Makers()
    began = time.monotonic()

    def say(what: str) -> None:
        print(
            f"  P={page_size} W={window}: {what} ({time.monotonic() - began:.0f} s)",
            file=sys.stderr,
        )
        gc.collect()

    few = args.quick or window > 128
    for seed in range(1 if few else 2):
        tally = agree.check(make, page_size, window, requests=40 if few else 100, seed=seed)
        say(f"the sides agree on {tally.matches} matches with {tally.forks} forks")
        bench.notes[f"agreement, seed {seed}"] = tally.as_json()
    w_tree.match(bench, make)
    say("W1 match, W8 re-match")
    w_tree.insert(bench, make)
    say("W2 insert, admit")
    w_tree.evict(bench, make, 1500 if args.quick else 5000)
    w_tree.evict_growth(bench, Makers(CORES if args.full else ()))
    say("W3 evict")
    w_engine.slide(bench, make)
    say("W4 out-of-window pass")
    w_engine.conversations(bench, make)
    say("W5 conversations")
    w_engine.shared_prompts(bench, make)
    say("W6 shared prompts")
    w_engine.scheduler(bench, make)
    say("W7 scheduler step")
    return bench


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="P = 64, W = 128 only, fewer repeats")
    parser.add_argument(
        "--full", action="store_true", help="SGLang at 50,000 leaves and 200 conversations"
    )
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[64, 1])
    parser.add_argument("--windows", type=int, nargs="+", default=[128, 4096])
    parser.add_argument(
        "--out",
        type=Path,
        help="folder of the results (default: perf/results/cpu; quick: build/peers)",
    )
    parser.add_argument(
        "--append", action="store_true", help="add to the runs of peers.json: ranges over several"
    )
    args = parser.parse_args()
    # the figures that README cites are of a whole run
    args.out = args.out or (ROOT / "build" / "peers" if args.quick else RESULTS)
    torch.set_num_threads(1)
    if args.quick:
        args.page_sizes, args.windows = args.page_sizes[:1], args.windows[:1]
    benches = [run(p, w, args) for p in args.page_sizes for w in args.windows]
    notes = {"start-up, seconds": start_up(), "quick": args.quick, "full": args.full}
    print("\n\n".join(report.markdown(bench) for bench in benches))
    for name, seconds in notes["start-up, seconds"].items():
        print(f"- start-up, {name}: {seconds:.2f} s")
    print(f"- machine: {report.machine()}")
    path = args.out / "peers.json"
    found = report.write_json(path, report.as_json(benches, notes), append=args.append)
    print(f"\n### In short\n\n{figures.summary(found)}\n\n{figures.ranges(found)}\n")
    figures.plot(found, path.with_suffix(".png"))
    print(f"wrote {path} and {path.with_suffix('.png').name}")


if __name__ == "__main__":
    main()
