"""Running programs: many random ones until the time is up, or a failing one again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from kvcache.checks import check_device
from kvcache.errors import InvalidInputError
from kvcache.validate.driver import Driver
from kvcache.validate.generate import Generator, random_config
from kvcache.validate.program import Program
from kvcache.validate.shrink import shrink
from kvcache.validate.sides import Failure

_MOST_CALLS = 200
# manager.check() takes longer than all else; a replay of a failure runs it after each call
_CHECK_EVERY = 8
_NEVER = 10**9

# what the counts of rare things count; those of refusals name the call and the error
_LEGEND = {
    "adopted": "tombstones of the tree that took the SWA page of a row",
    "branch_points": "matches that found a fork without a window",
    "early_releases": "SWA locks that slide released before the row ended",
    "evicted_full": "Full pages of the tree that were freed",
    "evicted_swa": "SWA pages of the tree that were freed",
    "given_up": "windows that were given up to make room",
    "pinned": "prefixes that were pinned",
    "pins_ended": "pins that ended by their ttl",
    "not_admitted": "rungs of the ladder that were worth less than what had just gone",
    "repointed": "pages of a row that the tree had already",
    "retractions": "rows that were retracted",
    "stored": "pages that the tree took over from a row",
    "tombstoned": "pages of the tree that lost their SWA page alone",
    "trimmed": "tombstones that went since nothing was left below them",
    "windows": "windows that were made",
}
_REFUSED = "calls that both sides refused"


class Outcome(NamedTuple):
    """What one program did."""

    program: Program
    calls: int
    coverage: Counter[str]  # how often each rare thing happened
    failure: str | None  # what went wrong, in words


def failure_of(program: Program, *, check_every: int = 1) -> str | None:
    """Replay a program; return what went wrong, or None. A bad configuration is no failure."""
    try:
        driver = Driver(**program.config, check_every=check_every)
    except InvalidInputError:
        return None
    except Exception as error:
        return describe(error)
    try:
        for name, args in program.ops:
            getattr(driver, name)(*args)
    except Exception as error:
        return describe(error)
    return None


def describe(error: Exception) -> str:
    """What went wrong, in words; a crash of the manager is a failure like any other."""
    return str(error) if isinstance(error, Failure) else f"{type(error).__name__}: {error}"


def random_program(seed: str, *, device: str = "cpu") -> Outcome:
    """Make up one program and run it while doing so; the same seed gives the same program."""
    rng = Random(seed)
    config = random_config(rng)
    program = Program({**config, "device": device} if device != "cpu" else config)
    driver: Driver | None = None
    failure = None
    try:
        driver = Driver(**program.config, check_every=_CHECK_EVERY)
        generator = Generator(rng, config)
        for _ in range(rng.randint(20, _MOST_CALLS)):
            op = generator.op(driver)
            program.ops.append(op)
            getattr(driver, op[0])(*op[1])
        program.ops.append(("end", []))
        driver.end()
    except Exception as error:
        failure = describe(error)
    calls = driver.calls if driver else 0
    coverage: Counter[str] = Counter()
    if driver:
        coverage.update(driver.oracle.counts)
        coverage.update(driver.refusals)
        coverage["retractions"] = driver.retractions
    return Outcome(program, calls, coverage, failure)


def shortest_script(outcome: Outcome) -> str:
    """Shrink a failing program; return a script that repeats the failure."""
    # most failures show in what is compared: check() is then left out, which is faster
    check_every = _NEVER if failure_of(outcome.program, check_every=_NEVER) else 1
    shortest = shrink(
        outcome.program,
        lambda program: failure_of(program, check_every=check_every) is not None,
    )
    failure = failure_of(shortest) or f"not repeatable: {outcome.failure}"
    return shortest.script(failure)


def run(
    seconds: float,
    seed: int,
    *,
    device: str = "cpu",
    first: int = 0,
    programs: int | None = None,
    verbose: bool = False,
    say: Callable[[str], None] = print,
) -> int:
    """Validate until `seconds` have passed, or `programs` programs are done.

    Args:
        seconds: Time to spend; the program that runs then is finished.
        seed: Program n is made from `seed` and n alone.
        device: Where the manager's page ids live.
        first: The number of the first program.
        programs: How many; None: as many as fit.
        verbose: Say the number of each program before it runs: should the process die, the last
            one is to blame.
        say: Where the report goes, a line (or a few) at a time.

    Returns:
        0, or 1 if manager and oracle disagreed; then the shortest failing sequence found was said.

    Raises:
        InvalidInputError: There is no such device here.
    """
    check_device("device", device)
    start = time.monotonic()
    coverage: Counter[str] = Counter()
    done = calls = 0
    number = first
    while time.monotonic() - start < seconds and (programs is None or done < programs):
        if verbose:
            say(f"program {number} of seed {seed}")
        outcome = random_program(f"{seed}/{number}", device=device)
        done += 1
        calls += outcome.calls
        coverage.update(outcome.coverage)
        if outcome.failure is not None:
            say(f"program {number} of seed {seed} fails: {outcome.failure}")
            say(f"shrinking {len(outcome.program.ops)} calls ...")
            say(shortest_script(outcome))
            return 1
        number += 1
    elapsed = time.monotonic() - start
    say(
        f"{done} programs, {calls} calls, {calls / max(elapsed, 1e-9):.0f} calls/s, no disagreement"
    )
    for name, count in sorted(coverage.items()):
        say(f"  {name:32} {count:<9} {_LEGEND.get(name, _REFUSED)}")
    return 0
