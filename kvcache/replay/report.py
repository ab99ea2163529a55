"""Reports of a replay: a table in plain text, and JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvcache.output import align
from kvcache.replay.bound import BOUND
from kvcache.replay.counters import ReplayResult

Cell = Callable[[ReplayResult], str]


def _count(name: str) -> Cell:
    return lambda result: f"{getattr(result, name):,}"


def _percent(name: str) -> Cell:
    return lambda result: f"{100 * getattr(result, name):.2f} %"


def _of_pool(peak: str, pool: str) -> Cell:
    return lambda result: f"{getattr(result, peak):,} of {getattr(result, pool):,}"


# label, cell, whether the bound (no engine, no pools) has it
_ROWS: tuple[tuple[str, Cell, bool] | None, ...] = (
    ("requests", _count("requests"), True),
    ("input tokens", _count("input_tokens"), True),
    ("output tokens", _count("output_tokens"), True),
    ("computed tokens", _count("computed_tokens"), True),
    None,
    ("full hit tokens", _count("full_hit_tokens"), True),
    ("reused tokens", _count("reused_tokens"), True),
    ("full hit rate", _percent("full_hit_rate"), True),
    ("hit rate", _percent("hit_rate"), True),
    ("branch points", _count("branch_points"), True),
    None,
    ("retractions", _count("retractions"), False),
    ("resumed tokens", _count("resumed_tokens"), False),
    ("aborted", _count("aborted"), False),
    ("refused", _count("refused"), False),
    ("evicted Full pages", _count("evicted_full_pages"), False),
    ("evicted SWA pages", _count("evicted_swa_pages"), False),
    ("peak Full pages", _of_pool("peak_full_pages", "full_pages"), False),
    ("peak SWA pages", _of_pool("peak_swa_pages", "swa_pages"), False),
    ("leaked pages", _count("leaked_pages"), True),
    None,
    ("engine steps", _count("steps"), False),
    ("launches", _count("launches"), False),
    ("uploads", _count("uploads"), False),
    ("host us per request", lambda result: f"{result.host_us_per_request:,.1f}", False),
    ("wall seconds", lambda result: f"{result.wall_seconds:,.1f}", True),
)


def table(results: Sequence[ReplayResult]) -> str:
    """Return the counts of runs side by side, a line a count, a column a run."""
    lines: list[list[str] | None] = [["", *(result.policy for result in results)]]
    for row in _ROWS:
        if row is None:
            lines.append(None)
            continue
        label, cell, in_bound = row
        cells = [cell(r) if in_bound or r.policy != BOUND else "-" for r in results]
        lines.append([label, *cells])
    return align(lines)


def calls_table(result: ReplayResult) -> str:
    """Return how often each call of the manager was made, and how long it took."""
    lines: list[list[str] | None] = [["call", "count", "us per call"]]
    for name, call in result.calls.items():
        lines.append([name, f"{call['count']:,}", f"{call['us_per_call']:,.1f}"])
    return align(lines)


def comparison(results: Sequence[ReplayResult]) -> str:
    """Return in words what `none` loses at forks, and what the other policies win back."""
    by_policy = {result.policy: result for result in results}
    none, bound = by_policy["none"], by_policy[BOUND]
    lost = bound.reused_tokens - none.reused_tokens
    lines = [
        f"An infinite cache with full attention reuses {_rate(bound)} of the input; "
        f"windows kept at ends of chunks and prompts alone {_rate(none)}."
    ]
    for policy, result in by_policy.items():
        if policy in ("none", BOUND):
            continue
        won = result.reused_tokens - none.reused_tokens
        share = f" ({100 * won / lost:.1f} % of what is lost)" if lost > 0 else ""
        lines.append(f"{policy} reuses {_rate(result)}: {won:+,} tokens{share}.")
    return "\n".join(lines)


def refusals(result: ReplayResult) -> list[str]:
    """Return a sentence for every reason for which requests were refused."""
    return [
        f"{count:,} request{'s' if count > 1 else ''} refused: {reason}"
        for reason, count in result.refused_reasons.items()
    ]


def _rate(result: ReplayResult) -> str:
    return f"{100 * result.hit_rate:.2f} %"


def as_json(
    trace_name: str, options: Mapping[str, Any], results: Sequence[ReplayResult], *, compare: bool
) -> dict[str, Any]:
    """Return the report: counts at the top level, or one object per policy under `runs`."""
    head: dict[str, Any] = {"trace": trace_name, "options": dict(options)}
    if compare:
        return {**head, "runs": {result.policy: result.as_dict() for result in results}}
    return {**head, **results[0].as_dict()}
