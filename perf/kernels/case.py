"""One job in several versions: what a benchmark file gives, and how versions are compared before timing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from kvcache.errors import KVCacheError

# tensors by name, and what only some versions use: lists that an engine's host holds
State = dict[str, Any]
Outcome = dict[str, torch.Tensor]

OURS, TORCH, SGLANG = "ours", "torch", "sglang"
WINDOW = 128  # tokens, where an operation has a window


class MismatchError(KVCacheError):
    """Two versions of a job gave different results, so they were not timed. Names both and the tensor."""


@dataclass(frozen=True)
class Size:
    """How much work a case is.

    Attributes:
        batch: requests.
        page_size: tokens per page.
        tokens: tokens of the longest request.
        device: where the tensors are.
    """

    batch: int
    page_size: int
    tokens: int
    device: str

    @property
    def pages(self) -> int:
        """Pages of the longest request."""
        return max(1, self.tokens // self.page_size)


@dataclass(frozen=True)
class Version:
    """One way of doing the job.

    Attributes:
        name: OURS, TORCH or SGLANG.
        run: Does the job once, on the state. May put new tensors under old names.
        read: The result in the words that all versions share. A version may leave out what it does not
            keep; what it names must be in the result of OURS.
        changes: Names of the tensors that `run` writes in place.
        captured: Whether a CUDA graph can hold it: no wait for the device, nothing from the host.
    """

    name: str
    run: Callable[[State], object]
    read: Callable[[State], Outcome]
    changes: tuple[str, ...]
    captured: bool = False


@dataclass(frozen=True)
class Case:
    """A job of one size on fixed inputs.

    Attributes:
        state: The inputs; shared by all versions.
        versions: OURS first.
        min_bytes: What any implementation must read and write at least.
        launches: Kernel launches of OURS on a GPU.
    """

    state: State
    versions: tuple[Version, ...]
    min_bytes: int
    launches: int = 1


@dataclass(frozen=True)
class Bench:
    """A line of `kvcache bench`: one job in all sizes.

    Attributes:
        kernel: Name of the file, which is that of the kernel.
        variant: What distinguishes several benchmarks of one kernel; "" for a single one.
        title: What the job is, in a few words.
        make: Builds the case of a size; the same size gives the same case.
    """

    kernel: str
    variant: str
    title: str
    make: Callable[[Size], Case]

    @property
    def name(self) -> str:
        return f"{self.kernel}_{self.variant}" if self.variant else self.kernel


class Run:
    """One version of a case, which can be run again and again on the same inputs."""

    def __init__(self, case: Case, version: Version) -> None:
        self.version = version
        self._start = case.state
        self._saved = {name: case.state[name].clone() for name in version.changes}
        self.state = dict(case.state)

    def restore(self) -> None:
        """Undo what `run` did: device copies, nothing that waits."""
        for name, saved in self._saved.items():
            self._start[name].copy_(saved)
        self.state = dict(self._start)

    def run(self) -> None:
        """Do the job once."""
        self.version.run(self.state)

    def outcome(self) -> Outcome:
        """Return the result of the last run, as copies."""
        return {name: x.clone() for name, x in self.version.read(self.state).items()}


def check_equal(
    case: Case, around: Callable[[Version], AbstractContextManager[None]] = lambda _: nullcontext()
) -> None:
    """Run all versions and compare their results with those of OURS; the state is as before after it.

    Args:
        around: Gives the context in which a version is run.

    Raises:
        MismatchError: They differ, or a version changed nothing at all.
    """
    want: Outcome = {}
    for version in case.versions:
        one = Run(case, version)
        before = one.outcome()
        with around(version):
            one.run()
        got = one.outcome()
        one.restore()
        if all(same(before[name], x) for name, x in got.items()):
            raise MismatchError(f"{version.name} changes nothing")
        want = want or got
        for name, x in got.items():
            if name not in want:
                raise MismatchError(
                    f"{version.name} gives {name}, {case.versions[0].name} does not"
                )
            if not same(want[name], x):
                raise MismatchError(f"{version.name} and {case.versions[0].name} differ in {name}")


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same numbers in the same shape; dtypes may differ."""
    return a.shape == b.shape and bool((a == b).all())


def call(
    function: Callable[..., object], state: State, names: Iterable[str], **scalars: Any
) -> None:
    """Call an operation with tensors of the state by position."""
    function(*(state[name] for name in names), **scalars)


def outputs(*names: str) -> Callable[[State], Outcome]:
    """Return a `read` that gives these tensors of the state as they are."""
    return lambda state: {name: state[name] for name in names}
