"""A storm over the simulated engine: thousands of requests, and trouble at random in every step.

Trouble is what a serving engine meets: clients that go away or stop early, retractions, flushes, evictions
from outside, tenants that come and go (more of them than there are namespaces), pools far too small.
`make soak` runs storms for minutes; test_storm.py runs short ones.

    python tests/replay/storm.py --requests 20000 --seed 3
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from array import array
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kvcache import KVCacheManager, Lru, Value, parse_checkpoints
from kvcache.errors import CapacityError
from kvcache.replay.active import ActiveRequest
from kvcache.replay.config import EngineConfig
from kvcache.replay.engine import Engine
from kvcache.replay.scheduler import Scheduler
from kvcache.replay.trace import Trace
from kvcache.replay.workloads import WorkloadSizes, make_workload

# chance in a step
ABORT, STOP, RETRACT, FLUSH, EVICT, DROP = 0.05, 0.03, 0.03, 0.004, 0.02, 0.02
TENANTS, NAMESPACES = 9, 4
SAMPLES = 16  # of memory, over a storm
MEMORY_SLACK = 2000  # blocks that caches of the interpreter and of numba may come to hold meanwhile


@dataclass(frozen=True)
class Weather:
    """One kind of storm: what is served, and by which cache. Sizes in tokens."""

    workload: str
    page_size: int
    window: int | None
    full_tokens: int
    swa_tokens: int | None
    policy: str
    bigram: bool = False
    chunk: int = 256

    @property
    def name(self) -> str:
        return f"{self.workload}, P={self.page_size}, W={self.window}, {self.policy}"


WEATHERS = (
    Weather("shared-prompt", 4, 10, 800, 240, "branch"),
    Weather("multi-turn", 1, 7, 900, 160, "branch,every=16"),
    Weather("forest", 16, 40, 2400, 960, "branch,hints", bigram=True),
    Weather("multi-turn", 3, 2, 900, 150, "none", bigram=True),
    Weather("forest", 4, None, 1000, None, "branch"),
    Weather("shared-prompt", 64, 128, 6400, 2560, "branch,every=128", chunk=1024),
)


@dataclass
class Report:
    """What a storm came to."""

    requests: int = 0
    refused: int = 0  # requests that could never fit
    troubles: dict[str, int] = field(default_factory=dict)
    retractions: int = 0
    leaked_pages: int = -1
    blocks: list[int] = field(default_factory=list)  # of memory that Python holds, at each sample
    host_bytes: list[int] = field(default_factory=list)
    evict_us: array[float] = field(
        default_factory=lambda: array("d")
    )  # CPU time of a page, in order

    @property
    def grown_blocks(self) -> int:
        """Blocks of memory at the end beyond those after a quarter of the storm."""
        return self.blocks[-1] - self.blocks[len(self.blocks) // 4]

    @property
    def evict_ratio(self) -> float:
        """Eviction time in the last quarter over that in the first (their lower quartiles); 0: too few."""
        quarter = len(self.evict_us) // 4
        if quarter < 10:
            return 0.0
        last, first = self.evict_us[-quarter:], self.evict_us[:quarter]
        return statistics.quantiles(last)[0] / statistics.quantiles(first)[0]


class StormScheduler(Scheduler):
    """Matches each request in the namespace of its tenant."""

    storm: StormEngine

    def _must_wait(self, request: ActiveRequest) -> bool:
        handle = self.storm.handle_of(request)
        if handle is None:
            return True  # every namespace is in use by another tenant's running requests
        if request.match is not None and request.match.namespaces[0] != handle:
            request.match = None  # what it found went with the tenant's earlier namespace
        self.storm.matched_in = handle
        return super()._must_wait(request)


class StormEngine(Engine):
    """An engine whose steps each begin with trouble."""

    def __init__(
        self, trace: Trace, config: EngineConfig, manager: KVCacheManager, seed: int
    ) -> None:
        super().__init__(trace, config, manager=manager)
        self._random = random.Random(seed)
        self.report = Report()
        self.matched_in = 0
        match = manager.match
        self._calls.match = lambda keys, **rest: match(keys, namespaces=self.matched_in, **rest)
        self._scheduler = StormScheduler(trace, config, manager.config, self._calls, self.result)
        self._scheduler.storm = self
        self._decoding, self._tokens = self._scheduler.decoding, self._scheduler.tokens
        self._tenants: dict[int, int] = {}  # handle by tenant
        self._every = max(1, len(trace) // SAMPLES)

    def handle_of(self, request: ActiveRequest) -> int | None:
        """Return the namespace of a request; None: the namespaces are all in use."""
        tenant = request.index * 2654435761 % 2**32 % TENANTS
        if tenant == 0:
            return self.manager.namespace(None)
        for _ in range(2):
            try:
                self._tenants[tenant] = self.manager.namespace(tenant)
                return self._tenants[tenant]
            except CapacityError:
                self._drop_idle()
        return None

    def _happens(self, chance: float, what: str) -> bool:
        happens = self._random.random() < chance
        if happens:
            self.report.troubles[what] = self.report.troubles.get(what, 0) + 1
        return happens

    def _drop_idle(self) -> None:
        """Drop the namespace of a tenant of whom nothing runs, if there is one."""
        tree = self.manager.tree
        for tenant, handle in sorted(self._tenants.items()):
            if tree.first_bad_handle(np.array([handle])) >= 0:  # its root was empty and went
                del self._tenants[tenant]
            elif not tree.is_locked(handle):
                self.manager.drop_namespace(handle)
                del self._tenants[tenant]
                return

    def _step(self) -> tuple[int, int]:
        self._trouble()
        done = super()._step()
        if self.result.steps % 50 == 0:
            self.manager.check()
        if self.result.requests + self.result.refused >= self._every * len(self.report.blocks):
            self._take_sample()
        return done

    def _trouble(self) -> None:
        scheduler, manager = self._scheduler, self.manager
        if self._decoding and self._happens(STOP, "stop"):
            self._end([self._random.choice(self._decoding.requests)])
        running = scheduler.prefilling + self._decoding.requests
        if running and self._happens(ABORT, "abort"):
            request = self._random.choice(running)
            request.cancelled = True
            if request in scheduler.prefilling:
                scheduler.prefilled(request)
            self._end([request])
        if scheduler.num_running > 1 and self._happens(RETRACT, "retract"):
            self._retract_youngest()
        if self._happens(FLUSH, "flush"):
            manager.flush()
        if self._happens(EVICT, "evict"):
            self._evict()
        if self._happens(DROP, "drop"):
            self._drop_idle()

    def _take_sample(self) -> None:
        report = self.report
        gc.collect()
        report.blocks.append(sys.getallocatedblocks())
        report.host_bytes.append(self.manager.stats().host_bytes)

    def _evict(self) -> None:
        """Evict one page, timed, then some."""
        start = time.thread_time_ns()
        freed = self.manager.evict(1)
        if freed.full_pages:
            self.report.evict_us.append((time.thread_time_ns() - start) / 1000)
        self.manager.evict(self._random.randrange(40), self._random.randrange(40))


def storm(
    weather: Weather, requests: int, seed: int, manager_type: type[KVCacheManager] = KVCacheManager
) -> Report:
    """Run one storm; raises where a rule breaks. At its end the cache is flushed and checked."""
    large = weather.page_size == 64
    turns = 6
    sizes = WorkloadSizes(
        requests=requests,
        system_len=1000 if large else 150,
        question_len=300 if large else 40,
        output_len=400 if large else 60,
        conversations=max(1, requests // turns),
        turns=turns,
        message_len=30,
        fanout=4,
    )
    trace = make_workload(weather.workload, sizes, seed=seed)
    config = EngineConfig(
        page_size=weather.page_size,
        window=weather.window,
        full_tokens=weather.full_tokens,
        swa_tokens=weather.swa_tokens,
        chunk=weather.chunk,
        running=12,
        abort_every=17,
        checkpoints=parse_checkpoints(weather.policy),
        retention=Value() if seed % 2 else Lru(),
    )
    cache = replace(
        config.cache_config(trace),
        bigram=weather.bigram,
        max_namespaces=NAMESPACES,
        full_pages=weather.full_tokens // weather.page_size,
        swa_pages=(weather.swa_tokens or 0) // weather.page_size,
    )
    engine = StormEngine(trace, config, manager_type(cache), seed)
    result = engine.run()
    engine.manager.check()
    report = engine.report
    report.requests, report.refused = result.requests, result.refused
    report.retractions = result.retractions
    report.leaked_pages = result.leaked_pages
    assert result.requests + result.refused == len(trace), "requests were lost"
    stats = engine.manager.stats()
    assert (
        stats.running_rows == stats.nodes == stats.locked_full_pages == stats.locked_swa_pages == 0
    )
    assert report.leaked_pages == 0, f"{report.leaked_pages} pages leaked"
    return report


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--requests", type=int, default=4000, help="of each storm (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="go on with further seeds for so long"
    )
    args = parser.parse_args(argv)
    end, seed, failed = time.monotonic() + args.seconds, args.seed, False
    while True:
        for weather in WEATHERS:
            start = time.process_time()
            report = storm(weather, args.requests, seed)
            notes: dict[str, Any] = {
                **report.troubles,
                "retract for want of pages": report.retractions - report.troubles.get("retract", 0),
                "refused": report.refused,
                "grown blocks": report.grown_blocks,
                "host KiB": report.host_bytes[-1] // 1024,
                "evict us": round(statistics.median(report.evict_us or [0.0]), 1),
                "evict last/first": round(report.evict_ratio, 2),
            }
            flat = report.grown_blocks < MEMORY_SLACK and report.evict_ratio < 2
            failed |= not flat
            print(
                f"{'ok    ' if flat else 'FAILED'} seed {seed} {weather.name}: {report.requests} requests "
                f"in {time.process_time() - start:.0f} s of CPU, {notes}",
                flush=True,
            )
        seed += 1
        if time.monotonic() >= end:
            return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
