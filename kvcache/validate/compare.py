"""Differences between two states, in words."""

from __future__ import annotations

from typing import Any

from kvcache.oracle.state import State

_MOST_LINES = 12


def differences(seen: State, expected: State, settled: bool) -> list[str]:
    """Return a line for each difference; empty if there is none.

    Args:
        seen, expected: the manager's and the oracle's state.
        settled: whether the recency orders, and the keys of windows, are comparable.
    """
    if seen == expected:
        return []
    lines = []
    for name in State._fields:
        ours: Any = getattr(seen, name)
        theirs: Any = getattr(expected, name)
        if not settled and name == "windows":  # a key, too, is computed anew with the recency
            ours, theirs = (
                {page: w._replace(key=0) for page, w in x.items()} for x in (ours, theirs)
            )
        if ours == theirs or (not settled and name in ("full_order", "swa_order")):
            continue
        if isinstance(ours, dict):
            lines += _dict_differences(name, ours, theirs)
        elif isinstance(ours, frozenset):
            missing, extra = sorted(theirs - ours), sorted(ours - theirs)
            lines.append(f"{name}: manager lacks {missing}, has too much {extra}")
        else:
            lines.append(f"{name}: manager {ours}, oracle {theirs}")
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"... and {len(lines) - _MOST_LINES} lines more"]
    return lines


def _dict_differences(name: str, ours: dict[Any, Any], theirs: dict[Any, Any]) -> list[str]:
    keys = sorted({*ours, *theirs}, key=str)
    return [
        f"{name}[{key!r}]: manager {ours.get(key)}, oracle {theirs.get(key)}"
        for key in keys
        if ours.get(key) != theirs.get(key)
    ]
