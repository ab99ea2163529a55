"""Measure benchmarks: results of all versions compared, then each version timed, a row for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

from torch.utils._python_dispatch import TorchDispatchMode

from kvcache.bench.case import OURS, Bench, Case, MismatchError, Run, Size, Version, check_equal
from kvcache.bench.timing import CPU, GRAPH_COLD, WALL, CpuTimer, GpuTimer, Timing


class Row(NamedTuple):
    """One version of one case."""

    bench: str
    kernel: str
    variant: str
    batch: int
    page_size: int
    tokens: int
    version: str
    min_bytes: int
    launches: int  # kernel launches, or torch operations that do work
    timings: dict[str, Timing]  # by mode of timing.MODES

    @property
    def figure(self) -> Timing:
        """The timing that stands for the version: of a graph's replay with a cold L2 where there is one."""
        for mode in (GRAPH_COLD, WALL, CPU):
            if mode in self.timings:
                return self.timings[mode]
        raise KeyError(f"no mode of this row can be shown: {sorted(self.timings)}")

    @property
    def us(self) -> float:
        """Microseconds: median on a GPU, best on a CPU, which others use at the same time."""
        return self.figure.best_us if CPU in self.timings else self.figure.us

    @property
    def gb_per_s(self) -> float:
        """Least bytes over time."""
        return self.min_bytes / self.us / 1e3

    def as_dict(self) -> dict[str, Any]:
        """The row for the JSON."""
        timings = {
            mode: {"us": round(t.us, 3), "best_us": round(t.best_us, 3), "repeats": t.repeats}
            for mode, t in self.timings.items()
        }
        row = {name: value for name, value in self._asdict().items() if name != "variant"}
        figures = {"us": round(self.us, 3), "gb_per_s": round(self.gb_per_s, 4)}
        return {**row, **figures, "timings": timings}


class _CountOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch operations that do work; views and new empty tensors do none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = func.overloadpacket.__name__
        self.count += not (func.is_view or name.startswith(("empty", "new_empty")))
        return func(*args, **(kwargs or {}))


@contextmanager
def count_operations(counts: dict[str, int], name: str) -> Iterator[None]:
    """Put the torch operations in the context that do work on the device under a name."""
    with _CountOperations() as counter:
        yield
    counts[name] = counter.count


@contextmanager
def count_launches(counts: dict[str, int], name: str) -> Iterator[None]:
    """Put the kernels that Triton launches on a GPU in the context under a name."""
    from triton import knobs

    seen: list[object] = []
    hook = seen.append
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        yield
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    counts[name] = len(seen)


def compare(bench: Bench, size: Size, case: Case) -> dict[str, int]:
    """Compare all versions; return the launches and operations that each takes on a GPU.

    They are counted, but for our own launches without a GPU.

    Raises:
        MismatchError: Versions differ.
    """
    counts = {OURS: case.launches}

    def counting(version: Version) -> AbstractContextManager[None]:
        if version.name != OURS:
            return count_operations(counts, version.name)
        return nullcontext() if size.device == "cpu" else count_launches(counts, version.name)

    try:
        check_equal(case, counting)
    except MismatchError as error:
        where = f"{bench.name}, P = {size.page_size}, B = {size.batch}"
        raise MismatchError(f"{where}: {error}") from error
    return counts


def measure_case(bench: Bench, size: Size, case: Case, timer: CpuTimer | GpuTimer) -> list[Row]:
    """Compare the versions of a case, then time each.

    Raises:
        MismatchError: Versions differ; nothing was timed.
    """
    counts = compare(bench, size, case)
    rows = []
    for version in case.versions:
        timings = timer.time(Run(case, version))
        rows.append(
            Row(
                bench.name,
                bench.kernel,
                bench.variant,
                size.batch,
                size.page_size,
                size.tokens,
                version.name,
                case.min_bytes,
                counts[version.name],
                timings,
            )
        )
    return rows


def measure(
    benches: Sequence[Bench],
    sizes: Sequence[Size],
    timer: CpuTimer | GpuTimer,
    *,
    on_bench: Callable[[Bench, list[Row]], object] = lambda bench, rows: None,
) -> list[Row]:
    """Measure each benchmark at each size; `on_bench` gets the rows of each as it is done."""
    all_rows: list[Row] = []
    for bench in benches:
        rows: list[Row] = []
        for size in sizes:
            rows += measure_case(bench, size, bench.make(size), timer)
        on_bench(bench, rows)
        all_rows += rows
    return all_rows
