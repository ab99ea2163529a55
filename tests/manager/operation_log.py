"""Random operation logs of a manager: recorded once, replayed elsewhere, all state compared after each call.

Run as a file it replays a log from standard input and prints the digests: for a process of its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
from instruments.fakedev import NAME, accelerator, no_host_sync

from kvcache import KVCacheManager
from kvcache.validate import Driver
from kvcache.validate.generate import Generator
from kvcache.validate.program import Program

# digests of the parts of a manager's state, by name
Digests = dict[str, str]

_SIZES: dict[str, Any] = {"full_pages": 40, "swa_pages": 30, "max_rows": 5, "max_namespaces": 3}
CONFIGS: dict[str, dict[str, Any]] = {
    "P4_W8": {"page_size": 4, "window": 8, "max_len": 55, "branch": True, "every": 12, **_SIZES},
    "P3_W7_bigram": {
        "page_size": 3,
        "window": 7,
        "max_len": 40,
        "branch": True,
        "hints": True,
        "bigram": True,
        **_SIZES,
    },
    "P1_full_only": {"page_size": 1, "window": None, "max_len": 20, **_SIZES, "swa_pages": 0},
}


def digests(manager: KVCacheManager) -> Digests:
    """Digest all state, device memory included, part by part: so that a difference has a name."""
    rows, tree = manager.rows, manager.tree
    parts: dict[str, Any] = {f"pools.{k}": x.cpu().numpy() for k, x in vars(manager.pools).items()}
    parts |= {f"rows.{k}": x for k, x in vars(rows).items()}
    names = ("nodes", "meta", "tokens", "table", "locks", "free_locks", "notes")
    parts |= {f"tree.{k}": getattr(tree, k) for k in names}
    parts["namespaces"] = list(manager._namespaces._handles.items())
    parts["stats"] = dataclasses.asdict(manager.stats())
    return {k: _digest(x) for k, x in parts.items()}


def _digest(x: Any) -> str:
    data = x.tobytes() if isinstance(x, np.ndarray) else repr(x).encode()
    return hashlib.sha256(data).hexdigest()[:16]


def record(seed: str, config: dict[str, Any], calls: int) -> Program:
    """Make up a log of `calls` calls: all kinds of them, refused ones too."""
    rng = Random(f"{seed}:1")  # rare calls come up in it
    program = Program(config)
    driver = Driver(**config, check_every=50)
    generator = Generator(rng, config)
    for _ in range(calls):
        op = generator.op(driver)
        program.ops.append(op)
        getattr(driver, op[0])(*op[1])
    return program


def replay(program: Program, make: Callable[..., Driver] = Driver, **config: Any) -> list[Digests]:
    """Make the calls of a log on a new manager; return its state after each. The oracle checks them."""
    driver = make(**program.config, **config, check_every=50)
    found = []
    for name, args in program.ops:
        getattr(driver, name)(*args)
        found.append(digests(driver.manager))
    return found


class WatchedDriver(Driver):
    """Makes every call on the fake accelerator: it must not wait, and costs at most three launches."""

    def __init__(self, **config: Any) -> None:
        super().__init__(device=NAME, **config)

    def both(
        self, what: str, manager: Callable[[], Any], oracle: Callable[[Any], Any]
    ) -> tuple[Any, Any] | None:
        def watched() -> Any:
            with no_host_sync() as seen:
                try:
                    return manager()
                finally:
                    assert seen.uploads <= 1, what
                    assert seen.launches.total() <= 3, what
                    assert seen.pinned == 0, what

        return super().both(what, watched, oracle)


def replay_watched(program: Program, *, lag: int) -> list[Digests]:
    """Replay a log on the fake accelerator, whose copies lag `lag` calls behind; kernels are run."""
    with accelerator(lag=lag):
        return replay(program, WatchedDriver)


def assert_same(program: Program, got: list[Digests], want: list[Digests]) -> None:
    """Compare two replays; name the first call after which they differ, and what differs."""
    assert len(got) == len(want) == len(program.ops)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        differ = [name for name in b if a.get(name) != b[name]]
        assert not differ, f"after call {i}, {program.ops[i]}: {differ}"


if __name__ == "__main__":
    given = json.load(sys.stdin)
    json.dump([replay(Program(p["config"], p["ops"])) for p in given], sys.stdout)
