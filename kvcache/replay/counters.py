"""What a replay counts, and the result that is made of it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from kvcache.manager import KVCacheManager
from kvcache.replay.active import ActiveRequest
from kvcache.replay.calls import TimedCalls

# of a timeline: a plot has no pixels for more
SAMPLES = 500


@dataclass(slots=True)
class ReplayResult:
    """Counts of one replay. Tokens and pages as the names say; the keys of the JSON report.

    Requests that were refused count in `refused` alone. Prefixes reused when a request comes back
    after a retraction count in `resumed_tokens`, so that they cannot raise the hit rate.
    """

    # checkpoints as --checkpoints has them, and ", value" where windows go by it; "bound" for the upper bound
    policy: str
    requests: int = 0  # that ran to their end or were cancelled
    input_tokens: int = 0  # sum of their prompts
    output_tokens: int = 0  # generated for them; 0 without decode
    computed_tokens: int = 0  # that went through the model: prompts, outputs, and those repeated
    full_hit_tokens: int = 0  # sum over first admissions of full_hit_len
    reused_tokens: int = 0  # sum over first admissions of reuse_len
    hit_rate: float = 0.0  # reused_tokens / input_tokens
    full_hit_rate: float = 0.0  # full_hit_tokens / input_tokens
    branch_points: int = 0  # first admissions whose Full hit was longer than what could be reused
    evicted_full_pages: int = 0
    evicted_swa_pages: int = 0
    retractions: int = 0
    retracted_tokens: int = 0  # computed by requests when they were retracted
    resumed_tokens: int = 0  # reused by requests that came back after a retraction
    aborted: int = 0  # cancelled halfway
    refused: int = 0  # can never fit
    refused_reasons: dict[str, int] = field(default_factory=dict)  # reason -> requests
    steps: int = 0
    launches: int = 0
    uploads: int = 0
    upload_bytes: int = 0
    host_us_per_request: float = 0.0  # time in calls of the manager, per request
    calls: dict[str, dict[str, float]] = field(default_factory=dict)  # call -> count, us_per_call
    full_pages: int = 0  # size of the pools
    swa_pages: int = 0
    peak_full_pages: int = 0  # most pages in use by rows and tree, cached ones too
    peak_swa_pages: int = 0
    leaked_pages: int = 0  # not free after everything has ended and the tree was flushed
    simulated_seconds: float = 0.0  # with arrivals
    wall_seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return all counts by name, as JSON can hold them."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def add_ended(self, request: ActiveRequest) -> None:
        """Count a request that has ended."""
        self.requests += 1
        self.input_tokens += request.input_len
        self.output_tokens += max(0, request.computed_len - request.input_len)
        self.full_hit_tokens += request.full_hit_len
        self.reused_tokens += request.reuse_len
        self.branch_points += request.branch_len >= 0
        self.aborted += request.cancelled

    def add_refused(self, reason: str) -> None:
        """Count a request that can never fit."""
        self.refused += 1
        self.refused_reasons[reason] = self.refused_reasons.get(reason, 0) + 1

    def close(self, manager: KVCacheManager, calls: TimedCalls) -> None:
        """Take over what the manager counted, flush it, and see that all pages come back."""
        stats, config = manager.stats(), manager.config
        self.launches, self.uploads = stats.launches, stats.uploads
        self.upload_bytes = stats.upload_bytes
        self.evicted_full_pages = stats.evicted_full_pages
        self.evicted_swa_pages = stats.evicted_swa_pages
        self.full_pages, self.swa_pages = config.full_pages, config.swa_pages
        if self.input_tokens:
            self.hit_rate = self.reused_tokens / self.input_tokens
            self.full_hit_rate = self.full_hit_tokens / self.input_tokens
        self.host_us_per_request = 1e6 * calls.host_seconds / max(1, self.requests)
        for name, count in calls.counts.items():
            if count:
                us_per_call = round(1e6 * calls.seconds[name] / count, 3)
                self.calls[name] = {"count": count, "us_per_call": us_per_call}
        manager.flush()
        self.leaked_pages = sum(used_pages(manager))


def used_pages(manager: KVCacheManager) -> tuple[int, int]:
    """Return the (Full, SWA) pages that are not free: those of rows and of the tree."""
    stats, config = manager.stats(), manager.config
    return config.full_pages - stats.full_pages_free, config.swa_pages - stats.swa_pages_free


@dataclass(slots=True)
class Timeline:
    """Samples over a run, for the plot: one each time another share of the requests has ended."""

    requests: list[int] = field(default_factory=list)
    input_tokens: list[int] = field(default_factory=list)
    reused_tokens: list[int] = field(default_factory=list)
    full_used: list[int] = field(default_factory=list)  # pages in use by rows and tree
    swa_used: list[int] = field(default_factory=list)
    full_locked: list[int] = field(default_factory=list)  # pages that cannot be evicted
    swa_locked: list[int] = field(default_factory=list)

    def sample(self, result: ReplayResult, used: tuple[int, int], locked: tuple[int, int]) -> None:
        """Add a sample: pages (Full, SWA) in use, and those of them that cannot be evicted."""
        self.requests.append(result.requests)
        self.input_tokens.append(result.input_tokens)
        self.reused_tokens.append(result.reused_tokens)
        self.full_used.append(used[0])
        self.swa_used.append(used[1])
        self.full_locked.append(locked[0])
        self.swa_locked.append(locked[1])
